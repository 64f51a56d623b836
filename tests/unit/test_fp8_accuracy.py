# SPDX-License-Identifier: Apache-2.0
"""The accuracy report: its inputs, upstream's method, its rows and its page."""

import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import fp8_accuracy  # noqa: E402
import fp8_inputs  # noqa: E402
import fp8_layers  # noqa: E402
import fp8_page  # noqa: E402
from csv_log import CsvLog  # noqa: E402
from environment import Environment  # noqa: E402
from failures import Failures  # noqa: E402
from fp8_inputs import INPUTS, QKV, Size, draw  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the GPU has the real report"
)

SMALL = Size(tokens=160, heads=2, grid=16, depth=1)
ENVIRONMENT = {name: "x" for name in Environment.__dataclass_fields__}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_the_same_in_every_run_and_new_in_every_pass(name):
    first, again, other = (draw(name, 3, index, SMALL, 72) for index in (0, 0, 1))
    for x, y, z in zip(first, again, other, strict=True):
        assert x.shape == (160, 2, 72) and x.dtype == torch.bfloat16
        assert torch.equal(x, y) and not torch.equal(x, z)


def test_outlier_channels_are_the_same_in_all_passes():
    means = [
        draw("outliers", 1, index, SMALL, 72).k.float().mean(0) for index in range(2)
    ]
    large = means[0].abs() > 15
    assert large.sum() == 2
    torch.testing.assert_close(means[0][large], means[1][large], rtol=0.1, atol=0)


def test_skewed_and_massive_inputs_are_as_described():
    k = draw("skewed", 0, 0, SMALL, 72).k
    assert (k[..., ::4] < 0).all() and (k[..., 1::4] > 0).any()
    k = draw("massive", 0, 0, SMALL, 72).k.float()
    assert (k.norm(dim=(1, 2)) > 1000).sum() == 4


def test_upstream_takes_signed_maxima_over_all_passes():
    passes = [
        QKV(*(torch.tensor([low, high]) for low in (-9.0, -5.0, -3.0)))
        for high in (2.0, 4.0, 1.0)
    ]
    scales = fp8_accuracy.upstream_scales(passes)
    torch.testing.assert_close(scales, torch.full((3,), 4 / 448))
    scales = fp8_accuracy.static_scales(passes)
    torch.testing.assert_close(scales, 1.5 * torch.tensor([9.0, 5.0, 4.0]) / 448)
    negative = [QKV(*(torch.full((2,), -1.0) for _ in range(3)))]
    # What vLLM clamps to: everything saturates.
    assert (fp8_accuracy.upstream_scales(negative) < 1e-37).all()


def rows_of(name):
    return [
        {**row, **ENVIRONMENT}
        for row in fp8_accuracy.attention_rows(name, 0, SMALL, 72, ["reference_fp8"])
    ]


@pytest.fixture(scope="module")
def skewed():
    with torch.inference_mode():
        return rows_of("skewed")


def test_every_method_is_measured(skewed):
    assert [row["method"] for row in skewed] == list(fp8_page.METHODS)
    error = {row["method"]: float(row["err_fp32"]) for row in skewed}
    assert error["bf16"] < 0.005
    assert all(0.01 < error[m] < 0.12 for m in ("block", "dynamic", "static"))
    # All of the largest values are negative.
    assert error["upstream"] > 2 * error["block"]
    assert float(skewed[0]["err_bf16"]) == 0


def test_what_could_not_run_is_an_exit_status(monkeypatch, tmp_path):
    def broken(*given):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(fp8_accuracy, "attention_rows", broken)
    options = ["--levels", "attention", "--inputs", "skewed", "--seeds", "0"]
    given = ["--smoke", *options, "--output", str(tmp_path / "rows.csv")]
    monkeypatch.setattr(sys, "argv", ["fp8_accuracy.py", *given])
    precision = torch.get_float32_matmul_precision()
    with pytest.raises(SystemExit) as ended:
        fp8_accuracy.main()
    torch.set_float32_matmul_precision(precision)
    assert ended.value.code == 1


def test_the_page_follows_from_the_file(skewed, tmp_path):
    path = tmp_path / "rows.csv"
    log = CsvLog(path, fp8_page.COLUMNS)
    outliers = [{**row, "input": "outliers"} for row in skewed]
    for row in (*skewed, *outliers, *outliers):
        log.add(row)
    tower = {**skewed[1], "level": "tower", "model": "M", "tokens": 4624}
    log.add(tower)
    rows = fp8_page.read_rows(path)
    assert len(rows) == 11
    layers = [
        {**tower, "level": "layers", "method": method, "input": name}
        for method in ("bf16", "tensor, vLLM", "tensor")
        for name in ("images", "outliers")
    ]
    page = fp8_page.markdown(rows)
    assert "in FP8\n" not in page
    page = fp8_page.markdown([*rows, *layers])
    assert "| model | input | bf16 | tensor, vLLM | tensor |" in page
    assert "| M | `outliers` |" in page
    assert "| input | head dim | bf16 | block | dynamic | static | upstream |" in page
    assert "`reference_fp8`" in page and "| M | block |" in page
    ratio = float(skewed[1]["err_fp32"]) / float(skewed[4]["err_fp32"])
    assert f"is {ratio:.2f} times that of" in page and "within the bar" in page
    for name, kind in INPUTS.items():
        assert f"- `{name}`: {kind.text}." in page


def test_images_are_seeded():
    first, again, other = (fp8_inputs.draw_image(seed, 64) for seed in (0, 0, 1))
    assert first.size == (64, 64)
    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_linear_layers_are_measured_beside_those_of_vllm(monkeypatch):
    from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES
    from vllm_flashinfer_vit.towers import tower as towers

    monkeypatch.setenv(ENV_DISABLE_PATCHES, "add_norm")
    build, asked = towers.build_tower, []

    def on_cpu(spec, *, quantization=None, attn_dtype=None, **options):
        # A CPU has neither.
        asked.append((quantization, attn_dtype, os.environ[ENV_DISABLE_PATCHES]))
        if quantization == "fp8_per_channel" and attn_dtype is None:
            raise RuntimeError("vLLM cannot")
        return build(spec, **options)

    monkeypatch.setattr(towers, "build_tower", on_cpu)
    failures = Failures()
    rows = list(
        fp8_layers.layer_rows(
            "Qwen/Qwen3-VL-8B-Instruct", SMALL, failures, fp8_accuracy._distances
        )
    )
    assert len(failures.lines) == 4
    names = ["bf16", "tensor, vLLM", "tensor", "tensor, FP8 attention"]
    names.append("channel, FP8 attention")
    assert [row["method"] for row in rows] == names * 2
    assert asked[2:5] == [
        ("fp8", None, "fp8_linear"),
        ("fp8", None, "add_norm"),
        ("fp8", "fp8", "add_norm"),
    ]
    plain, outliers = rows[0], rows[5]
    assert plain["err_fp32"] != outliers["err_fp32"]
    assert set(plain) | set(ENVIRONMENT) == set(fp8_page.COLUMNS)


def test_outliers_are_of_norms_in_blocks_alone():
    visual = torch.nn.Module()
    block = torch.nn.ModuleDict({"norm1": torch.nn.LayerNorm(64)})
    visual.blocks = torch.nn.ModuleList([block])
    visual.norm = torch.nn.LayerNorm(64)
    fp8_layers.add_outliers(visual)
    weight = block["norm1"].weight
    assert int((weight == 30).sum()) == 8 and int((weight == 1).sum()) == 56
    assert (visual.norm.weight == 1).all() and not block["norm1"].bias.any()

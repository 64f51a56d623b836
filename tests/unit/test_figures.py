# SPDX-License-Identifier: Apache-2.0
"""Tables, figures and the files that they come from."""

import dataclasses
import re
from pathlib import Path

import pytest
from _benchmarks import BENCHMARKS, ENVIRONMENT, host_rows, make_row, write_rows

import chosen_rows
import waterfall
from csv_log import CsvLog, results_path
from environment import ENVIRONMENT_COLUMNS
from vllm_flashinfer_vit.kernels import catalog


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("_quantize_blocks_kernel", "quantizer"),
        ("_rope_kernel", "rotary"),
        ("_turn_kernel", "rotary"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16>", "rotary"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("_window_kernel", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "GEMM"),
        ("_sum_norm_kernel", "norm"),
        ("_norm_add_kernel", "norm"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "norm"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", "norm"),
        ("void at::native::reduce_kernel<512, 1, MeanOps<float>>", "norm"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16>", "activation"),
        ("at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)", "activation"),
        ("void at::native::CatArrayBatchedCopy_vectorized<...>", "copy"),
        ("vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>>", "addition"),
        ("BinaryFunctor<float, float, float, MulFunctor<float>>", waterfall.OTHER),
    ],
)
def test_kernels_are_told_apart(kernel, name):
    assert waterfall.class_of(kernel) == name


def test_a_kernel_of_this_package_has_a_class():
    texts = (path.read_text() for path in Path(catalog.__file__).parent.glob("*.py"))
    found = [
        re.findall(r"^def (_\w+_kernel)\(", text, flags=re.MULTILINE) for text in texts
    ]
    names = {name for each in found for name in each}
    assert {"_redo_kernel", "_hopper_bf16_kernel"} < names
    assert {n for n in names if waterfall.class_of(n) == waterfall.OTHER} == set()


def test_class_times_are_sums():
    kernels = {"nvjet_a": 2.0, "_rope_kernel": 0.5, "nvjet_b": 1.0, "odd": 4.0}
    assert waterfall.class_times(kernels) == {
        "rotary": (0.5, 1),
        "GEMM": (3.0, 2),
        waterfall.OTHER: (4.0, 1),
    }


@pytest.fixture
def plot():
    pytest.importorskip("matplotlib")
    import plot

    return plot


@pytest.fixture
def figures():
    pytest.importorskip("matplotlib")
    import figures

    return figures


@pytest.mark.parametrize("kind", ["encoder", "attention"])
def test_figure_from_a_csv(plot, tmp_path, kind):
    source, target = tmp_path / "rows.csv", tmp_path / "figures" / "a.svg"
    log = CsvLog(source)
    # 1x256 of the plugin is missing: a provider that cannot run leaves a gap.
    for provider, case in [
        ("stock-flash_attn", "1x256"),
        ("stock-flash_attn", "mixed"),
        ("plugin", "mixed"),
    ]:
        log.add(make_row(provider=provider, case=case))
    plot.draw(kind, source, target)
    svg = target.read_text()
    for text in ("stock-flash_attn", "plugin", "1x256", "mixed", "NVIDIA H200"):
        assert text in svg
    first = target.read_bytes()
    plot.draw(kind, source, target, {"mode": ["graph"], "model": None})
    assert target.read_bytes() == first
    with pytest.raises(chosen_rows.NoRowsError, match="mode eager, but with graph$"):
        plot.draw(kind, source, target, {"mode": ["graph", "eager"]})
    some = {"provider": ["plugin"], "bench": ["encoder"]}
    log.add(make_row(bench="other", provider="stock-flashinfer"))
    some["provider"] = ["stock-flashinfer"]
    with pytest.raises(ValueError, match="no rows of stock-flashinfer, encoder"):
        plot.draw(kind, source, target, some)


def test_equal_times_are_equal_speeds(plot):
    # 119.4 * 1.2507 / 1.2507 is above 119.4, and matplotlib refuses such an error bar.
    row = {"case": "a", "provider": "b", "tflops": "119.4"}
    row |= dict.fromkeys(("p20_ms", "p50_ms", "p80_ms"), "1.2507")
    (span,) = plot._speeds([row])
    assert span.low == span.middle == span.high == 119.4


def test_whom_to_profile_is_named_with_how_its_blocks_run(monkeypatch, capsys) -> None:
    given = ["stock-flash_attn4-q8:compiled", "plugin-fp8:eager"]
    monkeypatch.setattr("sys.argv", ["waterfall.py", "--contenders", *given])
    stock, plugin = waterfall.parse_args().contenders
    assert (stock.backend, stock.quantization) == ("FLASH_ATTN", "fp8")
    assert (stock.flash_attn_version, stock.blocks) == (4, "compiled")
    assert (plugin.attn_dtype, plugin.blocks) == ("fp8", "eager")
    assert not plugin.is_stock
    for wrong, said in [("plugin", "PROVIDER:BLOCKS"), ("stok:eager", "'stok'")]:
        monkeypatch.setattr("sys.argv", ["waterfall.py", "--contenders", wrong])
        with pytest.raises(SystemExit):
            waterfall.parse_args()
        assert said in capsys.readouterr().err


def test_waterfall_from_a_csv(plot, tmp_path):
    source, target = tmp_path / "rows.csv", tmp_path / "figures" / "a.svg"
    columns = (*waterfall.COLUMNS, *waterfall.ENVIRONMENT_COLUMNS)
    log = CsvLog(source, columns)
    with pytest.raises(chosen_rows.NoRowsError, match="measure"):
        waterfall.draw(source, target)
    rows = []
    for provider, name, time_ms in [
        ("stock-flash_attn", "GEMM", 20.0),
        ("stock-flash_attn", "norm", 10.0),
        ("plugin", "GEMM", 16.0),
    ]:
        values = ("a model", "8x4096", provider, "eager", "bf16", name, time_ms, 1)
        row = dict(zip(waterfall.COLUMNS, values, strict=True))
        old = {**dataclasses.asdict(ENVIRONMENT), "commit": "old"}
        log.add({**row, "class": "rotary", **old})
        rows.append({**row, **dataclasses.asdict(ENVIRONMENT)})
    for row in rows:
        log.add(row)
    waterfall.draw(source, target)
    svg = target.read_text()
    for text in ("stock-flash_attn", "plugin", "GEMM", "norm", "a model, 8x4096", "30"):
        assert text in svg
    assert "rotary" not in svg
    first = target.read_bytes()
    waterfall.draw(source, target)
    assert target.read_bytes() == first


def test_host_figure_from_a_csv(plot, figures, tmp_path):
    source = write_rows(tmp_path / "host.csv", host_rows())
    target = tmp_path / "figures" / "host.svg"
    plot.draw("host", source, target)
    svg = target.read_text()
    for text in ("stock-flash_attn, fused ops", "norm", "qkv", "attention", "307"):
        assert text in svg
    # The steps' sum stands at the end of their bar.
    assert ">60<" in svg
    assert "777" not in svg and "888" not in svg
    for provider in ("stock-flash_attn", "plugin"):
        assert figures.COLOURS[provider].lower() in svg
    for colour in figures.CLASS_COLOURS[:3]:
        assert colour.lower() in svg
    first = target.read_bytes()
    plot.draw("host", source, target)
    assert target.read_bytes() == first


def test_host_figure_needs_towers_and_steps_of_one_case(plot, tmp_path):
    target = tmp_path / "host.svg"
    for name, rows in (
        ("other.csv", host_rows(tower_case="1x1024")),
        ("no_steps.csv", host_rows(steps=())),
    ):
        source = write_rows(tmp_path / name, rows)
        with pytest.raises(ValueError, match="1x256 and of step_host"):
            plot.draw("host", source, target)
    source = write_rows(
        tmp_path / "many.csv", host_rows(steps=tuple(map(str, range(10))))
    )
    with pytest.raises(ValueError, match="10 steps, but 9 colours"):
        plot.draw("host", source, target)
    assert not target.exists()


def drawn(plot, kind, tmp_path, rows):
    """Return the text of a figure of rows, each with its commit."""
    source, target = tmp_path / "rows.csv", tmp_path / "a.svg"
    source.unlink(missing_ok=True)
    write_rows(source, [{**row, "commit": commit} for commit, row in rows])
    plot.draw(kind, source, target)
    return target.read_text()


def test_the_last_of_repeated_rows_is_drawn(plot, tmp_path):
    rows = [("one", make_row(samples_ms=[ms])) for ms in (1.0, 3.0)]
    svg = drawn(plot, "encoder", tmp_path, rows)
    assert "3 ms" in svg and "1 ms" not in svg


@pytest.mark.parametrize("kind", ["encoder", "attention"])
def test_bars_beside_each_other_are_of_one_run(plot, figures, tmp_path, kind):
    stock, fp8 = "stock-flash_attn", "plugin-fp8"
    rows = [
        *(("old", make_row(provider=p)) for p in (stock, "plugin", fp8)),
        *(("new", make_row(provider=p)) for p in (stock, "plugin")),
    ]
    svg = drawn(plot, kind, tmp_path, rows)
    assert figures.COLOURS[fp8].lower() not in svg.lower()
    assert "commit new" in svg and "commit old" not in svg
    # Of another case nobody measured anything since.
    rows.append(("old", make_row(provider=fp8, case="mixed")))
    rows.append(("old", make_row(provider=stock, case="mixed")))
    svg = drawn(plot, kind, tmp_path, rows)
    assert figures.COLOURS[fp8].lower() in svg.lower() and "commit old" in svg


def test_times_are_over_one_contender_in_all_cases(plot, tmp_path):
    rows = [
        ("old", make_row(provider="stock-flash_attn")),
        ("old", make_row(provider="plugin")),
        ("old", make_row(provider="stock-flash_attn", case="mixed")),
        ("new", make_row(provider="plugin", case="mixed")),
    ]
    with pytest.raises(ValueError, match=r"mixed: .* commit new, has no row of stock-"):
        drawn(plot, "encoder", tmp_path, rows)


def test_a_bar_of_the_host_is_of_one_run(plot, tmp_path):
    old = [("old", {**row, "p50_ms": "0.4000"}) for row in host_rows()]
    new = [("new", row) for row in host_rows(steps=("qkv",))]
    svg = drawn(plot, "host", tmp_path, [*old, *new])
    # Steps that the new run does not have are no part of its sum.
    assert ">10<" in svg and "attention" not in svg and "commit old" not in svg


def test_a_file_without_rows_is_not_drawn(plot, tmp_path):
    source = tmp_path / "empty.csv"
    CsvLog(source)
    with pytest.raises(chosen_rows.NoRowsError, match="measure"):
        plot.draw("encoder", source, tmp_path / "a.svg")


def test_figures_are_of_one_vllm(plot, tmp_path):
    source, target = tmp_path / "rows.csv", tmp_path / "a.svg"
    log = CsvLog(source)
    log.add(make_row())
    log.add({**make_row(), "vllm": "0.33.0", "quack": "0.6.5"})
    with pytest.raises(SystemExit, match="--vllm"):
        plot.draw("encoder", source, target)
    plot.draw("encoder", source, target, vllm="0.25.1")
    assert "vLLM 0.25.1" in (svg := target.read_text())
    assert "QuACK 0.5.0" in svg and "0.33.0" not in svg
    columns = (*waterfall.COLUMNS, *ENVIRONMENT_COLUMNS)
    values = {**make_row(), "blocks": "eager", "class": "GEMM", "ms": 1, "kernels": 1}
    log = CsvLog(tmp_path / "waterfall.csv", columns)
    for vllm in ("0.25.1", "0.33.0"):
        log.add({name: {**values, "vllm": vllm}[name] for name in columns})
    with pytest.raises(SystemExit, match="--vllm"):
        waterfall.draw(log.path, target)
    waterfall.draw(log.path, target, "0.33.0")
    assert "vLLM 0.33.0" in target.read_text()
    with pytest.raises(chosen_rows.NoRowsError, match="no such rows of vLLM 0.1"):
        waterfall.draw(log.path, target, "0.1")
    with pytest.raises(chosen_rows.NoRowsError, match="no such rows of vLLM 0.1"):
        plot.draw("encoder", source, target, vllm="0.1")


def test_a_profile_is_of_the_vllm_that_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["waterfall.py", "--smoke", "--vllm", "0.33.0"])
    with pytest.raises(SystemExit):
        waterfall.parse_args()
    assert (
        "--vllm picks rows that are there: it needs --draw" in capsys.readouterr().err
    )


def test_each_contender_has_one_colour_of_its_own(figures):
    assert len(set(figures.COLOURS.values())) == len(figures.COLOURS)
    assert not set(figures.COLOURS.values()) & set(figures.CLASS_COLOURS)
    assert {f"plugin-{kernel}" for kernel in catalog.KERNELS} <= set(figures.COLOURS)
    with pytest.raises(ValueError, match="plugin-odd"):
        figures.colour_of("plugin-odd")


def test_a_contender_keeps_its_colour_in_any_company(plot, figures, tmp_path):
    source = tmp_path / "rows.csv"
    log = CsvLog(source)
    for provider in ("stock-flash_attn", "stock-flashinfer", "plugin"):
        log.add(make_row(provider=provider))
    for kind in ("encoder", "attention"):
        for providers in (["plugin"], ["stock-flash_attn", "plugin"], None):
            target = tmp_path / "a.svg"
            plot.draw(kind, source, target, {"provider": providers})
            svg = target.read_text().lower()
            assert figures.COLOURS["plugin"].lower() in svg
            assert "is better" in svg and "nxl: n images of l patches" in svg
            shown = figures.COLOURS["stock-flashinfer"].lower() in svg
            assert shown == (providers is None)


@pytest.mark.parametrize(
    ("background", "text"),
    [("#332288", "white"), ("#444444", "white"), ("#88CCEE", "black")],
)
def test_digits_are_readable_on_their_bar(figures, background, text):
    assert figures.text_colour(background) == text


def test_the_commands_of_figures_name_the_gpu_and_the_vllm_of_each() -> None:
    readme = (BENCHMARKS / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^python .*docs/figures/.*$", readme, re.MULTILINE)
    drawn = set()
    for command in commands:
        (figure,) = re.findall(r"docs/figures/\S+", command)
        svg = (BENCHMARKS.parent / figure).read_text()
        found = set(re.findall(r"(NVIDIA [^,<]+), vLLM ([\d.]+),", svg))
        ((gpu, vllm),) = found
        folder = results_path("any", gpu, None).parent.name
        assert f" benchmarks/results/{folder}/" in command, figure
        assert f"--vllm {vllm}" in command.split("#")[0], figure
        drawn.add(figure)
    committed = (BENCHMARKS.parent / "docs" / "figures").glob("*.svg")
    assert drawn == {f"docs/figures/{path.name}" for path in committed}


def test_bars_are_in_the_order_of_their_sizes(plot):
    cases = ["win64x256", "mixed", "8x4096", "1x1024\n2 ms", "20x400", "video16x1024"]
    cases.insert(0, "1x4096")
    assert [
        case.partition("\n")[0] for case in sorted(cases, key=plot._case_order)
    ] == [
        "1x1024",
        "1x4096",
        "20x400",
        "8x4096",
        "video16x1024",
        "mixed",
        "win64x256",
    ]

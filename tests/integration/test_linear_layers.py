# SPDX-License-Identifier: Apache-2.0
"""Which linear layers of a tower are quantised, as `encode` checks and says it."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _blocks import SPECS, build, linear_steps, programs
from _encode import MODEL, options, save_image
from _fp8_layers import layers_of, served
from _towers import cpu_only, small_spec, small_tower
from rich.console import Console

from vllm_flashinfer_vit.blocks.fp8_linear import Fp8Linear
from vllm_flashinfer_vit.commands import encode
from vllm_flashinfer_vit.towers import tower as towers
from vllm_flashinfer_vit.towers.linear_layers import check_unquantized, how_layers_run
from vllm_flashinfer_vit.towers.spec import TowerError
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

pytestmark = cpu_only


def do_not(*args: Any, **kwargs: Any) -> None:
    pytest.fail("it was done before it was refused")


class TestUnquantized:
    @pytest.mark.parametrize(
        "pattern",
        [
            "visual.blocks.0.mlp.down_proj",
            "re:.*attn.*",
            "re:visual.blocks",
            # A part of a layer that vLLM fuses; others may name the rest.
            "re:.*gate_proj",
        ],
    )
    def test_what_fits_a_layer(self, pattern: str) -> None:
        visual = small_tower("qwen2_5_vl").visual
        check_unquantized(visual, small_spec("qwen2_5_vl"), [pattern])

    @pytest.mark.parametrize(
        "pattern",
        [
            "visual.blocks.9.mlp.down_proj",
            "blocks.0.mlp.down_proj",
            "re:attn",
            # A norm is no linear layer.
            "visual.blocks.0.norm1",
        ],
    )
    @pytest.mark.parametrize("family", SPECS)
    def test_what_fits_none(self, family: str, pattern: str) -> None:
        visual = small_tower(family).visual
        given = ["re:.*attn.*", pattern]
        message = f"--unquantized {pattern!r} fits no linear layer of small {family}"
        with pytest.raises(TowerError, match=re.escape(message)):
            check_unquantized(visual, small_spec(family), given)

    def test_a_tower_is_not_built(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(towers, "check_quantization", lambda *_: None)
        monkeypatch.setattr(towers, "fill_with_random_weights", do_not)
        with pytest.raises(TowerError, match="'a' fits no linear layer"):
            build_tower(
                small_spec("qwen3_vl"),
                backend="TORCH_SDPA",
                dtype=torch.float32,
                device="cpu",
                unquantized=["a"],
            )

    def test_nothing_is_encoded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(encode, "check_quantization", lambda *_: None)
        monkeypatch.setattr(encode, "_encode_all", do_not)
        path = save_image(tmp_path / "a.png", 60, 60)
        with pytest.raises(TowerError, match="'re:atn' fits no linear layer"):
            encode.run(
                options(path, quantization="fp8_per_tensor", unquantized=["re:atn"])
            )


@pytest.mark.parametrize(
    "quantized", [{"quantization": "fp8"}, {"unquantized": ["re:.*"]}]
)
def test_a_model_that_is_built_whole_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantized: dict[str, Any]
) -> None:
    monkeypatch.setattr(encode, "image_processor", do_not)
    monkeypatch.setattr(encode, "check_backend", do_not)
    path = save_image(tmp_path / "a.png", 60, 60)
    with pytest.raises(TowerError, match="not quantised outside an engine"):
        encode.run(options(path, model="google/gemma-3-4b-it", **quantized))


def in_programs(tower: Tower) -> int:
    return sum(
        isinstance(step, Fp8Linear)
        for one in programs(tower)
        for step in linear_steps(one)
    )


@pytest.mark.usefixtures("fp8")
class TestHowLayersRun:
    @pytest.mark.parametrize("left_out", ["no layer", "attn.", "blocks.0.mlp"])
    @pytest.mark.parametrize("family", SPECS)
    def test_all_of_fp8_in_programs(self, family: str, left_out: str) -> None:
        tower = served(family, "channel", left_out)
        in_fp8 = sum(left_out not in name for name, _ in layers_of(tower))
        assert in_programs(tower) == in_fp8 > 0
        assert how_layers_run(tower).endswith(
            f", {in_fp8} in FP8. Of those in FP8 {in_fp8} run in this package's block "
            "program, 0 as vLLM's own."
        )

    def test_some_as_vllms_own(self) -> None:
        # An MLP with one layer in FP8 runs that layer as vLLM does.
        tower = served("qwen3_vl", "channel", "linear_fc1")
        assert in_programs(tower) == 6
        assert "6 run in this package's block program, 3 as vLLM's own" in (
            how_layers_run(tower)
        )
        tower = served("qwen3_vl", "channel", off=("fp8_linear",))
        assert "0 run in this package's block program, 12 as vLLM's own" in (
            how_layers_run(tower)
        )

    def test_without_fp8(self) -> None:
        tower = build("qwen3_vl", "TORCH_SDPA")
        total = sum(hasattr(one, "output_size") for one in tower.visual.modules())
        text = f"{total} linear layers, {total} in 32 bits."
        assert how_layers_run(tower) == text


def test_the_report_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_unquantized(
        *args: Any,
        quantization: str | None = None,
        unquantized: Sequence[str] = (),
        **how: Any,
    ) -> Any:
        return encode_build(*args, **how)

    encode_build = encode.build
    monkeypatch.setattr(encode, "build", build_unquantized)
    monkeypatch.setattr(encode, "check_quantization", lambda *_: None)
    path = save_image(tmp_path / "a.png", 60, 60)
    backends = ["FLASHINFER", "TORCH_SDPA"]
    given = {"quantization": "fp8_per_channel", "unquantized": ["re:.*attn.*"]}
    report = encode.run(options(path, backends=backends, **given))
    # Four in the block, two in the merger.
    assert [note for note in report.notes if "linear" in note] == [
        f"{backend}: 6 linear layers, 6 in 32 bits." for backend in backends
    ]
    assert report.to_json().items() >= given.items()
    console = Console(file=io.StringIO(), width=200)
    encode.render(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{MODEL}, random weights of seed 0, 1 of 32 blocks, quantised by " in text
    assert "TORCH_SDPA: 6 linear layers" in text
    assert "linear layers" not in " ".join(encode.run(options(path)).notes)

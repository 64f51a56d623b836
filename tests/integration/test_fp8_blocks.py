# SPDX-License-Identifier: Apache-2.0
"""Blocks run layers in FP8 whose weights have scales of blocks, and rows of groups.

Blocks and groups are of 32 values here, so that small layers have several, and a short
one at the end. vLLM's own function quantises the weights; references stand for GEMMs.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _blocks import blocks, image, kinds, log_of, outputs, programs
from _fp8_layers import (
    in_16_bits,
    layers_of,
    quantize_layer,
    served,
    step_by_step,
    weights_of,
)
from _towers import cpu_only
from torch import nn
from vllm.model_executor.kernels import linear as kernels

from cases import relative_error
from vllm_flashinfer_vit.blocks import fp8_linear, fp8_methods, layers, norms
from vllm_flashinfer_vit.gemms.scaled_mm import OpGemm
from vllm_flashinfer_vit.kernels import formats, row_scales_ref
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = [cpu_only, pytest.mark.usefixtures("fp8")]

GROUP = 32
TOLERANCE = 0.05
# Rows of whole 16 bytes, the last group half as long, where a family can have it.
SIZES: dict[str, dict[str, int]] = {
    "qwen2_vl": {},
    "qwen2_5_vl": {"intermediate_size": 48},
    "qwen3_vl": {"intermediate_size": 48},
    "glm4v": {"out_hidden_size": 48},
}

can_launch = fp8_methods.can_launch


@pytest.fixture
def fp8(fp8: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let groups be small."""
    for module in (formats, row_scales_ref, fp8_methods):
        monkeypatch.setattr(module, "GROUP", GROUP)


def in_blocks(family: str, *args: Any, **settings: Any) -> Tower:
    return served(family, "block", *args, **settings, **SIZES[family])


def exact_outputs(family: str, tower: Tower) -> torch.Tensor:
    return outputs(in_16_bits(family, tower, **SIZES[family]))


@pytest.mark.parametrize("family", SIZES)
def test_towers_are_as_exact_as_their_rows(family: str, nan_empty: None) -> None:
    tower = in_blocks(family)
    assert kinds(tower) == {("Fp8Linear",) * 4}
    found = outputs(tower)
    assert relative_error(found, exact_outputs(family, tower)) < TOLERANCE
    assert torch.equal(outputs(tower), found)
    image(tower, 40)
    assert torch.equal(outputs(tower), found)


def test_a_block_step_by_step() -> None:
    """Each group of a row has the scale of its largest value."""

    def rounded(layer: Any, rows: torch.Tensor) -> torch.Tensor:
        parts = []
        for part in rows.split(GROUP, -1):
            scale = part.abs().amax(-1, keepdim=True) / 448
            parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
        return torch.cat(parts, -1)

    found, expected = step_by_step(in_blocks("qwen2_5_vl"), rounded)
    # A value between two of e4m3 may fall to either.
    assert relative_error(found, expected) < 2e-3


def test_weights_and_scales_stay_the_layers_own() -> None:
    tower = in_blocks("qwen3_vl")
    for block, program in zip(blocks(tower), programs(tower), strict=True):
        layer, scaled = block.mlp.linear_fc2, program._mlp.second.weights.scaled
        assert scaled.weight.data_ptr() == layer.weight.data_ptr()
        assert scaled.scale.data_ptr() == layer.weight_scale_inv.data_ptr()
        assert tuple(scaled.weight.shape) == (48, 64)
        assert tuple(scaled.scale.shape) == (2, 2)
        assert scaled.weight.stride(0) == scaled.scale.stride(0) == 1


def test_weights_loaded_anew_are_used() -> None:
    tower = in_blocks("qwen2_vl")
    before = outputs(tower)
    for _, layer in layers_of(tower):
        layer.weight = nn.Parameter(-0.8 * weights_of(layer), requires_grad=False)
        quantize_layer(layer, "block")
    found = outputs(tower)
    assert relative_error(found, before) > 0.5
    assert relative_error(found, exact_outputs("qwen2_vl", tower)) < TOLERANCE


def test_scales_that_are_other_tensors_are_used() -> None:
    tower = in_blocks("qwen3_vl")
    before = outputs(tower)
    for _, layer in layers_of(tower):
        scales = 0.8 * layer.weight_scale_inv.detach()
        layer.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
    found = outputs(tower)
    assert relative_error(found, before) > 0.1
    assert relative_error(found, exact_outputs("qwen3_vl", tower)) < TOLERANCE


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have settled launches take scales of the settled shape alone, as on a GPU."""

    def checked(
        prepare: Callable[..., Any], scales_of: Callable[..., Any]
    ) -> Callable[..., Any]:
        def settle(*given: Any) -> Callable[..., None]:
            call, like = prepare(*given), scales_of(*given)

            def launch(*later: Any) -> None:
                assert like is None or scales_of(*later).shape == like.shape
                call(*later)

            return launch

        return settle

    sums = checked(norms.prepare, lambda terms, *normed: terms[4])
    monkeypatch.setattr(norms, "prepare", sums)
    rows = checked(fp8_linear.prepare_rows, lambda *given: given[-1])
    monkeypatch.setattr(fp8_linear, "prepare_rows", rows)


def keep_contexts(tower: Tower) -> None:
    """Have attention write where it wrote before, as it does on a GPU."""
    held: dict[torch.Size, torch.Tensor] = {}

    def keep(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def settle(*args: Any) -> Callable[[], torch.Tensor]:
            launch = prepare(*args)

            def call() -> torch.Tensor:
                found = launch()
                place = held.setdefault(found.shape, torch.empty_like(found))
                return place.copy_(found)

            return call

        return settle

    for block in blocks(tower):
        block.attn.attn.prepare = keep(block.attn.attn.prepare)


@pytest.mark.parametrize("others", ["channel", "static"])
@pytest.mark.parametrize("name", ["attn.qkv", "blocks.1."])
def test_towers_with_other_scales_in_some_layers(
    name: str, others: str, strict: None
) -> None:
    """What is settled for one kind of scales is not taken for another."""
    tower = in_blocks("qwen3_vl", name)
    for path, layer in layers_of(tower):
        if name in path:
            quantize_layer(layer, others)
    for program in programs(tower):
        program.build()
    assert kinds(tower) == {("Fp8Linear",) * 4}
    keep_contexts(tower)
    found = outputs(tower)
    # A given scale is the less exact one, and cuts off.
    most = 0.08 if others == "static" else TOLERANCE
    assert relative_error(found, exact_outputs("qwen3_vl", tower)) < most
    assert torch.equal(outputs(tower), found)


def test_a_norm_by_a_kernel_of_its_own() -> None:
    tower = in_blocks("qwen3_vl", off=("add_norm",))
    assert kinds(tower) == {("Fp8Linear",) * 4}
    assert relative_error(outputs(tower), exact_outputs("qwen3_vl", tower)) < TOLERANCE


def test_checkpoints_of_compressed_tensors() -> None:
    """They name the scales otherwise, and what multiplies is their scheme's."""
    tower = in_blocks("qwen2_vl")
    expected = outputs(tower)
    for _, layer in layers_of(tower):
        layer.scheme = SimpleNamespace(fp8_linear=layer.quant_method.fp8_linear)
        method = type("CompressedTensorsLinearMethod", (), {})
        layer.quant_method = method()
        layer.weight_scale = layer.weight_scale_inv
        del layer.weight_scale_inv
    for program in programs(tower):
        program.build()
    assert kinds(tower) == {("Fp8Linear",) * 4}
    assert torch.equal(outputs(tower), expected)


def packed(layer: Any) -> None:
    """As DeepGEMM has scales on Blackwell."""
    scales = layer.weight_scale_inv.to(torch.int32)
    layer.weight_scale_inv = nn.Parameter(scales, requires_grad=False)


def other_blocks(layer: Any) -> None:
    layer.weight_block_size = [GROUP, 2 * GROUP]


def transposed(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.t(), requires_grad=False)


def per_row(layer: Any) -> None:
    scales = torch.ones(len(layer.weight), 1)
    layer.weight_scale_inv = nn.Parameter(scales, requires_grad=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (packed, "nor one for each output or block of 32 x 32"),
        (other_blocks, "nor one for each output or block of 32 x 32"),
        (per_row, "nor one for each output or block of 32 x 32"),
        (transposed, "its weight is not in columns of multiples of 16"),
    ],
)
def test_what_is_left_alone(
    change: Callable[[Any], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = in_blocks("qwen2_vl")
    lines = log_of(layers, monkeypatch)
    for block, program in zip(blocks(tower), programs(tower), strict=True):
        change(block.attn.qkv)
        program.build()
    assert kinds(tower) == {("OwnLinear", *("Fp8Linear",) * 3)}
    assert any("attn.qkv" in line and reason in line for line in lines)


def test_sizes_that_cutlass_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM pads nothing: an MLP of 44, or of 3420, has rows of no whole 16 bytes."""
    lines = log_of(layers, monkeypatch)
    tower = served("qwen2_5_vl", "block")
    assert kinds(tower) == {("Fp8Linear", "Fp8Linear", "OwnLinear", "OwnLinear")}
    said = [line for line in lines if "down_proj" in line]
    assert len(set(said)) == 1 and "multiples of 16" in said[0]


@pytest.mark.parametrize("rows", [17, 132])
def test_both_kernels_of_vllms_op_are_tried(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(out: torch.Tensor, *read: torch.Tensor) -> None:
        row_scales_ref.scaled_mm_ref(out, *read)  # type: ignore[arg-type]
        if len(out) == rows:
            out.zero_()

    lines = log_of(layers, monkeypatch)
    monkeypatch.setattr(fp8_linear, "scaled_gemm", lambda *_: OpGemm(fails))
    assert kinds(in_blocks("qwen3_vl")) == {("OwnLinear",) * 4}
    assert any("attn.qkv" in line and "wrong" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "is_launched"),
    [
        ("CutlassFp8BlockScaledMMKernel", True),
        ("DeepGemmFp8BlockScaledMMKernel", False),
        ("FlashInferFp8DeepGEMMDynamicBlockScaledKernel", False),
        ("TritonFp8BlockScaledMMKernel", False),
        ("CutlassFP8ScaledMMLinearKernel", False),
    ],
)
def test_layers_that_vllm_runs_by_cutlass_are_launched(
    name: str, is_launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_methods, "cutlass_op", lambda: len)
    weight = SimpleNamespace(is_cuda=True)
    layer = SimpleNamespace(weight=weight, weight_block_size=[128, 128])
    assert can_launch(layer, object.__new__(getattr(kernels, name))) is is_launched
    layer.weight_block_size = None
    is_plain = name == "CutlassFP8ScaledMMLinearKernel"
    assert can_launch(layer, object.__new__(getattr(kernels, name))) is is_plain


def test_steps_say_which_scales_and_no_table_is_asked() -> None:
    tower = in_blocks("qwen2_vl")
    said = programs(tower)[0].steps["mlp.fc2"]
    assert said == "FP8 by CUTLASS; a scale for each 128 values of a token"
    assert fp8_methods.measured_as(blocks(tower)[0].mlp.fc2) is None

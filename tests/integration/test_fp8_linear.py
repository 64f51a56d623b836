# SPDX-License-Identifier: Apache-2.0
"""Blocks whose linear layers vLLM holds in FP8 run them in the block program.

The GEMM and the quantising of attention's output are vLLM's on a GPU, and references
here; how weights are padded is vLLM's here, too.
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _blocks import (
    SPECS,
    allow_lora,
    blocks,
    build,
    image,
    kinds,
    log_of,
    outputs,
    programs,
)
from _fp8_layers import (
    SCHEMES,
    in_16_bits,
    layers_of,
    quantize_layer,
    served,
    step_by_step,
    weights_of,
)
from _towers import cpu_only
from torch import nn
from vllm.model_executor.kernels.linear.scaled_mm import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import ReplicatedLinear

from cases import relative_error
from vllm_flashinfer_vit.blocks import fp8_linear, fp8_methods, layers, mlp
from vllm_flashinfer_vit.blocks.fp8_linear import Fp8Linear, Gemms
from vllm_flashinfer_vit.blocks.fp8_padding import TilesKernel
from vllm_flashinfer_vit.blocks.linear import OwnLinear
from vllm_flashinfer_vit.choices.gemm_table import GemmClass
from vllm_flashinfer_vit.gemms.catalog import CUTLASS
from vllm_flashinfer_vit.gemms.cublaslt import Problems
from vllm_flashinfer_vit.gemms.scaled_mm import OpGemm
from vllm_flashinfer_vit.kernels.row_scales_ref import scaled_mm_ref

pytestmark = [cpu_only, pytest.mark.usefixtures("fp8")]

# Rows of e4m3 are off by 2 to 3 percent, of a scale for all by more.
TOLERANCE = {"tensor": 0.05, "channel": 0.05, "static": 0.08}

can_launch = fp8_methods.can_launch


class Other(CutlassFP8ScaledMMLinearKernel):
    pass


@pytest.mark.parametrize(
    ("kind", "op", "is_cuda", "is_launched"),
    [
        (CutlassFP8ScaledMMLinearKernel, len, True, True),
        (TilesKernel, len, True, True),
        (Other, len, True, False),
        (CutlassFP8ScaledMMLinearKernel, None, True, False),
        (CutlassFP8ScaledMMLinearKernel, len, False, False),
    ],
)
def test_vllms_cutlass_on_a_gpu_is_launched_here_and_nothing_else(
    kind: type, op: Any, is_cuda: bool, is_launched: bool, monkeypatch
) -> None:
    monkeypatch.setattr(fp8_methods, "cutlass_op", lambda: op)
    layer = SimpleNamespace(weight=SimpleNamespace(is_cuda=is_cuda))
    assert can_launch(layer, object.__new__(kind)) is is_launched


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", SPECS)
def test_towers_are_as_exact_as_their_rows(family: str, scheme: str) -> None:
    tower = served(family, scheme)
    assert kinds(tower) == {("Fp8Linear",) * 4}
    found, expected = outputs(tower), outputs(in_16_bits(family, tower))
    assert relative_error(found, expected) < TOLERANCE[scheme]
    assert relative_error(outputs(build(family)), expected) > 0.3
    assert torch.equal(outputs(tower), found)
    image(tower, 40)
    assert torch.equal(outputs(tower), found)


@pytest.mark.parametrize("family", SPECS)
def test_every_value_is_written(family: str, nan_empty: None) -> None:
    assert not outputs(served(family, "channel")).isnan().any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_block_step_by_step(scheme: str) -> None:
    """What is quantised, by which scale, and where the bias is added."""

    def rounded(layer: Any, rows: torch.Tensor) -> torch.Tensor:
        if layer.input_scale is None:
            scale = rows.abs().amax(-1, keepdim=True) / 448
        else:
            scale = layer.input_scale
        return (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    found, expected = step_by_step(served("qwen2_5_vl", scheme), rounded)
    # A value between two of e4m3 may fall to either.
    assert relative_error(found, expected) < 2e-3


@pytest.mark.parametrize(
    "left_out", ["blocks.0.", "blocks.1.", "attn.qkv", "attn.proj", "mlp."]
)
@pytest.mark.parametrize("family", SPECS)
def test_layers_in_both_formats(family: str, left_out: str) -> None:
    tower = served(family, "channel", left_out)
    assert len(kinds(tower) | {("Fp8Linear",) * 4}) > 1
    found = outputs(tower)
    assert relative_error(found, outputs(in_16_bits(family, tower))) < 0.05
    assert torch.equal(outputs(tower), found)


def test_padded_weights_stay_the_layers_own() -> None:
    tower = served("qwen2_5_vl", "channel")
    layer = blocks(tower)[0].mlp.down_proj
    assert (layer.input_size_per_partition, layer.weight.shape[0]) == (44, 48)
    assert programs(tower)[0]._mlp.second.weights.scaled.weight.data_ptr() == (
        layer.weight.data_ptr()
    )


@pytest.mark.parametrize(
    ("inputs", "outputs", "is_plain"),
    [(32, 32, True), (24, 32, False), (32, 24, False)],
)
def test_layers_that_ranks_replicate(inputs: int, outputs: int, is_plain: bool) -> None:
    """Llama 4 has them with data-parallel encoders."""
    with build().running():
        layer = ReplicatedLinear(inputs, outputs)
    layer.weight.data.fill_(1.0)
    quantize_layer(layer, "channel")
    assert fp8_methods.problem(layer) is None
    assert fp8_methods.has_plain_sizes(layer) is is_plain


def test_a_ranks_part_of_a_layer_is_not_padded() -> None:
    layer = blocks(served("qwen2_vl", "channel"))[0].attn.proj
    layer.input_size, layer.output_size = 2 * layer.input_size, 2 * layer.output_size
    assert fp8_methods.has_plain_sizes(layer)


def test_weights_loaded_anew_are_used() -> None:
    tower = served("qwen2_5_vl", "tensor")
    before = outputs(tower)
    for _, layer in layers_of(tower):
        layer.weight = nn.Parameter(-weights_of(layer), requires_grad=False)
        layer.bias = nn.Parameter(layer.bias + 1, requires_grad=False)
        quantize_layer(layer, "tensor")
    found = outputs(tower)
    assert relative_error(found, before) > 0.5
    expected = outputs(in_16_bits("qwen2_5_vl", tower))
    assert relative_error(found, expected) < TOLERANCE["tensor"]


def test_a_scale_loaded_anew_in_place_is_used() -> None:
    tower = served("qwen3_vl", "static")
    found = outputs(tower)
    for _, layer in layers_of(tower):
        layer.input_scale.data.mul_(1e-3)
    assert relative_error(outputs(tower), found) > 0.3


@pytest.mark.parametrize("name", ["weight", "weight_scale", "input_scale", "bias"])
def test_a_parameter_that_is_another_tensor_is_used_at_once(name: str) -> None:
    tower = served("qwen3_vl", "static")
    before = outputs(tower)
    for _, layer in layers_of(tower):
        # As trainers make it, which quantise by methods of vLLM's on their own.
        old = getattr(layer, name).detach()
        new = (old.float() / 64 + (name == "bias")).to(old.dtype)
        setattr(layer, name, nn.Parameter(new, requires_grad=False))
    first = outputs(tower)
    assert relative_error(first, before) > 0.1
    assert torch.equal(first, outputs(tower))


def test_the_sum_and_its_norm_by_kernels_of_their_own() -> None:
    tower = served("qwen3_vl", "channel", off=("add_norm",))
    assert kinds(tower) == {("Fp8Linear",) * 4}
    expected = in_16_bits("qwen3_vl", tower)
    assert relative_error(outputs(tower), outputs(expected)) < TOLERANCE["channel"]


def test_it_can_be_switched_off() -> None:
    tower = served("qwen2_vl", "tensor", off=("fp8_linear",))
    assert kinds(tower) == {("OwnLinear",) * 4}


def test_adapters_get_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_lora(True, monkeypatch)
    assert kinds(served("qwen2_vl", "tensor")) == {("OwnLinear",) * 4}


@pytest.mark.parametrize(
    ("module", "name", "holds"),
    [
        ("fp8", "Fp8LinearMethod", "fp8_linear"),
        ("online.fp8", "Fp8PerBlockOnlineLinearMethod", "fp8_linear"),
        ("online.fp8", "Fp8PerTensorOnlineLinearMethod", "fp8_linear"),
        ("online.fp8", "Fp8PtpcOnlineLinearMethod", "fp8_linear"),
        # These two are one from vLLM 0.32 on.
        ("modelopt", "ModelOptFp8LinearMethod", "fp8_linear"),
        ("modelopt", "ModelOptFp8PcPtLinearMethod", "fp8_linear"),
        ("modelopt", "ModelOptLinearMethod", "kernel"),
    ],
)
def test_methods_of_vllm_that_are_known(module: str, name: str, holds: str) -> None:
    where = f"vllm.model_executor.layers.quantization.{module}"
    methods = vars(importlib.import_module(where))
    has_one = "ModelOptLinearMethod" in methods
    if module == "modelopt" and has_one is not (holds == "kernel"):
        pytest.skip("this vLLM has it under another name")
    method = object.__new__(methods[name])
    setattr(method, holds, kernel := object())
    assert fp8_methods.kernel_of(SimpleNamespace(quant_method=method)) is kernel


def other_method(layer: Any) -> None:
    class SomeLinearMethod:
        fp8_linear = layer.quant_method.fp8_linear

    layer.quant_method = SomeLinearMethod()


def other_kernel(layer: Any) -> None:
    layer.quant_method.fp8_linear = None


def bounded(layer: Any) -> None:
    layer.input_scale_ub = torch.tensor(1.0)


def row_major(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.data.contiguous(), requires_grad=False)


def block_scales(layer: Any) -> None:
    scales = torch.ones(2, 2)
    layer.weight_scale = nn.Parameter(scales, requires_grad=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_method, "SomeLinearMethod: its method is not one that is known"),
        (other_kernel, "its method is not one that is known"),
        (bounded, "the scales of its rows are bounded"),
        (row_major, "its weight is not in columns"),
        (block_scales, "neither one scale nor one for each output"),
    ],
)
def test_what_is_not_known_is_left_alone(
    change: Callable[[Any], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = served("qwen2_vl", "tensor")
    lines = log_of(layers, monkeypatch)
    for block in blocks(tower):
        change(block.attn.qkv)
        block.attn.attn.program.build()
    assert kinds(tower) == {("OwnLinear", *("Fp8Linear",) * 3)}
    assert any("attn.qkv" in line and reason in line for line in lines)
    assert "vLLM's own" in programs(tower)[0].steps["attn.qkv"]


def test_the_log_says_that_the_rest_of_an_mlp_does_not_run_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its layers are in FP8, and its activation is of an unknown class."""
    program = programs(served("qwen2_vl", "tensor"))[0]
    lines = log_of(layers, monkeypatch)
    monkeypatch.setattr(mlp, "activation_of", lambda act: None)
    program.build()
    reason = "another part of its MLP does not run here"
    assert [line.split()[0] for line in lines if reason in line] == [
        "mlp.fc2",
        "mlp.fc1",
    ]


@pytest.mark.parametrize(
    ("name", "changes", "is_whole"),
    [
        ("qkv", {"gather_output": True}, True),
        ("qkv", {"tp_size": 2}, True),
        ("qkv", {"tp_size": 2, "gather_output": True}, False),
        ("proj", {"reduce_results": False}, True),
        ("proj", {"tp_size": 2}, True),
        ("proj", {"tp_size": 2, "reduce_results": False}, False),
        ("proj", {"input_is_parallel": False}, False),
    ],
)
def test_what_ranks_split_or_gather_otherwise_is_vllms(
    name: str, changes: dict[str, Any], is_whole: bool
) -> None:
    layer = getattr(blocks(served("qwen2_vl", "tensor"))[0].attn, name)
    vars(layer).update(changes)
    problem = None if is_whole else "it splits or gathers rows"
    assert fp8_methods.problem(layer) == problem


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("name", ["qkv", "proj"])
def test_a_rank_of_two(
    name: str, tp_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks add up has the bias once; what has their own outputs is no sum."""
    layer = getattr(blocks(served("qwen2_vl", "channel"))[0].attn, name)
    layer.bias.data.fill_(1.0)
    monkeypatch.setattr(
        fp8_linear, "tensor_model_parallel_all_reduce", lambda part: 10 * part
    )
    rows, scales = torch.ones(3, 64).to(torch.float8_e4m3fn), torch.ones(3, 1)

    def run() -> torch.Tensor:
        gemm = fp8_linear.gemm_of(layer, CUTLASS, Problems())
        gemms = Gemms((GemmClass(None, CUTLASS),), {CUTLASS: gemm})
        linear = Fp8Linear(layer, gemms)
        now: Any = SimpleNamespace(settled={})
        return linear(now, rows, scales, torch.empty(3, linear.outputs))

    whole = run()
    layer.tp_size, layer.tp_rank = 2, tp_rank
    expected = whole if name == "qkv" else 10 * (whole - tp_rank)
    torch.testing.assert_close(run(), expected)


NO_MATRIX = "its weight is no matrix in e4m3 with scales"
NO_ROWS = "its rows have neither one given scale nor each its own"
NO_SCALES = "its weight has neither one scale nor one for each output or block"


@pytest.mark.parametrize(
    ("scheme", "name", "change", "reason"),
    [
        ("tensor", "weight", lambda weight: weight.to(torch.float8_e5m2), NO_MATRIX),
        ("tensor", "weight", lambda weight: weight[None], NO_MATRIX),
        ("tensor", "weight_scale", lambda scale: None, NO_MATRIX),
        ("tensor", "weight_scale", lambda scale: scale.half(), NO_SCALES),
        ("channel", "weight_scale", lambda scale: scale.repeat(2, 1)[::2], NO_SCALES),
        ("channel", "weight_scale", lambda scale: scale[1:], NO_SCALES),
        ("tensor", "input_scale", lambda _: torch.ones(()), NO_ROWS),
        ("static", "input_scale", lambda scale: None, NO_ROWS),
        ("static", "input_scale", lambda scale: scale.repeat(2), NO_ROWS),
    ],
)
def test_parameters_in_other_forms_are_vllms(
    scheme: str, name: str, change: Callable[[Any], Any], reason: str
) -> None:
    layer = blocks(served("qwen2_vl", scheme))[0].attn.qkv
    assert fp8_methods.problem(layer) is None
    found = change(getattr(layer, name))
    if found is not None:
        found = nn.Parameter(found, requires_grad=False)
    setattr(layer, name, found)
    assert str(fp8_methods.problem(layer)).startswith(reason)


def fails(*args: Any) -> None:
    raise RuntimeError("no kernel for this GPU")


def computes_nothing(*args: Any) -> None:
    args[0].zero_()


@pytest.mark.parametrize(
    "kernel, reason", [(fails, "no kernel for this GPU"), (computes_nothing, "wrong")]
)
def test_a_gemm_that_cannot_run(
    kernel: Callable[..., None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a request needs it, it is tried once for each size."""
    lines = log_of(layers, monkeypatch)
    monkeypatch.setattr(fp8_linear, "scaled_gemm", lambda *_: OpGemm(kernel))
    assert kinds(served("qwen3_vl", "tensor")) == {("OwnLinear",) * 4}
    assert any("attn.qkv" in line and reason in line for line in lines)


@pytest.mark.parametrize(
    ("factor", "shift", "is_right"),
    [(1.03, 0.0, True), (1.05, 0.0, False), (1.0, 0.01, True), (1.0, 0.05, False)],
)
def test_results_may_be_rounded_otherwise(
    factor: float, shift: float, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inexact(out: torch.Tensor, *read: Any) -> None:
        scaled_mm_ref(out, *read)
        out.mul_(factor).add_(shift * out.abs().max())

    layer = blocks(served("qwen2_vl", "tensor"))[0].attn.qkv
    monkeypatch.setattr(fp8_linear, "scaled_gemm", lambda *_: OpGemm(inexact))
    problem = None if is_right else "its results are wrong"
    assert fp8_linear.trial(layer, CUTLASS, Problems()) == problem


@pytest.mark.parametrize("scheme", [*SCHEMES, "block"])
def test_layers_of_models_in_bf16_are_tried(scheme: str) -> None:
    layer = blocks(served("qwen2_vl", scheme))[0].attn.qkv
    layer.params_dtype = torch.bfloat16
    layer.bias.data = layer.bias.data.bfloat16()
    assert fp8_linear.trial(layer, CUTLASS, Problems()) is None


def test_a_gpu_kernel_is_not_launched_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    tower = served("qwen2_vl", "tensor")
    assert kinds(tower) == {("OwnLinear",) * 4}
    assert isinstance(programs(tower)[0]._attention.qkv.step, OwnLinear)


def test_steps_say_which_scales() -> None:
    steps = programs(served("qwen2_vl", "static"))[0].steps
    assert steps["attn.qkv"] == "FP8 by CUTLASS; the layer's scale"
    program = programs(served("qwen2_vl", "tensor"))[0]
    assert program.steps["mlp.fc2"] == "FP8 by CUTLASS; a scale for each token"
    assert isinstance(program._attention.qkv.step, Fp8Linear)

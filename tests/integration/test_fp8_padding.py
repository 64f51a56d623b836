# SPDX-License-Identifier: Apache-2.0
"""Rows in FP8 of an MLP's second layer are padded to whole tiles, as vLLM pads."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _blocks import (
    blocks,
    build,
    change_config,
    image,
    log_of,
    outputs,
    programs,
    without,
)
from _fp8_layers import (
    SCHEMES,
    InTiles,
    Kernel,
    in_16_bits,
    quantize_layer,
    served,
    weights_of,
)
from _towers import cpu_only
from torch import nn
from vllm import _custom_ops
from vllm.model_executor.kernels.linear.scaled_mm import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

from cases import relative_error
from vllm_flashinfer_vit.blocks import fp8_methods, fp8_padding, program
from vllm_flashinfer_vit.blocks.fp8_padding import TilesKernel, pad_to_tiles
from vllm_flashinfer_vit.blocks.mlp import pad_rows
from vllm_flashinfer_vit.kernels.row_scales_ref import quantize_rows_ref, scaled_mm_ref

pytestmark = cpu_only

# The others' rows are whole tiles at their small sizes.
SECOND = {"qwen2_5_vl": "mlp.down_proj", "qwen3_vl": "mlp.linear_fc2"}
TOLERANCE = {"tensor": 0.05, "channel": 0.05, "static": 0.08}


@pytest.mark.usefixtures("fp8")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", SECOND)
def test_padded_towers_are_as_exact(family: str, scheme: str) -> None:
    tower = served(family, scheme, tiled=SECOND[family])
    second = programs(tower)[0]._mlp.second
    layer = blocks(tower)[0].get_submodule(SECOND[family])
    assert (second.inputs, layer.weight.shape[0]) == (128, 128)
    assert layer.input_size_per_partition < 128
    # It is the layer's own.
    assert second.weights.scaled.weight.data_ptr() == layer.weight.data_ptr()
    found = image(tower, 24)
    expected = image(in_16_bits(family, tower), 24)
    assert relative_error(found, expected) < TOLERANCE[scheme]
    # What a larger batch leaves behind is not read.
    outputs(tower)
    assert torch.equal(image(tower, 24), found)


@pytest.mark.usefixtures("fp8")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_blocks_may_differ_in_what_is_padded(scheme: str) -> None:
    """Each quantises its own rows, though they share the pass's memory."""
    second = SECOND["qwen2_5_vl"]
    tower = served("qwen2_5_vl", scheme, tiled=f"blocks.1.{second}")
    widths = [one._mlp.second.inputs for one in programs(tower)]
    assert len(set(widths)) == 2
    found, expected = image(tower, 24), image(in_16_bits("qwen2_5_vl", tower), 24)
    assert relative_error(found, expected) < TOLERANCE[scheme]


def row_parallel(inputs: int = 48, outputs: int = 32) -> Any:
    with build().running():
        layer = RowParallelLinear(inputs, outputs)
    layer.weight.data.normal_()
    layer.bias.data.normal_()
    return layer


def op(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    assert a.shape[1] == b.shape[0] and not any(n % 16 for n in b.shape)
    out = torch.empty(len(a), b.shape[1], dtype=out_dtype)
    scaled_mm_ref(out, a, b, scale_a, scale_b, bias)
    return out


@pytest.mark.parametrize("kind", [Kernel, InTiles])
@pytest.mark.parametrize("inputs", [48, 44, 128])
@pytest.mark.parametrize("outputs", [32, 36])
def test_vllm_runs_a_padded_layer_itself(
    inputs: int, outputs: int, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that gets what no program takes calls its layers as modules."""
    layer = row_parallel(inputs, outputs)
    quantize_layer(layer, "channel", kind)
    monkeypatch.setattr(_custom_ops, "cutlass_scaled_mm", op)
    x = torch.randn(5, inputs)
    rows, scales = torch.empty_like(x, dtype=layer.weight.dtype), torch.empty(5, 1)
    quantize_rows_ref(x, rows, scales)
    kernel = fp8_methods.kernel_of(layer)
    found = kernel.apply_scaled_mm(
        A=rows,
        B=layer.weight,
        out_dtype=torch.float32,
        As=scales,
        Bs=layer.weight_scale,
        bias=layer.bias,
        output_shape=[5, outputs],
    )
    expected = (rows.float() * scales) @ weights_of(layer).t() + layer.bias
    torch.testing.assert_close(found, expected)


def test_weights_of_the_checkpoints_size_are_loaded_into_the_padding() -> None:
    layer = row_parallel(48)
    quantize_layer(layer, "tensor", InTiles)
    weight = layer.weight
    new = torch.randn(48, 32).to(weight.dtype)
    weight.weight_loader(weight, new)
    assert torch.equal(weight[:48].float(), new.float())
    assert not weight[48:].float().any()


@pytest.mark.parametrize("inputs", [48, 128])
def test_offloaded_ones_are_offloaded_again(inputs: int) -> None:
    """As `--cpu-offload-gb` has it: vLLM asks the flag after it has processed."""
    layer = row_parallel(inputs)
    rows = layer.weight.data.to(torch.float8_e4m3fn)
    layer.weight = nn.Parameter(rows.t(), requires_grad=False)
    layer.weight._vllm_is_uva_offloaded = True
    InTiles(False).process_weights_after_loading(layer)
    # vLLM 0.25.1 has another parameter there.
    is_there = getattr(layer.weight, "_vllm_is_uva_offloaded", False)
    assert is_there is (inputs == 128)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's kernel be built here."""
    supported = classmethod(lambda cls, capability=None: (True, None))
    monkeypatch.setattr(CutlassFP8ScaledMMLinearKernel, "is_supported", supported)


def unloaded(inputs: int) -> Any:
    layer = row_parallel(inputs)
    made = Kernel(False)
    config = SimpleNamespace(
        activation_quant_key=made.config.activation_quant_key,
        weight_shape=None,
        out_dtype=None,
    )
    with build().running():
        kernel = CutlassFP8ScaledMMLinearKernel(config, made.layer_param_names)
    layer.quant_method = Fp8LinearMethod.__new__(Fp8LinearMethod)
    layer.quant_method.fp8_linear = kernel
    return layer


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("inputs", "is_padded"), [(48, True), (4304, True), (128, False), (5120, False)]
)
def test_rows_of_whole_tiles_stay_as_they_are(
    inputs: int, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = log_of(fp8_padding, monkeypatch)
    first, second = unloaded(32), unloaded(inputs)
    kernel = second.quant_method.fp8_linear
    with build().running():
        pad_rows(first, nn.GELU(), second, runs_fp8=True)
    found = second.quant_method.fp8_linear
    assert type(found) is (TilesKernel if is_padded else type(kernel))
    assert found.config is kernel.config
    assert found.layer_param_names == kernel.layer_param_names
    padded = -(-inputs // 128) * 128
    said = f"get rows of {padded} values instead of {inputs}."
    assert [line.endswith(said) for line in lines] == [True] * is_padded


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("backend", ["nccl", "sharded_rdt"])
def test_weight_transfer_past_loaders(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has noted where unpadded weights are."""
    transfer = SimpleNamespace(backend=backend)
    change_config(monkeypatch, weight_transfer_config=transfer)
    second = unloaded(48)
    with build().running():
        pad_to_tiles(second, second.quant_method, "fp8_linear")
    is_padded = type(second.quant_method.fp8_linear) is TilesKernel
    assert is_padded is (backend == "nccl")


def test_other_kernels_are_left_alone() -> None:
    layer = row_parallel(48)
    quantize_layer(layer, "tensor")
    before = layer.quant_method.fp8_linear
    pad_to_tiles(layer, layer.quant_method, "fp8_linear")
    assert layer.quant_method.fp8_linear is before


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("first", "act", "runs_fp8"),
    [
        (unloaded, nn.Identity(), True),
        # The layers of an MLP run here only together.
        (row_parallel, nn.GELU(), True),
        (unloaded, nn.GELU(), False),
    ],
    ids=["activation", "first", "setting"],
)
def test_what_vllm_runs_itself_is_not_padded(
    first: Callable[[int], Any], act: nn.Module, runs_fp8: bool
) -> None:
    second = unloaded(48)
    with build().running():
        pad_rows(first(32), act, second, runs_fp8=runs_fp8)
    assert type(second.quant_method.fp8_linear) is CutlassFP8ScaledMMLinearKernel


@pytest.mark.parametrize("off", [(), ("fp8_linear",)])
def test_a_setting_leaves_layers_in_fp8_to_vllm(
    off: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        program, "pad_rows", lambda *_, runs_fp8: asked.append(runs_fp8)
    )
    with without(*off):
        build()
    assert asked and set(asked) == {not off}

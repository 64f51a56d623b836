# SPDX-License-Identifier: Apache-2.0
"""Towers whose linear layers get vLLM's own FP8 methods, as on a Hopper GPU.

vLLM's CUTLASS kernel is for GPUs. Its padding is applied here all the same, and what it
multiplies is computed by the references.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from _blocks import blocks, build, call, programs, stream, tables, without
from torch import nn
from vllm import _custom_ops
from vllm.model_executor.kernels.linear.scaled_mm import (
    CutlassFP8ScaledMMLinearKernel,
    cutlass,
)
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import (
    CutlassFp8BlockScaledMMKernel,
)
from vllm.model_executor.layers.quantization import fp8, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # noqa: E501
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Fp8,
    compressed_tensors_w8a8_fp8,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.layers.quantization.online import fp8 as online
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerBlockOnlineLinearMethod,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from vllm_flashinfer_vit.blocks.fp8_padding import TilesKernel
from vllm_flashinfer_vit.choices.gemm_table import GemmClass, GemmLayer
from vllm_flashinfer_vit.choices.gemms import GemmChoice
from vllm_flashinfer_vit.kernels import formats
from vllm_flashinfer_vit.kernels.row_scales_ref import spread
from vllm_flashinfer_vit.towers.tower import Tower

SCHEMES = ("tensor", "channel", "static")
GAIN = 4.0
E4M3 = torch.finfo(torch.float8_e4m3fn)


class _WithoutGpu:
    """A constructor in the place of vLLM's, which asks for a GPU."""

    def __init__(self, is_static: bool) -> None:
        key = kFp8StaticTensorSym if is_static else kFp8DynamicTokenSym
        self.config = SimpleNamespace(activation_quant_key=key)
        self.layer_param_names = "weight", "weight_scale", "input_scale", ""


class Kernel(_WithoutGpu, CutlassFP8ScaledMMLinearKernel):
    """vLLM's."""


class InTiles(_WithoutGpu, TilesKernel):
    """Its with rows of whole tiles."""


class BlockKernel(CutlassFp8BlockScaledMMKernel):
    """vLLM's for scales of blocks, without its constructor."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(activation_quant_key=kFp8Dynamic128Sym)


class Everywhere(dict[str, GemmChoice]):
    """A table that has the same classes for every layer, or for those of some sizes."""

    def __init__(self, classes: tuple[GemmClass, ...], *sizes: str) -> None:
        self.choice, self.sizes = GemmChoice(classes, "measured"), sizes

    def get(self, key: str, default: Any = None) -> Any:
        found = not self.sizes or GemmLayer.of_key(key).size in self.sizes
        return self.choice if found else default


def layers_of(tower: Tower) -> Iterator[tuple[str, Any]]:
    """Return the linear layers of a tower's blocks, by their names in it."""
    for place, block in enumerate(blocks(tower)):
        for name, layer in block.named_modules():
            if hasattr(layer, "output_size"):
                yield f"blocks.{place}.{name}", layer


def quantize_layers(
    tower: Tower, scheme: str, left_out: str = "no layer", tiled: str = "no layer"
) -> None:
    """Give a tower's linear layers FP8 weights; those named `left_out` keep 16 bits.

    Those named `tiled` get rows of whole tiles. All are larger than random ones are: a
    tower's output shows what its blocks do.
    """
    for name, layer in layers_of(tower):
        layer.weight.data.mul_(GAIN)
        if left_out not in name:
            kernel = InTiles if tiled in name else Kernel
            quantize_layer(layer, scheme, kernel)
    for block in blocks(tower):
        block.attn.attn.program.build()


def quantize_layer(layer: Any, scheme: str, kind: type[Any] = Kernel) -> None:
    """Give a layer FP8 weights of its own weights, as a method of vLLM leaves them."""
    if scheme == "block":
        quantize_in_blocks(layer)
        return
    weight = layer.weight.data
    dims = (1,) if scheme == "channel" else (0, 1)
    scale = weight.abs().amax(dims, keepdim=True).float() / E4M3.max
    rows = (weight.float() / scale).clamp(E4M3.min, E4M3.max).to(torch.float8_e4m3fn)
    kernel = kind(scheme == "static")
    layer.weight = nn.Parameter(rows.t(), requires_grad=False)
    scale = scale.view(-1, 1) if scheme == "channel" else scale.view(1)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    layer.input_scale = None
    if scheme == "static":
        layer.input_scale = nn.Parameter(torch.tensor(0.02), requires_grad=False)
    # vLLM 0.25.1 refuses its own second call, where weight and scale are padded.
    with mock.patch.object(cutlass, "set_weight_attrs", create=True):
        kernel.process_weights_after_loading(layer)
    if scheme == "channel":
        layer.scheme = CompressedTensorsW8A8Fp8.__new__(CompressedTensorsW8A8Fp8)
        layer.scheme.fp8_linear = kernel
        method: Any = CompressedTensorsLinearMethod
        layer.quant_method = method.__new__(method)
    else:
        layer.quant_method = Fp8LinearMethod.__new__(Fp8LinearMethod)
        layer.quant_method.fp8_linear = kernel


def quantize_in_blocks(layer: Any) -> None:
    """Give a layer FP8 weights of its own with scales of blocks, by vLLM's function."""
    layer.weight_block_size = [formats.GROUP, formats.GROUP]
    # vLLM compiles it, which takes long here.
    with torch.compiler.set_stance("force_eager"):
        cast = per_block_cast_to_fp8(layer.weight.data, layer.weight_block_size)
    weight, scales = cast
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
    layer.input_scale = None
    method: Any = Fp8PerBlockOnlineLinearMethod
    layer.quant_method = method.__new__(method)
    layer.quant_method.fp8_linear = BlockKernel()
    layer.quant_method.fp8_linear.process_weights_after_loading(layer)


def _quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for vLLM's op, which is for GPUs."""
    if scale is None:
        dims = (1,) if use_per_token_if_dynamic else (0, 1)
        scale = x.abs().amax(dims, keepdim=True).float() / E4M3.max
    rows = (x.float() / scale).clamp(E4M3.min, E4M3.max).to(torch.float8_e4m3fn)
    return rows, scale if use_per_token_if_dynamic else scale.view(1)


def let_vllm_build_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM build layers in FP8 with its CUTLASS kernel, and load them, here."""

    def make(*, activation_quant_key: Any, **_: Any) -> CutlassFP8ScaledMMLinearKernel:
        config: Any = SimpleNamespace(
            activation_quant_key=activation_quant_key, out_dtype=None
        )
        return CutlassFP8ScaledMMLinearKernel(config, Kernel(False).layer_param_names)

    supported = classmethod(lambda cls, capability=None: (True, None))
    monkeypatch.setattr(CutlassFP8ScaledMMLinearKernel, "is_supported", supported)
    for module in (fp8, compressed_tensors_w8a8_fp8, modelopt, online):
        monkeypatch.setattr(module, "init_fp8_linear_kernel", make)
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", _quantize)


def weights_of(layer: Any) -> torch.Tensor:
    """Return `[outputs, inputs]` fp32, or what a layer's FP8 weights stand for."""
    if layer.weight.dtype != torch.float8_e4m3fn:
        return layer.weight
    if hasattr(layer, "weight_scale_inv"):
        return layer.weight.float() * spread(layer.weight_scale_inv, layer.weight.shape)
    found = layer.weight.float() * layer.weight_scale.reshape(1, -1)
    return found[
        : layer.input_size_per_partition, : layer.output_size_per_partition
    ].t()


def served(
    family: str,
    scheme: str,
    left_out: str = "no layer",
    off: tuple[str, ...] = (),
    tiled: str = "no layer",
    **vision: Any,
) -> Tower:
    """Build a tower with FP8 layers; optimisations that are `off` are left out."""
    # Layers that vLLM builds for FP8 are not padded in 16 bits.
    with without("aligned", *off):
        tower = build(family, **vision)
    quantize_layers(tower, scheme, left_out, tiled)
    return tower


def in_16_bits(family: str, tower: Tower, **vision: Any) -> Tower:
    """Return stock's tower with the weights that a quantised tower's stand for."""
    stock = build(family, "TORCH_SDPA", **vision)
    given = dict(layers_of(tower))
    for name, layer in layers_of(stock):
        layer.weight.data.copy_(weights_of(given[name]))
        if layer.bias is not None:
            layer.bias.data.copy_(given[name].bias)
    return stock


def contexts_of(block: Any) -> list[torch.Tensor]:
    """Return a list that gets what a block's attention returns, from now on."""
    contexts: list[torch.Tensor] = []
    attend = block.attn.attn.prepare

    def prepare(*args: Any) -> Callable[[], torch.Tensor]:
        launch = attend(*args)

        def call() -> torch.Tensor:
            contexts.append(launch().clone())
            return contexts[-1]

        return call

    block.attn.attn.prepare = prepare
    return contexts


def step_by_step(
    tower: Tower, rounded: Callable[[Any, torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a block of a Qwen2.5-VL tower makes, and its steps one by one.

    Args:
        tower: The tower, which is of no use afterwards.
        rounded: Takes a layer and rows, and returns what its quantised rows stand for.
    """
    block, x, with_ = blocks(tower)[0], stream(tower), tables(tower)
    contexts = contexts_of(block)
    # Its last block's: both branches are added, nothing is normalised.
    programs(tower)[0]._tower.blocks.pop(1)
    found = call(tower, 0, x, with_).view(24, -1)

    def linear(layer: Any, rows: torch.Tensor) -> torch.Tensor:
        rows = rounded(layer, rows)
        return nn.functional.linear(rows, weights_of(layer), layer.bias)

    x = x.view(24, -1)
    attended = linear(block.attn.proj, contexts[0].flatten(1))
    normed = block.norm2.forward_native(x + attended)
    gate, up = linear(block.mlp.gate_up_proj, normed).chunk(2, -1)
    hidden = nn.functional.silu(gate) * up
    return found, x + attended + linear(block.mlp.down_proj, hidden)

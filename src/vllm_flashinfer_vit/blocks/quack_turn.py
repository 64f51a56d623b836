# SPDX-License-Identifier: Apache-2.0
"""A block's QKV projection by QuACK, which turns q and k as it writes them."""

from typing import Generic, TypeVar

import torch
from vllm.logger import init_logger

from vllm_flashinfer_vit.blocks.fp8_linear import Fp8Linear
from vllm_flashinfer_vit.blocks.layers import Layers
from vllm_flashinfer_vit.blocks.linear import Weights
from vllm_flashinfer_vit.blocks.tower_pass import Pass
from vllm_flashinfer_vit.gemms import epilogue_gemm, turning_gemm
from vllm_flashinfer_vit.gemms.epilogue_gemm import Layer
from vllm_flashinfer_vit.gemms.turning_gemm import Heads

logger = init_logger("vllm.plugins.flashinfer_vit")

# From how many rows on it is faster on an H200 than another GEMM and a pass that turns
# q and k: in 16 bits, for heads as wide as a tile, and in FP8 (docs/experiments.md).
MIN_ROWS = 1024
MIN_ROWS_WIDE = 2048
MIN_ROWS_FP8 = 256
_WIDE = 128

Kernels = TypeVar("Kernels")


class Projection(Generic[Kernels]):
    """A projection with its kernels.

    Attributes:
        kernels: What runs it.
    """

    def __init__(self, source: Weights | Fp8Linear, kernels: Kernels) -> None:
        """Take a layer's parameters, and its kernels."""
        self._source, self.kernels = source, kernels

    def rows(self, now: Pass) -> torch.Tensor:
        """Return where a pass has the layer's rows: `[T, K]`."""
        source = self._source
        return now.normed if isinstance(source, Weights) else source.rows(now)[0]

    def layer(self, now: Pass) -> Layer:
        """Return the layer's parameters, where they are now."""
        source = self._source
        scales = source.rows(now)[1] if isinstance(source, Fp8Linear) else None
        return as_layer(source, scales)


def as_layer(source: Weights | Fp8Linear, scales: torch.Tensor | None = None) -> Layer:
    """Return a layer's parameters as kernels take them, where they are now.

    Args:
        source: Where they are.
        scales: Of rows in FP8; None for some that are like them.
    """
    if isinstance(source, Weights):
        return Layer(source.weight, source.bias)
    scales = source.like_scales if scales is None else scales
    return source.as_layer(scales, source.weights.scaled.bias)


def resolve(
    layers: Layers,
    path: str,
    source: Weights | Fp8Linear,
    turned: tuple[Heads, torch.dtype] | None,
) -> Projection[turning_gemm.Kernels] | None:
    """Return a projection's step that turns q and k, or None and say why.

    Args:
        layers: Of the block.
        path: The layer's.
        source: Its parameters.
        turned: What its outputs are, and the dtype of cosines and sines, if some kernel
            of attention has q and k turned before it.
    """
    if turned is None or "quack_turn" in layers.off:
        return None
    if not epilogue_gemm.is_available():
        return None
    heads, table = turned
    like = as_layer(source)
    rows = MIN_ROWS_WIDE if heads.head_dim >= _WIDE else MIN_ROWS
    if isinstance(source, Fp8Linear):
        rows = MIN_ROWS_FP8
    dtype = layers.part(path).params_dtype
    if not turning_gemm.fits(like, heads, table, dtype):
        return None
    key = "quack_turn", *like.alike, heads, table, dtype
    if reason := layers.tried(key, turning_gemm.build, like, heads, table, dtype):
        logger.warning_once(
            "QuACK cannot turn q and k in %s of the vision tower's blocks, so a "
            "pass of its own turns them: %s",
            path,
            reason,
        )
        return None
    layers.steps[path] += f"; from {rows} rows on QuACK turns q and k"
    kernels = layers.tower.gemms.get(key)
    if kernels is None:
        gpu = torch.cuda.get_device_properties(like.weight.device)
        kernels = layers.tower.gemms[key] = turning_gemm.Kernels(
            like, heads, table, dtype, rows, gpu.multi_processor_count
        )
    return Projection(source, kernels)

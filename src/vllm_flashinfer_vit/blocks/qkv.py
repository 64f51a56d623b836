# SPDX-License-Identifier: Apache-2.0
"""The QKV projection of a block."""

import functools

import torch

from vllm_flashinfer_vit.blocks import quack_quantize, quack_turn
from vllm_flashinfer_vit.blocks.fp8_linear import Fp8Linear
from vllm_flashinfer_vit.blocks.layers import Layers
from vllm_flashinfer_vit.blocks.linear import (
    OwnLinear,
    QuackGemm,
    Step,
    Weights,
    linear,
    run,
)
from vllm_flashinfer_vit.blocks.tower_pass import Pass
from vllm_flashinfer_vit.gemms import quantizing_gemm, turning_gemm
from vllm_flashinfer_vit.gemms.turning_gemm import Heads

# From how many rows on QuACK is faster than cuBLAS on an H200, if it turns nothing
# (docs/experiments.md).
MIN_QUACK_ROWS = 2048


class Qkv:
    """What runs a QKV projection.

    Attributes:
        step: What runs it, unless another does.
        large: What does for large batches, or None.
        turning: What does for them and turns q and k, where attention would have to, or
            None.
        quantizing: What does for them and writes what FP8 attention reads, or None.
    """

    step: Step | OwnLinear | Fp8Linear
    large: QuackGemm | None = None
    turning: quack_turn.Projection[turning_gemm.Kernels] | None = None
    quantizing: quack_turn.Projection[quantizing_gemm.Kernels] | None = None

    def __init__(
        self,
        path: str,
        layers: Layers,
        turned: tuple[Heads, torch.dtype] | None,
        quantized: tuple[Heads, torch.dtype] | None,
    ) -> None:
        """Resolve the layer.

        Args:
            path: The layer's.
            layers: Of the block.
            turned: See `quack_turn.resolve`.
            quantized: See `quack_quantize.resolve`.
        """
        source: Weights | Fp8Linear
        if not layers.is_direct(path):
            self.step = layers.projection(path)
            # A weight with scales of blocks has a GEMM of its own.
            if not isinstance(self.step, Fp8Linear) or self.step.groups:
                return
            source = self.step
        else:
            self.step, source = layers.gemm(path)
            if "quack_qkv" not in layers.off:
                expected = functools.partial(linear, source)
                self.large = layers.quack(path, source, None, MIN_QUACK_ROWS, expected)
        self.turning = quack_turn.resolve(layers, path, source, turned)
        self.quantizing = quack_quantize.resolve(layers, path, source, quantized)

    def __call__(self, now: Pass) -> torch.Tensor:
        """Return q, k and v, not turned: `now.qkv`, or a tensor like it."""
        step, large = self.step, self.large
        if isinstance(step, Fp8Linear):
            return step(now, *step.rows(now), now.qkv)
        if large is not None and len(now.qkv) >= large.min_rows:
            return run(now.settled, "fast qkv", large, now.normed, now.qkv)
        return run(now.settled, "qkv", step, now.normed, now.qkv)

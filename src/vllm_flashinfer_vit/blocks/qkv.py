# SPDX-License-Identifier: Apache-2.0
"""The QKV projection of a block."""

import functools

import torch

from vllm_flashinfer_vit.blocks import quack_turn
from vllm_flashinfer_vit.blocks.fp8_linear import Fp8Linear
from vllm_flashinfer_vit.blocks.layers import Layers
from vllm_flashinfer_vit.blocks.linear import OwnLinear, QuackGemm, Step, linear, run
from vllm_flashinfer_vit.blocks.tower_pass import Pass
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
    """

    step: Step | OwnLinear | Fp8Linear
    large: QuackGemm | None = None
    turning: quack_turn.QuackTurn | None = None

    def __init__(
        self, path: str, layers: Layers, turned: tuple[Heads, torch.dtype] | None
    ) -> None:
        """Resolve the layer.

        Args:
            path: The layer's.
            layers: Of the block.
            turned: See `quack_turn.resolve`.
        """
        if not layers.is_direct(path):
            self.step = layers.projection(path)
            # A weight with scales of blocks has a GEMM of its own.
            if isinstance(self.step, Fp8Linear) and self.step.groups == 0:
                self.turning = quack_turn.resolve(layers, path, self.step, turned)
            return
        self.step, weights = layers.gemm(path)
        if "quack_qkv" not in layers.off:
            expected = functools.partial(linear, weights)
            self.large = layers.quack(path, weights, None, MIN_QUACK_ROWS, expected)
        self.turning = quack_turn.resolve(layers, path, weights, turned)

    def __call__(self, now: Pass) -> torch.Tensor:
        """Return q, k and v, not turned: `now.qkv`, or a tensor like it."""
        step, large = self.step, self.large
        if isinstance(step, Fp8Linear):
            return step(now, *step.rows(now), now.qkv)
        if large is not None and len(now.qkv) >= large.min_rows:
            return run(now.settled, "fast qkv", large, now.normed, now.qkv)
        return run(now.settled, "qkv", step, now.normed, now.qkv)

# SPDX-License-Identifier: Apache-2.0
"""Layers of a block that run by GEMMs of QuACK's with this package's epilogues."""

from collections.abc import Callable

import torch

from vllm_flashinfer_vit.blocks.act_bound import Bounds
from vllm_flashinfer_vit.blocks.fp8_linear import Fp8Linear
from vllm_flashinfer_vit.blocks.linear import BlockWeights, Weights
from vllm_flashinfer_vit.blocks.tower_pass import Pass
from vllm_flashinfer_vit.gemms import activating_gemm, epilogue_gemm, turning_gemm


class QuackTurn:
    """A block's QKV projection by QuACK, which turns q and k.

    Attributes:
        kernels: What runs it.
    """

    def __init__(
        self, source: Weights | Fp8Linear, kernels: turning_gemm.Kernels
    ) -> None:
        """Take a layer's parameters, and its kernels."""
        self._source, self.kernels = source, kernels

    def rows(self, now: Pass) -> torch.Tensor:
        """Return where a pass has the layer's rows: `[T, K]`."""
        source = self._source
        return now.normed if isinstance(source, Weights) else source.rows(now)[0]

    def layer(self, now: Pass) -> epilogue_gemm.Layer:
        """Return the layer's parameters, where they are now."""
        source = self._source
        if isinstance(source, Weights):
            return epilogue_gemm.Layer(source.weight, source.bias)
        scales = source.rows(now)[1]
        return fp8_layer(source, scales, source.weights.scaled.bias)


class QuackAct:
    """An MLP's first layer in FP8 by QuACK, which applies the activation.

    Attributes:
        act: What they are.
        kernel: What runs them.
        min_rows: From how many rows on it is faster than what else there is.
        bounds: What gives the rows their scales; None where other scales are given, or
            the rows are of 16 bits.
        place: The block's, in its tower.
    """

    def __init__(
        self,
        source: Fp8Linear,
        kernel: epilogue_gemm.Kernel,
        act: activating_gemm.Act,
        min_rows: int,
        bounds: Bounds | None,
        place: int,
    ) -> None:
        """Take a layer, its kernel as `activating_gemm.build` tried it, and a bound."""
        self._source, self.kernel = source, kernel
        self.act, self.min_rows = act, min_rows
        self.bounds, self.place = bounds, place

    def prepare(
        self, rows: torch.Tensor, out: torch.Tensor, scales: torch.Tensor
    ) -> Callable[[epilogue_gemm.Layer, torch.Tensor | None], None]:
        """Settle it for layers like this one; see `activating_gemm.prepare`."""
        return activating_gemm.prepare(
            self.kernel, rows, out, self.layer(scales), self.act
        )

    def layer(self, scales: torch.Tensor) -> epilogue_gemm.Layer:
        """Return the layer's parameters, where they are now."""
        return fp8_layer(self._source, scales, self._source.bias)


class BoundedLayer:
    """An MLP's first layer in FP8, as `Bounds` reads it."""

    def __init__(self, source: Fp8Linear, weights: BlockWeights) -> None:
        """Take a layer, and the weights of its block."""
        self._source, self._weights = source, weights

    @property
    def addresses(self) -> tuple[int, ...]:
        """See `act_bound.Source`."""
        return self._source.weights.addresses

    def read(self) -> epilogue_gemm.Layer:
        """See `act_bound.Source`."""
        self._weights.refresh()
        source = self._source
        return fp8_layer(source, like_row_scales(source), source.bias)


def fp8_layer(
    source: Fp8Linear, scales: torch.Tensor, bias: torch.Tensor | None
) -> epilogue_gemm.Layer:
    """Return a layer in FP8 as its kernels take it, where it is now.

    Args:
        source: The layer.
        scales: Of its rows.
        bias: What the kernel adds, or None.
    """
    scaled = source.weights.scaled
    found = scaled.made.get("quack")
    if found is None:
        found = scaled.made["quack"] = scaled.weight.t(), scaled.scale.flatten()
    weight, col_scales = found
    return epilogue_gemm.Layer(weight, bias, scales.flatten(), col_scales)


def like_row_scales(source: Fp8Linear) -> torch.Tensor:
    """Return scales that are like those of a layer's rows, which may not exist yet."""
    given = source.weights.input_scale
    return source.weights.scaled.scale if given is None else given

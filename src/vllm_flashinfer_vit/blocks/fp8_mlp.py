# SPDX-License-Identifier: Apache-2.0
"""An MLP of a block with both layers in FP8."""

from collections.abc import Callable

import torch

from vllm_flashinfer_vit.blocks import fp8_linear, quack_act
from vllm_flashinfer_vit.blocks.aligned_linear import inputs_of
from vllm_flashinfer_vit.blocks.layers import Layers
from vllm_flashinfer_vit.blocks.quack_act import QuackAct
from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.blocks.tower_pass import Pass, Widths
from vllm_flashinfer_vit.kernels.formats import Activation, Bound


class Fp8Mlp:
    """An MLP with both layers in FP8.

    The activation adds the first layer's bias and quantises: vLLM pads the outputs of
    that layer, and not its bias. It is a pass of its own, or part of the first GEMM.

    Attributes:
        first: Its first layer.
        second: Its second layer.
        quantized: See `Mlp`.
        activates: Whether its first GEMM does, in large passes.
    """

    def __init__(self, spec: BlockSpec, layers: Layers, activation: Activation) -> None:
        """Resolve the layers."""
        self.first = layers.fp8(spec.first, with_bias=False)
        self.second = layers.fp8(spec.second)
        self.quantized = self.first, self.second
        self._width = inputs_of(layers.part(spec.second))
        self._activation = activation
        self._large = quack_act.resolve(layers, spec.first, *self.quantized, activation)
        self.activates = self._large is not None

    def _large_for(self, rows: int, can_bound: bool) -> QuackAct | None:
        large = self._large
        if large is None or rows < large.min_rows:
            return None
        return large if can_bound or large.bounds is None else None

    def _large_in(self, now: Pass) -> QuackAct | None:
        return self._large_for(len(now.normed), now.can_bound)

    def widths(self, rows: int, can_bound: bool) -> Widths:
        """See `Mlp`."""
        large = self._large_for(rows, can_bound)
        if large is None:
            return Widths(first=self.first.outputs)
        if large.act.quantizes:
            return Widths(activated=self.second.inputs)
        return Widths(hidden=large.act.columns)

    def bound(self, now: Pass) -> Bound | None:
        """Return what gives the second layer's rows their scales, if a norm does."""
        large = self._large_in(now)
        if large is None or large.bounds is None:
            return None
        if not now.is_bounded:
            call = now.settled.get("bounds")
            if call is None:
                call = now.settled["bounds"] = large.bounds.prepare()
            call()
            now.is_bounded = True
        return Bound(large.bounds.factors(large.place), now.activated_scales)

    def settle_small(self, now: Pass) -> None:
        """Compile what activates in small passes."""
        rows, scales = self.second.rows(now)
        values, bias = now.first(self.first.outputs), self.first.bias
        sizes = values, self._width, bias, self._activation
        fp8_linear.prepare_rows(*sizes, rows, scales)

    def __call__(self, now: Pass) -> torch.Tensor:
        """Return the MLP's output, `[T, C]`, of the rows that the first layer reads."""
        first, large = self.first, self._large_in(now)
        if large is not None and large.act.quantizes:
            return self._quantized(now, large)
        if large is not None:
            values = now.hidden(large.act.columns)
            self._activate(now, large, values, None)
            return self._quantise(now, values, None, None)
        values = now.first(first.outputs)
        first(now, *first.rows(now), values)
        return self._quantise(now, values, first.bias, self._activation)

    def _quantized(self, now: Pass, large: QuackAct) -> torch.Tensor:
        """Run both layers by rows whose scales are known beforehand."""
        rows = now.activated(self.second.inputs)
        scales = self.second.weights.input_scale
        if scales is None:
            scales = now.activated_scales
        self._activate(now, large, rows, scales.flatten())
        return self.second(now, rows, scales, now.normed)

    def _activate(
        self,
        now: Pass,
        large: QuackAct,
        out: torch.Tensor,
        out_scales: torch.Tensor | None,
    ) -> None:
        first = self.first
        rows, scales = first.rows(now)
        # Layers that are alike have one kernel, which their tower keeps.
        key = "activating", id(large.kernel), large.act, id(out)
        call = now.settled.get(key)
        if call is None:
            call = now.settled[key] = large.prepare(rows, out, scales)
            if large.act.quantizes:
                # It meets zeros of the second layer's weight, and must be finite.
                written = large.act.written(out, first.outputs).shape[1]
                out.view(torch.uint8)[:, written:].zero_()
        call(large.layer(scales), out_scales)

    def _quantise(
        self,
        now: Pass,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None,
    ) -> torch.Tensor:
        """Activate and quantise what the first layer returned, and run the second."""
        second = self.second
        rows, scales = second.rows(now)
        # Blocks may differ in what is padded; what is settled holds both.
        key = "quantising act", id(values), id(rows), scales.shape
        act: Callable[..., None] | None = now.settled.get(key)
        if act is None:
            act = now.settled[key] = fp8_linear.prepare_rows(
                values, self._width, bias, activation, rows, scales
            )
        act(bias, scales)
        return second(now, rows, scales, now.normed)

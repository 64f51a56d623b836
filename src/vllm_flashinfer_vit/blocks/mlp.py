# SPDX-License-Identifier: Apache-2.0
"""The MLP of a block: two linear layers and the activation between them."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_flashinfer_vit.blocks import fp8_methods
from vllm_flashinfer_vit.blocks.aligned_linear import align, padded_inputs
from vllm_flashinfer_vit.blocks.fp8_linear import Fp8Linear
from vllm_flashinfer_vit.blocks.fp8_mlp import Fp8Mlp
from vllm_flashinfer_vit.blocks.layers import Layers
from vllm_flashinfer_vit.blocks.linear import (
    OwnLinear,
    Step,
    Weights,
    is_unquantized,
    linear,
    run,
)
from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.blocks.tower_pass import Pass, Widths
from vllm_flashinfer_vit.gemms import quack
from vllm_flashinfer_vit.kernels._vllm_ops import compiled_op
from vllm_flashinfer_vit.kernels.formats import GELU_APPROXIMATE, Activation

# From how many rows on QuACK is faster than cuBLAS and an activation on an H200
# (docs/experiments.md).
MIN_QUACK_ROWS = 1024
_QUACK_NAMES = {
    "swiglu": quack.SWIGLU,
    "quick_gelu": quack.QUICK_GELU,
    "tanh_gelu": quack.TANH_GELU,
}


class Mlp:
    """An MLP of which at least one layer is not in FP8.

    Attributes:
        first: What runs its first layer.
        second: What runs its second layer.
        large: What runs the first layer with the activation for large batches, or None.
        acts: Whether `first` computes the activation, too.
        quantized: Its layers in FP8, if both are.
    """

    quantized: tuple[Fp8Linear, ...] = ()

    def __init__(self, spec: BlockSpec, layers: Layers) -> None:
        """Resolve the layers."""
        path, act = spec.first, layers.part(spec.act)
        self._act = act
        activation = activation_of(act)
        self.act_into = _act_into(act, activation)
        self._hidden = padded_inputs(layers.part(spec.second))
        self._stacked = 0
        self.acts, self.large = False, None
        self.first: Step | OwnLinear
        self.second: Step | OwnLinear
        if layers.is_direct(spec.second):
            self.second, _ = layers.gemm(spec.second)
        else:
            self.second = layers.own(spec.second)
        if not layers.is_direct(path):
            self.first = layers.own(path)
            return
        self.acts = (
            activation == "tanh_gelu"
            and layers.part(path).bias is not None
            and "fused_gelu" not in layers.off
        )
        self.first, weights = layers.gemm(path, self.acts)
        if len(weights.weight) != self._hidden:
            self._stacked = len(weights.weight)
        with_act = "with the activation" if self.acts else "then the activation"
        layers.steps[path] += f", {with_act}"
        name = None if activation is None else _QUACK_NAMES.get(activation)
        if name is not None and "quack_mlp" not in layers.off:
            expected = functools.partial(self._plain_hidden, weights)
            self.large = layers.quack(path, weights, name, MIN_QUACK_ROWS, expected)

    def _plain_hidden(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        return self._act(linear(weights, x))

    def widths(self, rows: int, can_bound: bool) -> Widths:
        """Return the columns of its buffers in a pass of so many rows."""
        return Widths(hidden=self._hidden, first=self._stacked)

    def bound(self, now: Pass) -> None:
        """Return nothing: the second layer's rows are quantised when they are known."""

    def __call__(self, now: Pass) -> torch.Tensor:
        """Return the MLP's output, `[T, C]`, of `now.normed`."""
        hidden = self.hidden_of(now)
        return run(now.settled, "second", self.second, hidden, now.normed)

    def hidden_of(self, now: Pass) -> torch.Tensor:
        """Return what the second layer gets."""
        large, hidden = self.large, now.hidden(self._hidden)
        if large is not None and len(hidden) >= large.min_rows:
            return run(now.settled, "fast first", large, now.normed, hidden)
        out = hidden
        if self._stacked and not self.acts:
            out = now.first(self._stacked)
        values = run(now.settled, "first", self.first, now.normed, out)
        if self.acts:
            return values
        if self.act_into is None or values is not out:
            return self._act(values)
        # Where nothing is stacked it is in place, each value by its own thread.
        self.act_into(hidden, values)
        return hidden


def pad_rows(first: Any, act: Any, second: Any, *, runs_fp8: bool) -> None:
    """Have an MLP's rows padded for its GEMMs when vLLM loads its layers.

    Args:
        first: Its first layer.
        act: Its activation.
        second: Its second layer.
        runs_fp8: Whether layers in FP8 may run here. vLLM would copy rows to pad them.
    """
    activation = activation_of(act)
    if activation is None:
        return
    if is_unquantized(first) and is_unquantized(second):
        # All activations here make 0 of the 0 that the first layer pads with.
        align(first, second, 2 if activation == "swiglu" else 1)
    elif (
        runs_fp8
        and fp8_methods.held_kernel(first)
        and (held := fp8_methods.held_kernel(second))
    ):
        # Not on top: it brings all of vLLM's kernels, see `fp8_methods.can_launch`.
        from vllm_flashinfer_vit.blocks.fp8_padding import pad_to_tiles

        pad_to_tiles(second, *held)


def build_mlp(spec: BlockSpec, layers: Layers) -> Mlp | Fp8Mlp:
    """Return what runs the MLP of a block."""
    activation = activation_of(layers.part(spec.act))
    if (
        activation is not None
        and layers.is_fp8(spec.first)
        and layers.is_fp8(spec.second)
        and fp8_methods.has_plain_inputs(layers.part(spec.first))
        and fp8_methods.has_plain_outputs(layers.part(spec.second))
    ):
        return Fp8Mlp(spec, layers, activation)
    return Mlp(spec, layers)


def activation_of(act: Any) -> Activation | None:
    """Return what a module of vLLM, a platform or Transformers computes."""
    from transformers.activations import GELUTanh
    from vllm.model_executor.layers.activation import GELU, QuickGELU, SiluAndMul

    if type(act) is torch.nn.GELU:
        return "tanh_gelu" if act.approximate == "tanh" else "gelu"
    # Its other form spells the formula out, and rounds after each operation.
    if type(act) is GELUTanh and isinstance(act.act, functools.partial):
        return "tanh_gelu"
    native = getattr(type(act), "forward_native", None)
    ops: dict[Any, Activation] = {
        SiluAndMul.forward_native: "swiglu",
        QuickGELU.forward_native: "quick_gelu",
        GELU.forward_native: "gelu",
    }
    return ops.get(native)


def _act_into(act: Any, activation: Activation | None) -> Callable[..., Any] | None:
    """Return an activation, `(out, values)`, if this process has it compiled."""
    if activation is None:
        return _clamped_swiglu(act)
    if activation == "swiglu":
        return compiled_op("silu_and_mul")
    if activation == "quick_gelu":
        return compiled_op("gelu_quick")
    approximate = GELU_APPROXIMATE[activation]

    def gelu_into(out: torch.Tensor, values: torch.Tensor) -> None:
        torch.ops.aten.gelu.out(values, approximate=approximate, out=out)

    return gelu_into


def _clamped_swiglu(act: Any) -> Callable[..., Any] | None:
    """Return vLLM's SwiGLU of clamped values, if a module is that."""
    from vllm.model_executor.layers.activation import SiluAndMulWithClamp

    native = getattr(type(act), "forward_native", None)
    op = compiled_op("silu_and_mul_with_clamp")
    if native is not SiluAndMulWithClamp.forward_native or op is None:
        return None

    def swiglu_into(out: torch.Tensor, values: torch.Tensor) -> None:
        op(out, values, act.swiglu_limit, act.alpha, act.beta)

    return swiglu_into

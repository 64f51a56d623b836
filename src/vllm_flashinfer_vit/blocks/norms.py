# SPDX-License-Identifier: Apache-2.0
"""The norms of a block, and the residual sums in front of them."""

from collections.abc import Callable
from typing import Any, Literal

import torch

# Takes the stream, the norm, and what to write the sum to, or None.
SumNorm = Callable[[torch.Tensor, "Norm", torch.Tensor | None], None]


class Norm:
    """A norm of a block, its parameters read where the module has them."""

    def __init__(self, module: Any) -> None:
        """Take a module that `is_known`."""
        self.module = module
        self._parameters = module._parameters
        self.is_layer_norm = isinstance(module, torch.nn.LayerNorm)
        self.eps: float = module.eps if self.is_layer_norm else module.variance_epsilon

    @property
    def weight(self) -> torch.Tensor:
        """`[C]`."""
        return self._parameters["weight"]

    @property
    def bias(self) -> torch.Tensor | None:
        """`[C]` of a LayerNorm, None of an RMSNorm."""
        return self._parameters["bias"] if self.is_layer_norm else None


def is_known(module: Any, kind: Literal["layer", "rms"]) -> bool:
    """Whether a module is the norm that a spec says, with all its parameters."""
    if kind == "layer":
        return type(module) is torch.nn.LayerNorm and module.bias is not None
    from vllm.model_executor.layers.layernorm import RMSNorm

    # A platform may have a class of its own in its place.
    if getattr(type(module), "forward_native", None) is not RMSNorm.forward_native:
        return False
    return module.has_weight and module.variance_size_override is None


def prepare(
    x: torch.Tensor,
    branches: tuple[torch.Tensor, ...],
    norm: Norm,
    normed: torch.Tensor,
) -> SumNorm:
    """Settle a residual sum and its norm.

    Args:
        x: `[T, 1, C]`, a stream like those to come.
        branches: What is added to it, one or two tensors of T rows of C values, which
            calls read. The sum with one is not kept.
        norm: One of the norms that will be applied; all have its `eps`.
        normed: `[T, C]`, what calls write the norm to. It may be the last branch.

    Returns:
        A call.
    """
    if not x.is_cuda:
        return _reference(branches, normed)
    from vllm_flashinfer_vit.kernels import add_norm

    launch = add_norm.prepare(x, branches, norm.weight, norm.bias, norm.eps, normed)

    def call(x: torch.Tensor, norm: Norm, total: torch.Tensor | None) -> None:
        weight, bias = norm.weight, norm.bias
        # Of what is not there, nothing is read or written.
        launch(
            x,
            weight,
            weight if bias is None else bias,
            normed if total is None else total,
        )

    return call


def _reference(branches: tuple[torch.Tensor, ...], normed: torch.Tensor) -> SumNorm:
    from vllm_flashinfer_vit.kernels.add_norm_ref import sum_norm_ref

    def call(x: torch.Tensor, norm: Norm, total: torch.Tensor | None) -> None:
        terms = [term.view(normed.shape) for term in (x, *branches)]
        kept, found = sum_norm_ref(
            terms, norm.weight, norm.bias, norm.eps, total is not None
        )
        normed.copy_(found)
        if total is not None and kept is not None:
            total.copy_(kept.view(total.shape))

    return call


def separate(
    x: torch.Tensor,
    branches: tuple[torch.Tensor, ...],
    norm: Norm,
    normed: torch.Tensor,
) -> SumNorm:
    """Return what `prepare` does as vLLM does it: sums are rounded, then normalised."""

    def call(x: torch.Tensor, norm: Norm, total: torch.Tensor | None) -> None:
        summed = x.view(normed.shape)
        for branch in branches:
            summed = summed + branch.view(normed.shape)
        if total is not None:
            total.copy_(summed.view(total.shape))
        normed.copy_(norm.module(summed))

    return call

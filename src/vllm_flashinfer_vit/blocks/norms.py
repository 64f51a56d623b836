# SPDX-License-Identifier: Apache-2.0
"""The norms of a block, and the residual sums in front of them."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_flashinfer_vit.blocks.fp8_linear import quantize
from vllm_flashinfer_vit.kernels.add_norm_ref import sum_norm_ref, write_bound
from vllm_flashinfer_vit.kernels.formats import Bound

# One or two, of T rows of C values each, contiguous.
Branches = tuple[torch.Tensor, ...]
# `[C]` each: what branches are multiplied by before they are added.
LayerScales = tuple[torch.Tensor, ...]


class Norm:
    """A norm of a block, its parameters read where the module has them."""

    def __init__(self, module: Any) -> None:
        """Take a module that `is_known`."""
        self.module = module
        self._parameters = module._parameters
        self.is_layer_norm = _is_layer_norm(module)
        self.eps = _eps_of(module)

    @property
    def weight(self) -> torch.Tensor:
        """`[C]`."""
        return self._parameters["weight"]

    @property
    def bias(self) -> torch.Tensor | None:
        """`[C]` of a LayerNorm, None of an RMSNorm."""
        return self._parameters["bias"] if self.is_layer_norm else None


# A residual sum and its norm: the stream, `[T, 1, C]`; what is added to it; the norm;
# where the sum is written, like the stream, or None; what the norm's rows are quantised
# by, see `kernels.add_norm.prepare`, or None; as many layer scales as branches, or
# none; the bound of the rows that an activation makes of the norm's, or None.
Terms = tuple[
    torch.Tensor,
    Branches,
    Norm,
    torch.Tensor | None,
    torch.Tensor | None,
    LayerScales,
    Bound | None,
]


def scaling_of(
    block: torch.nn.Module, names: tuple[str, ...]
) -> tuple[tuple[Any, str], ...]:
    """Return which modules have a block's layer scales, and by which names.

    Args:
        block: The block.
        names: Their paths in it.

    Returns:
        The modules' parameters and the names; empty for a block without layer scales.
    """
    paths = [name.rpartition(".") for name in names]
    found = [(block.get_submodule(at)._parameters, name) for at, _, name in paths]
    return tuple(found) if all(name in has for has, name in found) else ()


def is_known(module: Any, own: str | None = None) -> bool:
    """Whether a module is a LayerNorm or an RMSNorm with all its parameters.

    Args:
        module: The module.
        own: As `own_norm` of `BlockSpec`.
    """
    if _is_layer_norm(module):
        return module.weight is not None and module.bias is not None
    if type(module) is torch.nn.RMSNorm:
        return module.weight is not None and len(module.normalized_shape) == 1
    if f"{type(module).__module__}:{type(module).__qualname__}" == own:
        return True
    from vllm.model_executor.layers.layernorm import RMSNorm

    # A platform may have a class of its own in its place.
    if getattr(type(module), "forward_native", None) is not RMSNorm.forward_native:
        return False
    return module.has_weight and module.variance_size_override is None


def _eps_of(module: Any) -> float:
    if hasattr(module, "variance_epsilon"):
        return float(module.variance_epsilon)
    if module.eps is None:
        # That of the dtype that PyTorch computes in: `_fused_rms_norm` of its
        # torch/_decomp/decompositions.py.
        return torch.finfo(torch.float32).eps
    return float(module.eps)


def _is_layer_norm(module: Any) -> bool:
    if type(module) is torch.nn.LayerNorm:
        return True
    from vllm.model_executor.layers import layernorm

    # Towers have it from vLLM 0.32 on.
    own = getattr(layernorm, "LayerNorm", None)
    native = getattr(type(module), "forward_native", None)
    # Older ones have another class of this name.
    return native is not None and native is getattr(own, "forward_native", None)


def prepare(like: Terms, normed: torch.Tensor) -> Callable[[Terms], None]:
    """Settle a residual sum and its norm.

    Args:
        like: Terms like those to come: their norms have its `eps`, their bounds its
            scales. The sum with one branch is not kept.
        normed: `[T, C]`, what calls write the norm to. It may be a call's last branch.

    Returns:
        A call.
    """
    x, branches, norm, _, scales, layer_scales, bound = like
    if not x.is_cuda:
        return functools.partial(_reference, normed)
    from vllm_flashinfer_vit.kernels import add_norm

    parameters = norm.weight, norm.bias, norm.eps
    launch = add_norm.prepare(
        x, branches, *parameters, normed, scales, layer_scales, bound
    )

    def call(terms: Terms) -> None:
        x, branches, norm, total, scales, layer_scales, bound = terms
        weight, bias = norm.weight, norm.bias
        # Of what is not there, nothing is read or written.
        given: tuple[torch.Tensor, ...] = (
            x,
            branches[0],
            branches[-1],
            weight,
            weight if bias is None else bias,
            normed if total is None else total,
        )
        if scales is not None:
            given = *given, scales
        if bound is None:
            launch(*given, *layer_scales)
        else:
            launch(*given, *layer_scales, bound.factors)

    return call


def _reference(normed: torch.Tensor, terms: Terms) -> None:
    x, branches, norm, total, scales, layer_scales, bound = terms
    added = [term.view(normed.shape) for term in (x, *branches)]
    keep = total is not None
    kept, found = sum_norm_ref(
        added, norm.weight, norm.bias, norm.eps, keep, scales, layer_scales, bound
    )
    normed.copy_(found)
    if total is not None and kept is not None:
        total.copy_(kept.view(total.shape))


def separate(like: Terms, normed: torch.Tensor) -> Callable[[Terms], None]:
    """Return what `prepare` does as vLLM does it: sums are rounded, then normalised."""
    return functools.partial(_separately, normed)


def _separately(normed: torch.Tensor, terms: Terms) -> None:
    x, branches, norm, total, scales, layer_scales, bound = terms
    summed = add(x.view(normed.shape), branches, layer_scales)
    if total is not None:
        total.copy_(summed.view(total.shape))
    found = write_norm(norm, summed, normed, scales)
    if bound is not None:
        write_bound(found, bound)


def add(x: torch.Tensor, branches: Branches, layer_scales: LayerScales) -> torch.Tensor:
    """Return a stream with branches added, rounded after each.

    Args:
        x: `[..., C]`.
        branches: One or two, of as many values as x.
        layer_scales: As many as branches, or none.
    """
    for place, branch in enumerate(branches):
        term = branch.view(x.shape)
        scaled = term * layer_scales[place] if layer_scales else term
        x = x + scaled
    return x


def write_norm(
    norm: Norm, x: torch.Tensor, normed: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor:
    """Normalise rows by the norm's own module, and quantise them if scales are given.

    Args:
        norm: The norm.
        x: `[T, C]`.
        normed: `[T, C]` like x, or e4m3; written.
        scales: As for `fp8_linear.quantize`, or None.

    Returns:
        What the module returns, like x.
    """
    found = norm.module(x)
    if scales is None:
        normed.copy_(found)
    else:
        quantize(found, normed, scales)
    return found

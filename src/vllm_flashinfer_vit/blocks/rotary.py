# SPDX-License-Identifier: Apache-2.0
"""Cosines and sines of what a block's `forward` is given, and what turns q and k."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_flashinfer_vit.blocks.spec import Rotary

Tables = tuple[torch.Tensor, torch.Tensor]


def tables(rotary: Rotary, given: Sequence[torch.Tensor]) -> Tables:
    """Return cosines and sines, `[T, R / 2]` each.

    Args:
        rotary: What is given.
        given: By the names of `rotary.parameters`.
    """
    first = given[0]
    if rotary.form == "angles":
        angles = first.float()
        return angles.cos(), angles.sin()
    if rotary.form in ("complex", "real"):
        parts = torch.view_as_real(first) if first.is_complex() else first
        cos, sin = parts.float().unbind(-1)
        return cos.contiguous(), sin.contiguous()
    cos, sin = first if rotary.form == "pair" else given
    if rotary.form in ("doubled", "pair"):
        half = cos.shape[-1] // 2
        return cos[..., :half], sin[..., :half]
    if rotary.form == "exact":
        return cos.squeeze(1), sin.squeeze(1)
    if rotary.form == "planes":
        return _sections(cos), _sections(sin)
    return cos, sin


def _sections(planes: torch.Tensor) -> torch.Tensor:
    """Return each plane's own columns; the others may hold anything."""
    parts = planes.chunk(len(planes), dim=-1)
    return torch.cat([part[at] for at, part in enumerate(parts)], dim=-1)


def repeated(found: Tables, rows: int) -> Tables:
    """Return tables of one sequence for as many alike as have `rows` in all."""
    cos, sin = (part.repeat(rows // len(part), 1) for part in found)
    return cos, sin


class Turn:
    """q and k normalised and turned in front of attention, which does not normalise."""

    def __init__(self, norms: Sequence[Any]) -> None:
        """Take the RMSNorms of q and of k."""
        self._norms = norms

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        """The norms' weights, where they are now."""
        return tuple(norm._parameters["weight"].detach() for norm in self._norms)

    def prepare(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> Callable[..., object]:
        """Settle it; see `kernels.turn.prepare`."""
        eps = self._norms[0].variance_epsilon
        if q.is_cuda:
            from vllm_flashinfer_vit.kernels.turn import prepare

            return prepare(q, k, cos, sin, self.weights, eps)
        from vllm_flashinfer_vit.kernels.turn_ref import turn_ref

        return lambda *weights: turn_ref(q, k, cos, sin, weights, eps)

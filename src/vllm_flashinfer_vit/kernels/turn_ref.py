# SPDX-License-Identifier: Apache-2.0
"""q and k normalised and turned in plain PyTorch: what `kernels/turn.py` does."""

from collections.abc import Sequence

import torch

from vllm_flashinfer_vit.kernels.formats import check_rope_inputs


def turn_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: Sequence[torch.Tensor] = (),
    eps: float = 0.0,
    interleaved: bool = False,
) -> None:
    """Normalise each head of q and k, if weights are given, and turn it, in place.

    The arithmetic is fp32 with one rounding to the input's dtype at the end.

    Args:
        q: `[T, H, D]` floating point, any strides; overwritten.
        k: `[T, H_kv, D]` like q; overwritten.
        cos: `[T, D / 2]`, any floating dtype and strides.
        sin: Like cos.
        weights: Of the RMSNorms of q and of k, `[D]` each, any floating dtype; or none
            for no norm.
        eps: Added to the mean square.
        interleaved: Whether elements 2 i and 2 i + 1 are a pair; else elements i and
            i + D / 2.

    Raises:
        ValueError: The shapes do not fit together, or only a part of D is turned.
    """
    check_turn_inputs(q, k, cos, sin, weights)
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    for place, x in enumerate((q, k)):
        values = x.float()
        if weights:
            mean_square = values.pow(2).mean(-1, keepdim=True)
            values = values * torch.rsqrt(mean_square + eps) * weights[place].float()
        shape = (-1, 2) if interleaved else (2, -1)
        first, second = values.unflatten(-1, shape).unbind(-1 if interleaved else -2)
        turned = first * cos - second * sin, second * cos + first * sin
        x.copy_(torch.stack(turned, -1 if interleaved else -2).flatten(-2))


def check_turn_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: Sequence[torch.Tensor],
) -> None:
    """Check that q and k can be normalised and turned.

    Raises:
        ValueError: As `turn_ref`.
    """
    check_rope_inputs(q, k, cos, sin)
    head_dim = q.shape[2]
    if 2 * cos.shape[1] != head_dim:
        raise ValueError(
            f"cos and sin must be [T, {head_dim // 2}] for all of a head, got "
            f"{tuple(cos.shape)}"
        )
    if weights and [tuple(weight.shape) for weight in weights] != [(head_dim,)] * 2:
        raise ValueError(
            f"weights must be none or two of [{head_dim}], got "
            f"{[tuple(weight.shape) for weight in weights]}"
        )

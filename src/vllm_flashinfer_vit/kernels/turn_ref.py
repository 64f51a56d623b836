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
    weights: Sequence[torch.Tensor],
    eps: float,
    span: int | None = None,
    v: torch.Tensor | None = None,
) -> None:
    """Normalise each head of q and k, and turn it, in place.

    The arithmetic is fp32 with one rounding to the input's dtype at the end.

    Args:
        q: `[T, H, D]` floating point, any strides; overwritten.
        k: `[T, H_kv, D]` like q; overwritten.
        cos: `[T, D / 2]`, any floating dtype and strides.
        sin: Like cos.
        weights: Of the RMSNorms of q and of k, `[D]` each, any floating dtype.
        eps: Added to the mean square.
        span: The distance of a pair's elements, D / 2 for None. Each 2 `span` elements
            are turned on their own, so that D / 4 turns the halves of a head by the
            halves of cos and sin, as axial rotary embedding does.
        v: `[T, H_kv, D]` like k, or None. Each head of it is normalised, without a
            weight, and not turned; overwritten.

    Raises:
        ValueError: The shapes do not fit together, or only a part of D is turned.
    """
    check_turn_inputs(q, k, cos, sin, weights, span, v)
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    for place, x in enumerate((q, k)):
        values = x.float()
        mean_square = values.pow(2).mean(-1, keepdim=True)
        values = values * torch.rsqrt(mean_square + eps) * weights[place].float()
        distance = span or x.shape[-1] // 2
        first, second = values.unflatten(-1, (-1, 2, distance)).unbind(-2)
        by_cos, by_sin = (table.view(-1, 1, *first.shape[2:]) for table in (cos, sin))
        turned = first * by_cos - second * by_sin, second * by_cos + first * by_sin
        x.copy_(torch.stack(turned, -2).flatten(2))
    if v is not None:
        values = v.float()
        mean_square = values.pow(2).mean(-1, keepdim=True)
        v.copy_(values * torch.rsqrt(mean_square + eps))


def check_turn_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: Sequence[torch.Tensor],
    span: int | None,
    v: torch.Tensor | None,
) -> None:
    """Check that q and k can be normalised and turned, and v normalised.

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
    if [tuple(weight.shape) for weight in weights] != [(head_dim,)] * 2:
        raise ValueError(
            f"weights must be two of [{head_dim}], got "
            f"{[tuple(weight.shape) for weight in weights]}"
        )
    if span is not None and (span < 1 or head_dim % (2 * span)):
        raise ValueError(
            f"a span of {span} does not divide a head of {head_dim} into pairs"
        )
    if v is not None and v.shape != k.shape:
        raise ValueError(f"v must be like k {tuple(k.shape)}, got {tuple(v.shape)}")

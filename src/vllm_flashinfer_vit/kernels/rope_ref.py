# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of q and k in plain PyTorch: what `kernels/rope.py` must equal."""

import torch

from vllm_flashinfer_vit.kernels.formats import check_rope_inputs


def rope_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k: element d of the first half pairs with d of the second half.

    The arithmetic is fp32 with one rounding to the input's dtype at the end.

    Args:
        q: `[T, H, D]` floating point, any strides.
        k: `[T, H_kv, D]`, any strides.
        cos: `[T, R / 2]` with even R <= D, any floating dtype and strides. Elements
            from R on are copied.
        sin: Like cos.
        interleaved: Whether elements 2 d and 2 d + 1 are a pair instead.

    Returns:
        Rotated q `[T, H, D]` and k `[T, H_kv, D]`, contiguous, in their own dtypes;
        interleaved pairs as `halves`.

    Raises:
        ValueError: The shapes do not fit together.
    """
    check_rope_inputs(q, k, cos, sin)
    if interleaved:
        q, k = (halves(x, 2 * cos.shape[1]) for x in (q, k))
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def halves(x: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Return interleaved pairs as halves: first elements, then second ones.

    Args:
        x: `[..., D]`, D even.
        rotary_dim: R. What is not turned, from R on, has halves of its own.
    """
    parts = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat([part[..., i::2] for part in parts for i in (0, 1)], dim=-1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[1]
    cos = cos.float()[:, None]  # [T, 1, R / 2]
    sin = sin.float()[:, None]
    first = x[..., :half].float()
    second = x[..., half : 2 * half].float()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out

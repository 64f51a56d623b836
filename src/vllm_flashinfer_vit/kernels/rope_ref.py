# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of q and k in plain PyTorch: what `kernels/rope.py` must equal."""

import torch


def rope_ref(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k: element d of the first half pairs with d of the second half.

    The arithmetic is fp32 with one rounding to the input's dtype at the end.

    Args:
        q: `[T, H, D]` floating point, any strides.
        k: `[T, H_kv, D]`, any strides.
        cos: `[T, R / 2]` with even R <= D, any floating dtype and strides. Elements
            from R on are copied.
        sin: Like cos.

    Returns:
        Rotated q `[T, H, D]` and k `[T, H_kv, D]`, contiguous, in their own dtypes.

    Raises:
        ValueError: The shapes do not fit together.
    """
    check_rope_inputs(q, k, cos, sin)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def check_rope_inputs(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Raise ValueError unless the four shapes fit together as `rope_ref` says."""
    if (
        q.dim() != 3
        or k.dim() != 3
        or k.shape[0] != q.shape[0]
        or k.shape[2] != q.shape[2]
    ):
        raise ValueError(
            "q and k must be [T, H, D] and [T, H_kv, D], "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if (
        cos.dim() != 2
        or cos.shape != sin.shape
        or cos.shape[0] != q.shape[0]
        or not 0 < 2 * cos.shape[1] <= q.shape[2]
    ):
        raise ValueError(
            f"cos and sin must be [T, R / 2] with T={q.shape[0]} and R <= "
            f"{q.shape[2]}, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )


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

# SPDX-License-Identifier: Apache-2.0
"""A branch's own norm, its sum with the stream, and the norm after it, in PyTorch.

It is what `kernels/norm_add.py` does.
"""

import torch


def norm_add_ref(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    next_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add an RMSNorm of a branch to the residual stream, and normalise the sum.

    The arithmetic is fp32. The sum is rounded to the input's dtype; what is normalised
    is the sum before that.

    Args:
        x: The stream, `[T, C]` floating point, any strides.
        branch: Like x.
        weight: Of the branch's RMSNorm, `[C]`, any floating dtype.
        eps: Added to both mean squares.
        next_weight: Of the sum's RMSNorm, like `weight`; None for no norm of it.

    Returns:
        The sum, and its norm or None, each `[T, C]` contiguous like x.

    Raises:
        ValueError: The shapes or dtypes do not fit together.
    """
    check_norm_add_inputs(x, branch, weight, next_weight)
    total = x.float() + _norm(branch.float(), weight, eps)
    normed = None
    if next_weight is not None:
        normed = _norm(total, next_weight, eps).to(x.dtype)
    return total.to(x.dtype), normed


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean_square + eps) * weight.float()


def check_norm_add_inputs(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    next_weight: torch.Tensor | None,
) -> None:
    """Check that a branch can be normalised and added.

    Raises:
        ValueError: As `norm_add_ref`.
    """
    if x.dim() != 2 or branch.shape != x.shape or branch.dtype != x.dtype:
        raise ValueError(
            "x and branch must be [T, C] of one dtype, got "
            f"{tuple(x.shape)} {x.dtype} and {tuple(branch.shape)} {branch.dtype}"
        )
    for given in (weight, next_weight):
        if given is not None and given.shape != x.shape[1:]:
            raise ValueError(
                f"weights must be [{x.shape[1]}], got {tuple(given.shape)}"
            )

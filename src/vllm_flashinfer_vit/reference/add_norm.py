# SPDX-License-Identifier: Apache-2.0
"""A residual sum and its LayerNorm in plain PyTorch: what `kernels/add_norm.py` is."""

import torch


def add_layer_norm_ref(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a branch to the residual stream, and normalize the sum.

    The arithmetic is fp32. The sum is rounded to the input's dtype, and what is
    normalized is the rounded sum.

    Args:
        x: `[..., C]` floating point, any strides.
        branch: Like x.
        weight: `[C]`, any floating dtype.
        bias: Like weight.
        eps: Added to the variance.

    Returns:
        `x + branch` and its LayerNorm, both like x.

    Raises:
        ValueError: The shapes or dtypes do not fit together.
    """
    check_add_norm_inputs(x, branch, weight, bias)
    total = (x.float() + branch.float()).to(x.dtype)
    normed = torch.nn.functional.layer_norm(
        total.float(), weight.shape, weight.float(), bias.float(), eps
    )
    return total, normed.to(x.dtype)


def check_add_norm_inputs(
    x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> None:
    """Raise ValueError unless the four fit together as `add_layer_norm_ref` says."""
    if x.dim() == 0 or branch.shape != x.shape or branch.dtype != x.dtype:
        raise ValueError(
            "x and branch must be [..., C] of one shape and dtype, got "
            f"{tuple(x.shape)} {x.dtype} and {tuple(branch.shape)} {branch.dtype}"
        )
    if weight.shape != x.shape[-1:] or bias.shape != weight.shape:
        raise ValueError(
            f"weight and bias must be [{x.shape[-1]}], got {tuple(weight.shape)} and "
            f"{tuple(bias.shape)}"
        )

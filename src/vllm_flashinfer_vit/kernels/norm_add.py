# SPDX-License-Identifier: Apache-2.0
"""A branch's own norm, its sum with the stream, and the norm after it, in one pass.

Blocks with a norm after attention and MLP as well as before them, as Gemma's, run it
twice: `x + norm(branch)`, and of that the norm that the next layers read.

Numerics: fp32 throughout. The sum is rounded once; its norm is of the sum before it is
rounded.
"""

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout
from vllm_flashinfer_vit.kernels._rows import MAX_WIDTH, warps_of
from vllm_flashinfer_vit.kernels.norm_add_ref import check_norm_add_inputs


@triton.jit
def _norm_add_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    next_weight_ptr,
    sum_ptr,
    norm_ptr,
    stride_x,
    stride_b,
    eps,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    HAS_NEXT: tl.constexpr,
):
    """Normalise a branch, add it, and normalise the sum, a row. Grid: (rows,)"""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, C_PAD)
    mask = offs < C
    branch = tl.load(branch_ptr + row * stride_b + offs, mask=mask, other=0.0)
    branch = branch.to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(branch * branch, axis=0) / C + eps)
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    total = x + branch * root * weight
    dtype = x_ptr.dtype.element_ty
    tl.store(sum_ptr + row * C + offs, total.to(dtype), mask=mask)
    if HAS_NEXT:
        weight = tl.load(next_weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(total * total, axis=0) / C + eps)
        normed = total * root * weight
        tl.store(norm_ptr + row * C + offs, normed.to(dtype), mask=mask)


def norm_add(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    next_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add an RMSNorm of a branch to the residual stream, and normalise the sum.

    Args:
        x: The stream, `[T, C]` fp32, fp16 or bf16, rows of any stride, C up to
            `MAX_WIDTH`.
        branch: Like x.
        weight: Of the branch's RMSNorm, `[C]`, any floating dtype, contiguous.
        eps: Added to both mean squares.
        next_weight: Of the sum's RMSNorm, like `weight`; None for no norm of it.

    Returns:
        The sum, and its norm or None, each `[T, C]` contiguous like x.

    Raises:
        ValueError: A tensor breaks a demand above.
    """
    launch = _launch(x, branch, weight, eps, next_weight)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = None if next_weight is None else torch.empty_like(total)
    if x.numel():
        launch(
            x,
            branch,
            weight,
            weight if next_weight is None else next_weight,
            total,
            total if normed is None else normed,
        )
    return total, normed


@cached_by_layout
def _launch(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    next_weight: torch.Tensor | None,
) -> Launch:
    check_norm_add_inputs(x, branch, weight, next_weight)
    given = x, branch, weight, weight if next_weight is None else next_weight
    if any(tensor.stride(-1) != 1 for tensor in given):
        raise ValueError(
            f"every last stride must be 1, got {[tensor.stride() for tensor in given]}"
        )
    rows, width = x.shape
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(f"rows must have 1 to {MAX_WIDTH} values, got {width}")
    width_pad = triton.next_power_of_2(width)
    return Launch(
        _norm_add_kernel,
        rows,
        x.stride(0),
        branch.stride(0),
        eps,
        C=width,
        C_PAD=width_pad,
        HAS_NEXT=next_weight is not None,
        num_warps=warps_of(width_pad),
    )

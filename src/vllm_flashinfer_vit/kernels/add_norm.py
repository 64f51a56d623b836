# SPDX-License-Identifier: Apache-2.0
"""A residual addition and the LayerNorm behind it, in one pass over the rows.

It replaces an addition and a LayerNorm of their own: of five reads and writes of a
hidden state four are left, and of two launches one.

Numerics: fp32 throughout; the sum is rounded once, and its norm is of the rounded sum,
as by the two ops. The sum has their bits, the norm may differ in the last one, since
mean and variance add up in another order.
"""

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._triton import Launch, cached_by_layout
from vllm_flashinfer_vit.reference.add_norm import check_add_norm_inputs

# A program holds one row in registers.
MAX_WIDTH = 16384
# 16 values a thread are two loads of 16 bytes from each input.
_VALUES_PER_WARP = 32 * 16
_MAX_WARPS = 16


@triton.jit
def _add_layer_norm_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    norm_ptr,
    eps,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
):
    """Add and normalize one row of C values. Grid: (rows,)"""
    row = tl.program_id(0).to(tl.int64) * C
    offs_c = tl.arange(0, C_PAD)
    mask_c = offs_c < C
    x = tl.load(x_ptr + row + offs_c, mask=mask_c, other=0.0)
    branch = tl.load(branch_ptr + row + offs_c, mask=mask_c, other=0.0)
    weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)

    total = (x.to(tl.float32) + branch.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row + offs_c, total, mask=mask_c)

    total = total.to(tl.float32)
    mean = tl.sum(total, axis=0) / C
    centred = tl.where(mask_c, total - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / C
    normed = centred * tl.rsqrt(variance + eps) * weight + bias
    tl.store(norm_ptr + row + offs_c, normed.to(x.dtype), mask=mask_c)


def add_layer_norm(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a branch to the residual stream, and normalize the sum.

    Args:
        x: `[..., C]` fp32, fp16 or bf16, contiguous, C up to `MAX_WIDTH`.
        branch: Like x.
        weight: `[C]`, any floating dtype, contiguous.
        bias: Like weight.
        eps: Added to the variance.

    Returns:
        `x + branch` and its LayerNorm, both like x; every row is written.

    Raises:
        ValueError: A tensor breaks a demand above.
    """
    launch = _launch(x, branch, weight, bias, eps)
    total = torch.empty_like(x)
    normed = torch.empty_like(x)
    if x.numel() > 0:
        launch(x, branch, weight, bias, total, normed)
    return total, normed


@cached_by_layout
def _launch(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> Launch:
    check_add_norm_inputs(x, branch, weight, bias)
    width = x.shape[-1]
    if not all(tensor.is_contiguous() for tensor in (x, branch, weight, bias)):
        raise ValueError("x, branch, weight and bias must be contiguous")
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(f"rows must have 1 to {MAX_WIDTH} values, got {width}")
    width_pad = triton.next_power_of_2(width)
    return Launch(
        _add_layer_norm_kernel,
        x.numel() // width,
        eps,
        C=width,
        C_PAD=width_pad,
        num_warps=max(1, min(_MAX_WARPS, width_pad // _VALUES_PER_WARP)),
    )

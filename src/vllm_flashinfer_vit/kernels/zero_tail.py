# SPDX-License-Identifier: Apache-2.0
"""Copy packed rows, with zeros in the rows behind the last sequence.

FlashAttention loads whole tiles of V and multiplies what lies behind a sequence's end
by a weight of 0, so a NaN in a graph's padding rows would reach the last sequence.
"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_seqs", "stride_xt", "stride_xh"])
def _zero_tail_kernel(
    x_ptr,
    cu_ptr,
    out_ptr,
    num_seqs,
    stride_xt,
    stride_xh,
    D: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one row of H * D elements. Grid: (num_tokens,)"""
    row = tl.program_id(0).to(tl.int64)
    is_real = row < tl.load(cu_ptr + num_seqs)
    offs = tl.arange(0, BLOCK)
    source = x_ptr + row * stride_xt + (offs // D).to(tl.int64) * stride_xh + offs % D
    x = tl.load(source, mask=(offs < ROW) & is_real, other=0.0)
    tl.store(out_ptr + row * ROW + offs, x, mask=offs < ROW)


def zero_tail(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of x whose rows from `cu_seqlens[-1]` on are zeros.

    Args:
        x: `[T, H, D]`, any dtype, D-stride 1, any other strides.
        cu_seqlens: `[N + 1] int32` on x's device, monotone token prefix sums.
    """
    num_tokens, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    _zero_tail_kernel[(num_tokens,)](
        x,
        cu_seqlens,
        out,
        num_seqs=cu_seqlens.shape[0] - 1,
        stride_xt=x.stride(0),
        stride_xh=x.stride(1),
        D=head_dim,
        ROW=heads * head_dim,
        BLOCK=triton.next_power_of_2(heads * head_dim),
    )
    return out

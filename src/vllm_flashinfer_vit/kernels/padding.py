# SPDX-License-Identifier: Apache-2.0
"""Make a padded batch safe for kernels that expect none, in one launch.

In a graph's replay cu_seqlens may end in zeros, and rows after the last sequence are
padding. A kernel made for plain batches would see a negative length, and may multiply
padding rows by a weight of 0, which leaves a NaN a NaN.
"""

import functools

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._triton import (
    clearing_programs,
    last_row,
    zero_rows,
)
from vllm_flashinfer_vit.kernels.seqlens import derive_offsets

_BLOCK = 1024


# One variant for all arguments: it is compiled before any capture.
@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "stride_vt", "stride_vh"],
    do_not_specialize_on_alignment=["cu_ptr", "cu_out_ptr", "v_ptr", "out_ptr"],
)
def _mask_padding_kernel(
    cu_ptr,
    cu_out_ptr,
    v_ptr,
    out_ptr,
    num_seqs,
    num_tokens,
    stride_vt,
    stride_vh,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Derive BLOCK offsets, or clear a share of the padding's rows.

    Grid: (cdiv(num_seqs + 1, BLOCK) + clearing_programs(num_tokens),)
    """
    pid = tl.program_id(0)
    num_derive = tl.cdiv(num_seqs + 1, BLOCK)
    if pid < num_derive:
        first_n = pid * BLOCK
        offs_n = first_n + tl.arange(0, BLOCK)
        cu = derive_offsets(cu_ptr, offs_n, first_n, num_seqs, num_tokens, BLOCK)
        tl.store(cu_out_ptr + offs_n, cu, mask=offs_n <= num_seqs)
        return
    end = last_row(cu_ptr, num_seqs, num_tokens)
    offs = tl.arange(0, BLOCK)
    first, step = pid - num_derive, tl.num_programs(0) - num_derive
    for row in range(end + first, num_tokens, step):
        row_v = tl.cast(row, tl.int64) * stride_vt
        row_out = tl.cast(row, tl.int64) * (H * D)
        for col in range(0, H_KV * D, BLOCK):
            head_v = tl.cast((col + offs) // D, tl.int64)
            offs_v = head_v * stride_vh + (col + offs) % D
            tl.store(v_ptr + row_v + offs_v, 0.0, mask=col + offs < H_KV * D)
        for col in range(0, H * D, BLOCK):
            tl.store(out_ptr + row_out + col + offs, 0.0, mask=col + offs < H * D)


def mask_padding(
    cu_seqlens: torch.Tensor, v: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Zero the padding rows of v and out, in place, and mend cu_seqlens.

    Args:
        cu_seqlens: `[N + 1] int32`, contiguous token prefix sums; where they fall, the
            sequence is empty.
        v: `[T, H_kv, D]`, D-stride 1, any other strides; only rows that belong to no
            sequence, which nobody else reads, change.
        out: `[T, H, D]`, contiguous; likewise.

    Returns:
        `[N + 1] int32`, the offsets clamped to [0, T] and never falling.
    """
    num_tokens, heads, head_dim = out.shape
    num_seqs = cu_seqlens.shape[0] - 1
    cu_out = torch.empty_like(cu_seqlens)
    grid = triton.cdiv(num_seqs + 1, _BLOCK) + clearing_programs(num_tokens)
    _mask_padding_kernel[(grid,)](
        cu_seqlens,
        cu_out,
        v,
        out,
        num_seqs,
        num_tokens,
        v.stride(0),
        v.stride(1),
        H=heads,
        H_KV=v.shape[1],
        D=head_dim,
        BLOCK=_BLOCK,
    )
    return cu_out


# One variant for all numbers of rows and sequences, as above.
@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens"],
    do_not_specialize_on_alignment=["cu_ptr", "x_ptr"],
)
def _clear_kernel(cu_ptr, x_ptr, num_seqs, num_tokens, ROW: tl.constexpr):
    """Clear a share of the padding's rows. Grid: (clearing_programs(num_tokens),)"""
    first, step = tl.program_id(0), tl.num_programs(0)
    zero_rows(cu_ptr, x_ptr, num_tokens, num_seqs, first, step, ROW)


def clear_padding(cu_seqlens: torch.Tensor, x: torch.Tensor) -> None:
    """Zero the rows of x, in place, that come after every sequence.

    Args:
        cu_seqlens: As for `mask_padding`.
        x: `[T, C]`, contiguous, of any dtype.
    """
    num_tokens, row = x.shape
    grid = (clearing_programs(num_tokens),)
    sizes = cu_seqlens.shape[0] - 1, num_tokens
    _clear_kernel[grid](cu_seqlens, x, *sizes, ROW=row)


@functools.cache
def compile_clearing(row: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile `clear_padding` for rows of so many elements, before any capture."""
    x = torch.zeros(1, row, dtype=dtype, device=device)
    clear_padding(torch.zeros(2, dtype=torch.int32, device=device), x)

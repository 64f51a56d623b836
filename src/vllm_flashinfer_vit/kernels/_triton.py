# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels share on the device, and the checks of their inputs."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# Kernels take powers of two, which the hardware has.
LOG2_E = math.log2(math.e)
# 16-bit elements of the widest load, 16 bytes.
_MAX_UNIT = 8
# Tokens of a batch for each program that clears padding. All share its rows, one in
# five at most by automatic budgets of graphs: a row takes a program of an H200 0.27 us.
_TOKENS_TO_CLEAR = 32


def stride_unit(*sizes: int) -> int:
    """Return the largest power of two up to 8 that divides every stride and offset.

    Triton knows of an integer argument at most that 16 divides it. With a head stride
    of 72 it would load single elements. A kernel that takes its strides in units, and
    multiplies by the constant unit, loads whole units and needs no variant per stride.
    """
    return math.gcd(_MAX_UNIT, *sizes)


def pair_units(
    interleaved: bool,
    halves: Sequence[int],
    strides: Sequence[int],
    angle_strides: Sequence[int],
) -> tuple[int, int]:
    """Return UNIT and UNIT_X of kernels that turn pairs of columns in runs.

    A run is UNIT pairs, and UNIT elements of cos and sin. Strides of what is turned
    count UNIT_Xs: where pairs are interleaved, a run is 2 UNIT elements there.

    Args:
        interleaved: Whether columns 2 i and 2 i + 1 are a pair; see `rope`.
        halves: D / 2 and R / 2.
        strides: Of what is turned.
        angle_strides: Of cos and sin.
    """
    if not interleaved:
        unit = stride_unit(*halves, *strides, *angle_strides)
        return unit, unit
    unit = math.gcd(_MAX_UNIT // 2, *halves, *angle_strides)
    return unit, math.gcd(2 * unit, *strides)


def split_width(width: int, least: int = 16) -> tuple[int, int]:
    """Cut a width into two powers of two, of which the second may hold more: 80 is 64
    and 16. It is 0 or at least `least`; matrix instructions take no less than 16."""
    low = 1 << (width.bit_length() - 1)
    rest = width - low
    return low, max(least, triton.next_power_of_2(rest)) if rest else 0


def clearing_programs(num_tokens: int) -> int:
    """Return how many programs are to share the rows after every sequence."""
    return triton.cdiv(num_tokens, _TOKENS_TO_CLEAR)


def check_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    """Check what the Triton attention kernels demand of their inputs.

    Raises:
        ValueError: q is not `[T, H, D]`, k or v not `[T, H_kv, D]` with H_kv a divisor
            of H, a D-stride is not 1, dtypes differ, D is no multiple of 8 from 32 to
            128, or cu_seqlens is not contiguous `[N + 1] int32`.
    """
    found = [(tuple(x.shape), x.stride(), x.dtype) for x in (q, k, v)]
    if any(x.dim() != 3 or x.stride(2) != 1 or x.dtype != q.dtype for x in (q, k, v)):
        raise ValueError(
            f"q, k, v must be [T, H, D] with D-stride 1 and of one dtype, got {found}"
        )
    head_dim = q.shape[2]
    if head_dim % 8 != 0 or not 32 <= head_dim <= 128:
        raise ValueError(
            f"the head dim must be a multiple of 8 from 32 to 128, got {head_dim}"
        )
    if (
        k.shape != v.shape
        or k.shape[::2] != q.shape[::2]
        or k.shape[1] == 0
        or q.shape[1] % k.shape[1] != 0
    ):
        raise ValueError(
            "k and v must be [T, H_kv, D] with the T and D of q and H_kv a divisor of "
            f"H, got {found}"
        )
    if (
        cu_seqlens.dim() != 1
        or cu_seqlens.numel() == 0
        or cu_seqlens.dtype != torch.int32
        or not cu_seqlens.is_contiguous()
    ):
        raise ValueError(
            "cu_seqlens must be [N + 1] int32 and contiguous, got "
            f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )


@triton.jit
def load_columns(
    base, row, mask, COL: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr
):
    """Load columns COL to COL + WIDTH; masked rows and the padding are zeros."""
    offs_d = tl.arange(0, WIDTH_PAD)
    mask = mask[:, None]
    if WIDTH < WIDTH_PAD:
        mask = mask & (offs_d < WIDTH)[None, :]
    return tl.load(
        base + (row[:, None] + (COL + offs_d)[None, :]), mask=mask, other=0.0
    )


@triton.jit
def load_parts(base, row, mask, D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr):
    """Load the first D columns as two tiles; see `split_width`."""
    lo = load_columns(base, row, mask, 0, min(D, LO), LO)
    if HI > 0:
        return lo, load_columns(base, row, mask, LO, D - LO, HI)
    else:
        return lo, lo


@triton.jit
def load_runs(base, at, mask, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """Load the runs of WIDTH elements that begin UNITs `at`; those masked are zeros."""
    offs = at[:, None] * UNIT + tl.arange(0, WIDTH)[None, :]
    return tl.load(base + offs, mask=mask[:, None], other=0.0)


@triton.jit
def load_interleaved(base, at, run, mask, UNIT: tl.constexpr, UNIT_X: tl.constexpr):
    """Load both elements of the pairs of runs, in rows that begin UNIT_Xs `at`."""
    at += run * (2 * UNIT // UNIT_X)
    return split_pairs(load_runs(base, at, mask, UNIT_X, 2 * UNIT))


@triton.jit
def split_pairs(x):
    """Return the first and the second elements of pairs that lie side by side.

    This is all that kernels know of interleaved pairs: what follows has them as those
    that lie apart, and stores them so. Scores do not see an order that q and k share.
    """
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def store_columns(
    base,
    row,
    mask,
    COL: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    value,
):
    offs_d = tl.arange(0, WIDTH_PAD)
    mask = mask[:, None]
    if WIDTH < WIDTH_PAD:
        mask = mask & (offs_d < WIDTH)[None, :]
    value = value.to(base.dtype.element_ty)
    tl.store(base + (row[:, None] + (COL + offs_d)[None, :]), value, mask=mask)


@triton.jit
def store_transposed(
    base,
    stride_d,
    offs_n,
    COL: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    value,
):
    """Store a tile [N, WIDTH_PAD] as the columns from COL on, each a row in memory."""
    offs_d = tl.arange(0, WIDTH_PAD)
    offs = ((COL + offs_d) * stride_d)[:, None] + offs_n[None, :]
    if WIDTH < WIDTH_PAD:
        tl.store(base + offs, tl.trans(value), mask=(offs_d < WIDTH)[:, None])
    else:
        tl.store(base + offs, tl.trans(value))


@triton.jit
def find_sequence(cu_seqlens_ptr, num_seqs, block, BLOCK: tl.constexpr):
    """Return the sequence that a block of BLOCK rows belongs to, -1 if none.

    Sequence n has the blocks from cu[n] // BLOCK + n on, so that its rows fit in front
    of the next one's whatever came before; where cu does not rise, it has none. It may
    have a block more than its rows fill, and the last one has all that remain.
    """
    found = tl.full([1024], -1, tl.int32)
    offs = tl.arange(0, 1024)
    for i in range(0, num_seqs, 1024):
        offs_n = i + offs
        start = tl.load(cu_seqlens_ptr + offs_n, mask=offs_n < num_seqs, other=0)
        end = tl.load(cu_seqlens_ptr + offs_n + 1, mask=offs_n < num_seqs, other=0)
        begins = (start < end) & (start // BLOCK + offs_n <= block)
        found = tl.maximum(found, tl.where(begins, offs_n, -1))
    return tl.max(found, axis=0)


@triton.jit
def last_row(cu_seqlens_ptr, num_seqs, num_tokens):
    """Return where the last sequence ends: the largest of the offsets, in the rows.

    Damaged offsets may lie beyond all rows, and what is added to them would overflow.
    """
    end = 0
    offs = tl.arange(0, 1024)
    for i in range(0, num_seqs + 1, 1024):
        cu_seqlens = tl.load(
            cu_seqlens_ptr + i + offs, mask=i + offs <= num_seqs, other=0
        )
        end = tl.maximum(end, tl.max(cu_seqlens, axis=0))
    return tl.minimum(end, num_tokens)


@triton.jit
def zero_rows(
    cu_seqlens_ptr, out_ptr, num_tokens, num_seqs, first, step, ROW: tl.constexpr
):
    """Clear every `step`-th of the rows that lie after every sequence.

    Args:
        cu_seqlens_ptr: Offsets of the sequences, `num_seqs + 1` of them.
        out_ptr: Rows of ROW elements, without gaps.
        num_tokens: How many rows there are.
        num_seqs: Empty ones included.
        first: The first row to clear, counted from the end of the last sequence.
        step: Programs that share the rows.
        ROW: Elements of a row.
    """
    end = last_row(cu_seqlens_ptr, num_seqs, num_tokens)
    offs = tl.arange(0, 1024)
    zeros = tl.zeros([1024], out_ptr.dtype.element_ty)
    for row in range(end + first, num_tokens, step):
        out_row_ptr = out_ptr + tl.cast(row, tl.int64) * ROW
        for col in range(0, ROW, 1024):
            tl.store(out_row_ptr + col + offs, zeros, mask=col + offs < ROW)

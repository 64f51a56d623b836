# SPDX-License-Identifier: Apache-2.0
"""What the kernels share whose warps are specialised for Hopper, in Gluon.

Their warp groups attend for 64 queries of a head each, and another group feeds them by
TMA. The tiles of a head of a sequence run together, so that its keys and values come
from the L2.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan

_PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)
_TYPES = {torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16}


@gluon.jit
def _tiles(cu_ptr, offs_n, num_seqs, num_tokens, BLOCK_M: gl.constexpr):
    """Return how many tiles a head has of sequences; offsets beyond all rows end there.

    Tails of zeros or of repeated offsets are no sequences, and have none.
    """
    mask = offs_n < num_seqs
    start = gl.load(cu_ptr + offs_n, mask=mask, other=0)
    end = gl.load(cu_ptr + offs_n + 1, mask=mask, other=0)
    end = gl.minimum(end, num_tokens)
    return gl.where(end > start, gl.cdiv(end - start, BLOCK_M), 0)


@gluon.jit
def used(cu_ptr, num_seqs, num_tokens, BLOCK_M: gl.constexpr):
    """Return how many sequences, and how many of a head's tiles, there are to look at.

    A graph has room for many more: after the last sequence with rows all are empty.
    """
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    offs = gl.arange(0, 512, layout=layout)
    seqs = 0
    tiles = 0
    for first in range(0, num_seqs, 512):
        counts = _tiles(cu_ptr, first + offs, num_seqs, num_tokens, BLOCK_M)
        last = gl.max(gl.where(counts > 0, first + offs + 1, 0), axis=0)
        seqs = gl.maximum(seqs, last)
        tiles += gl.sum(counts, axis=0)
    return seqs, tiles


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def find_tile(cu_ptr, num_seqs, num_tokens, tile, H, BLOCK_M: gl.constexpr):
    """Return a tile's head, its sequence and that one's start and length, and its row.

    Tiles are numbered by sequence, then by head: none is empty, and neighbours take as
    long as each other, so that programs which take turns have as much to do.
    """
    # Each warp has them all, and what it finds is in uniform registers.
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    offs = gl.arange(0, 128, layout=layout)
    seq = 0
    before = 0
    total = 0
    for first in range(0, num_seqs, 128):
        counts = _tiles(cu_ptr, first + offs, num_seqs, num_tokens, BLOCK_M)
        ends = total + gl.associative_scan(counts, 0, _plus)
        is_before = (ends * H <= tile) & (first + offs < num_seqs)
        seq += gl.sum(is_before.to(gl.int32), axis=0)
        before = gl.maximum(before, gl.max(gl.where(is_before, ends, 0), axis=0))
        total += gl.sum(counts, axis=0)
    start = gl.load(cu_ptr + seq)
    length = gl.minimum(gl.load(cu_ptr + seq + 1), num_tokens) - start
    blocks = gl.cdiv(length, BLOCK_M)
    item = tile - before * H
    return item // blocks, seq, start, length, item % blocks * BLOCK_M


@gluon.jit
def copy(desc, smem, barrier, head, row, col):
    """Start the copy of a tile to shared memory, to the first of its rows."""
    ROWS: gl.constexpr = desc.block_shape[1]
    tile = smem.reshape([1, smem.shape[0], smem.shape[1]]).slice(0, ROWS, 1)
    tma.async_copy_global_to_shared(desc, [head, row, col], barrier, tile)


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b, propagate_nan=_PROPAGATE_NAN)


@gluon.jit
def halves(x):
    """Return the left and the right columns; both lie in the same thread."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]))


@gluon.constexpr_function
def log2(x):
    return x.bit_length() - 1


@gluon.jit
def scaled(acc, factor):
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.convert_layout(factor, layout, assert_trivial=True)[:, None]


@gluon.jit
def store_rows(out_ptr, acc, row, length, head, COL: gl.constexpr, H, D: gl.constexpr):
    """Write the columns from COL on that exist of the rows that exist."""
    layout: gl.constexpr = acc.type.layout
    offs_m = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    offs_d = COL + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    offs = offs_m.to(gl.int64)[:, None] * (H * D) + (head * D + offs_d)[None, :]
    mask = (offs_m < length)[:, None] & (offs_d < D)[None, :]
    gl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def zero_padding(cu_ptr, out_ptr, num_seqs, num_tokens, ROW: gl.constexpr):
    """Clear the rows after the last sequence, which the programs share."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    offs = gl.arange(0, 512, layout=layout)
    end = 0
    for first in range(0, num_seqs + 1, 512):
        cu = gl.load(cu_ptr + first + offs, mask=first + offs <= num_seqs, other=0)
        end = gl.maximum(end, gl.max(cu, axis=0))
    # Offsets beyond all rows must not overflow the sum.
    end = gl.minimum(end, num_tokens)
    zeros = gl.zeros([512], out_ptr.dtype.element_ty, layout)
    for row in range(end + gl.program_id(0), num_tokens, gl.num_programs(0)):
        for col in gl.static_range(0, ROW, 512):
            offs_row = gl.cast(row, gl.int64) * ROW + col + offs
            gl.store(out_ptr + offs_row, zeros, mask=col + offs < ROW)


@gluon.jit
def allocate(
    DTYPE: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr
):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [COUNT, ROWS, COLS], layout)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(
        gl.int64, [COUNT, 1], mbarrier.MBarrierLayout()
    )
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), ARRIVALS)
    return barriers


def describe(x: torch.Tensor, rows: int, cols: int) -> TensorDescriptor | None:
    """Describe tiles of `[rows, cols]` of `[H, R, C]`; what lies outside reads as 0."""
    if rows == 0 or cols == 0 or x.numel() == 0:
        return None
    block = [1, rows, cols]
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[x.dtype])
    desc = TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
    # It stays; the tensor need not.
    desc.base = None
    return desc


def point(desc: TensorDescriptor | None, x: torch.Tensor) -> TensorDescriptor | None:
    """Return the descriptor of another tensor, without the checks of a new one."""
    if desc is None:
        return None
    pointed = object.__new__(TensorDescriptor)
    # copy.copy takes five times as long.
    vars(pointed).update(vars(desc), base=x)
    return pointed

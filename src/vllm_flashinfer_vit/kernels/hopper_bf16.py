# SPDX-License-Identifier: Apache-2.0
"""Attention in bf16, specialised by warps for Hopper, without a running maximum.

Warp groups each hold 64 queries of a head and walk over the keys of their sequence, the
last block first; another one feeds them through a ring of TMA loads.

Softmax is the same whatever is taken off all scores of a row. FlashAttention takes off
the largest so far, so that no weight is above 1; when a larger one comes, all sums are
scaled down. bf16 has the exponents of fp32, though: weights of 2^100 are as exact as
those of 1. So here the largest score of the first block is taken off, and that stays.
What is left beside the products is a multiplication with an addition, an exponential,
a sum and half a conversion for each score.

A row is wrong if its weights add up to more than 2^110, that is where a score is 76
(natural) above the largest of the first block, or if an output is not finite. Its group
is marked, and `redo.py` computes it again, with what is NaN or infinite and what comes
in as 0 * NaN from rows after the sequence.

Numerics: fp32 scores and sums, weights are rounded to bf16, the output once.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_flashinfer_vit.kernels import redo
from vllm_flashinfer_vit.kernels._alignment import aligned, is_aligned
from vllm_flashinfer_vit.kernels._hopper import (
    allocate,
    copy,
    describe,
    find_tile,
    halves,
    larger,
    log2,
    make_barriers,
    point,
    scaled,
    store_rows,
    used,
    zero_padding,
)
from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout
from vllm_flashinfer_vit.kernels._triton import LOG2_E, split_width
from vllm_flashinfer_vit.kernels.flash import check_inputs
from vllm_flashinfer_vit.kernels.redo import MARKED_ROWS, MARKS

# Up to this head dim four groups share a multiprocessor, above it three, and few rows
# are shared by two.
_WIDEST_OF_FOUR = 96
_FEW = 2
# Of a thread, by the groups. Those that load have what is left, 32 and more.
_REGISTERS = {4: 112, 3: 160, _FEW: 200}

# A sum over v of weights up to this one fits fp32, and another block's with it.
_MOST_TOTAL = gl.constexpr(2.0**110)
# Without it Triton adds what exponentials of denormal numbers take.
_EXP2 = gl.constexpr("ex2.approx.ftz.f32 $0, $1;")


@gluon.jit
def _load(
    descs,
    tiles,
    barriers,
    cu_ptr,
    sizes,
    H: gl.constexpr,
    H_RATIO: gl.constexpr,
    HI: gl.constexpr,
):
    """The group that loads: queries once a tile, keys and values ahead of their use."""
    q_lo_desc, q_hi_desc, k_lo_desc, k_hi_desc, v_lo_desc, v_hi_desc = descs
    q_lo, q_hi, k_lo, k_hi, v_lo, v_hi = tiles
    q_full, q_empty, full, empty = barriers
    num_seqs, num_tokens, num_tiles = sizes
    GROUPS: gl.constexpr = q_lo.shape[0]
    STAGES: gl.constexpr = k_lo.shape[0]
    BLOCK_N: gl.constexpr = k_lo.shape[1]
    LO: gl.constexpr = k_lo.shape[2]
    step = 0
    for turn in range(gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0))):
        tile = gl.program_id(0) + turn * gl.num_programs(0)
        head, seq, start, length, row = find_tile(
            cu_ptr, num_seqs, num_tokens, tile, H, 64 * GROUPS
        )
        kv_head = head // H_RATIO
        mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
        for g in gl.static_range(GROUPS):
            row_g = start + row + g * 64
            ready = q_full.index(g)
            mbarrier.expect(ready, 64 * (LO + HI) * 2)
            copy(q_lo_desc, q_lo.index(g), ready, head, row_g, 0)
            if HI > 0:
                copy(q_hi_desc, q_hi.index(g), ready, head, row_g, LO)
        for n in range(gl.cdiv(length, BLOCK_N) - 1, -1, -1):
            stage = step % STAGES
            ready = full.index(stage)
            row_n = start + n * BLOCK_N
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready, BLOCK_N * (LO + HI) * 4)
            copy(k_lo_desc, k_lo.index(stage), ready, kv_head, row_n, 0)
            if HI > 0:
                copy(k_hi_desc, k_hi.index(stage), ready, kv_head, row_n, LO)
            copy(v_lo_desc, v_lo.index(stage), ready, kv_head, row_n, 0)
            if HI > 0:
                copy(v_hi_desc, v_hi.index(stage), ready, kv_head, row_n, LO)
            step += 1


@gluon.jit
def _score(q_lo, q_hi, k_lo, k_hi, HI: gl.constexpr):
    """Return q @ k^T."""
    N: gl.constexpr = k_lo.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    zero = gl.zeros([64, N], gl.float32, layout)
    scores = warpgroup_mma(
        q_lo, k_lo.permute([1, 0]), zero, use_acc=False, is_async=True
    )
    if HI > 0:
        scores = warpgroup_mma(q_hi, k_hi.permute([1, 0]), scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _weigh(scores, shift, scale):
    """Return the weights, and sums of them in eight columns, of a thread each."""
    weights = gl.inline_asm_elementwise(
        _EXP2,
        "=f,f",
        [scores * scale - shift[:, None]],
        gl.float32,
        is_pure=True,
        pack=1,
    )
    sums = weights
    for _ in gl.static_range(log2(weights.shape[1]) - 3):
        left, right = halves(sums)
        sums = left + right
    return weights, sums


@gluon.jit
def _add(weights, v_lo, v_hi, acc_lo, acc_hi, HI: gl.constexpr):
    """Return the weighted sums over v with those of another block."""
    weights = weights.to(gl.bfloat16)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_lo.type.layout, 2)
    left = gl.convert_layout(weights, operand, assert_trivial=True)
    acc_lo = warpgroup_mma(left, v_lo, acc_lo, is_async=True)
    if HI > 0:
        operand_hi: gl.constexpr = gl.DotOperandLayout(0, acc_hi.type.layout, 2)
        left = gl.convert_layout(weights, operand_hi, assert_trivial=True)
        acc_hi = warpgroup_mma(left, v_hi, acc_hi, is_async=True)
        acc_lo, acc_hi = warpgroup_mma_wait(0, deps=[acc_lo, acc_hi])
    else:
        acc_lo = warpgroup_mma_wait(0, deps=[acc_lo])
    return acc_lo, acc_hi


@gluon.jit
def _largest(acc, layout: gl.constexpr):
    """Return the largest absolute value of each row, NaN if one is NaN."""
    return gl.convert_layout(gl.reduce(gl.abs(acc), 1, larger), layout)


@gluon.jit
def _attend(
    GROUP: gl.constexpr,
    tensors,
    H: gl.constexpr,
    H_RATIO: gl.constexpr,
    D: gl.constexpr,
    HI: gl.constexpr,
):
    """A warp group: 64 rows of every tile, from the last block of keys to the first."""
    tiles, barriers, cu_ptr, out_ptr, marks_ptr, sizes, scale = tensors
    q_lo_tiles, q_hi_tiles, k_lo, k_hi, v_lo, v_hi = tiles
    q_full, q_empty, full, empty = barriers
    num_seqs, num_tokens, num_tiles = sizes
    GROUPS: gl.constexpr = q_lo_tiles.shape[0]
    STAGES: gl.constexpr = k_lo.shape[0]
    BLOCK_N: gl.constexpr = k_lo.shape[1]
    LO: gl.constexpr = k_lo.shape[2]
    # Not empty, and not used, if there are no such columns.
    HI_TILE: gl.constexpr = max(HI, 16)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_N, 16]
    )
    lo_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LO, 16])
    hi_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, HI_TILE, 16]
    )
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    q_lo = q_lo_tiles.index(GROUP)
    q_hi = q_hi_tiles.index(GROUP)
    step = 0
    for turn in range(gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0))):
        tile = gl.program_id(0) + turn * gl.num_programs(0)
        head, seq, start, length, row = find_tile(
            cu_ptr, num_seqs, num_tokens, tile, H, 64 * GROUPS
        )
        row += GROUP * 64
        count = gl.cdiv(length, BLOCK_N)
        acc_lo = gl.zeros([64, LO], gl.float32, lo_layout)
        acc_hi = gl.zeros([64, HI_TILE], gl.float32, hi_layout)
        mbarrier.wait(q_full.index(GROUP), turn & 1)
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        scores = _score(q_lo, q_hi, k_lo.index(stage), k_hi.index(stage), HI)
        offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, score_layout))
        is_key = offs_n < length - (count - 1) * BLOCK_N
        scores = gl.where(is_key[None, :], scores, float("-inf"))
        shift = gl.max(scores, axis=1) * scale
        weights, total = _weigh(scores, shift, scale)
        for _ in range(count - 1):
            acc_lo, acc_hi = _add(
                weights, v_lo.index(stage), v_hi.index(stage), acc_lo, acc_hi, HI
            )
            mbarrier.arrive(empty.index(stage))
            step += 1
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            scores = _score(q_lo, q_hi, k_lo.index(stage), k_hi.index(stage), HI)
            weights, sums = _weigh(scores, shift, scale)
            total += sums
        acc_lo, acc_hi = _add(
            weights, v_lo.index(stage), v_hi.index(stage), acc_lo, acc_hi, HI
        )
        mbarrier.arrive(empty.index(stage))
        step += 1
        mbarrier.arrive(q_empty.index(0))
        total = gl.convert_layout(gl.sum(total, axis=1), row_layout)
        norm = 1.0 / total
        acc_lo = scaled(acc_lo, norm)
        base = out_ptr + start.to(gl.int64) * (H * D)
        store_rows(base, acc_lo, row, length, head, 0, H, D)
        largest = _largest(acc_lo, row_layout)
        if HI > 0:
            acc_hi = scaled(acc_hi, norm)
            store_rows(base, acc_hi, row, length, head, LO, H, D)
            largest = larger(largest, _largest(acc_hi, row_layout))
        # Neither holds for NaN.
        is_right = (total < _MOST_TOTAL) & (largest < float("inf"))
        offs_m = row + gl.arange(0, 64, layout=row_layout)
        is_wrong = (offs_m < length) & (is_right == 0)
        mark = gl.max(is_wrong.to(gl.int32), axis=0)
        gl.store(marks_ptr + tile * GROUPS + GROUP, mark)


@gluon.jit
def _clear_marks(marks_ptr, first, num_marks):
    """Clear the marks after those of the tiles there are; the programs share them."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    zeros = gl.zeros([512], gl.int32, layout)
    first += gl.program_id(0) * 512
    for at in range(first, num_marks, gl.num_programs(0) * 512):
        offs = at + gl.arange(0, 512, layout=layout)
        gl.store(marks_ptr + offs, zeros, mask=offs < num_marks)


# No scalar selects a variant: a capture compiles nothing that a call before it has not.
@gluon.jit(
    do_not_specialize=["num_seqs", "num_tokens", "num_marks"],
    do_not_specialize_on_alignment=["cu_ptr"],
)
def _hopper_bf16_kernel(
    q_lo_desc,
    q_hi_desc,
    k_lo_desc,
    k_hi_desc,
    v_lo_desc,
    v_hi_desc,
    cu_ptr,
    out_ptr,
    marks_ptr,
    num_seqs,
    num_tokens,
    num_marks,
    scale_log2e,
    H: gl.constexpr,
    H_RATIO: gl.constexpr,
    D: gl.constexpr,
    HI: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Attend for one tile after another: 64 * GROUPS queries of a head of a sequence.

    Grid: (min(tiles that there may be, multiprocessors),)
    """
    LO: gl.constexpr = k_lo_desc.block_shape[2]
    zero_padding(cu_ptr, out_ptr, num_seqs, num_tokens, H * D)
    q_lo = allocate(gl.bfloat16, GROUPS, 64, LO)
    k_lo = allocate(gl.bfloat16, STAGES, BLOCK_N, LO)
    v_lo = allocate(gl.bfloat16, STAGES, BLOCK_N, LO)
    # A second part that does not exist is not touched: the first one stands for it.
    q_hi = allocate(gl.bfloat16, GROUPS, 64, HI) if HI > 0 else q_lo
    k_hi = allocate(gl.bfloat16, STAGES, BLOCK_N, HI) if HI > 0 else k_lo
    v_hi = allocate(gl.bfloat16, STAGES, BLOCK_N, HI) if HI > 0 else v_lo
    barriers = (
        make_barriers(GROUPS, 1),
        make_barriers(1, GROUPS),
        make_barriers(STAGES, 1),
        make_barriers(STAGES, GROUPS),
    )
    fence_async_shared()
    tiles = (q_lo, q_hi, k_lo, k_hi, v_lo, v_hi)
    descs = (q_lo_desc, q_hi_desc, k_lo_desc, k_hi_desc, v_lo_desc, v_hi_desc)
    seqs, tiles_of_head = used(cu_ptr, num_seqs, num_tokens, 64 * GROUPS)
    # Offsets that fall and rise again must not write past the marks.
    tiles_of_head = gl.minimum(tiles_of_head, num_marks // (H * GROUPS))
    _clear_marks(marks_ptr, tiles_of_head * H * GROUPS, num_marks)
    sizes = (seqs, num_tokens, H * tiles_of_head)
    tensors = (tiles, barriers, cu_ptr, out_ptr, marks_ptr, sizes, scale_log2e)
    if GROUPS == 4:
        gl.warp_specialize(
            [
                (_load, (descs, tiles, barriers, cu_ptr, sizes, H, H_RATIO, HI)),
                (_attend, (0, tensors, H, H_RATIO, D, HI)),
                (_attend, (1, tensors, H, H_RATIO, D, HI)),
                (_attend, (2, tensors, H, H_RATIO, D, HI)),
                (_attend, (3, tensors, H, H_RATIO, D, HI)),
            ],
            [4, 4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (_load, (descs, tiles, barriers, cu_ptr, sizes, H, H_RATIO, HI)),
                (_attend, (0, tensors, H, H_RATIO, D, HI)),
                (_attend, (1, tensors, H, H_RATIO, D, HI)),
                (_attend, (2, tensors, H, H_RATIO, D, HI)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_load, (descs, tiles, barriers, cu_ptr, sizes, H, H_RATIO, HI)),
                (_attend, (0, tensors, H, H_RATIO, D, HI)),
                (_attend, (1, tensors, H, H_RATIO, D, HI)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> Callable[[], torch.Tensor]:
    """Settle attention within each sequence of a packed batch.

    Args:
        q: `[T, H, D]` bf16, D a multiple of 8 from 64 to 128, D-stride 1, T-stride
            below 2^24, any H-stride. What is not aligned to 16 bytes (strides of 8
            elements) is copied first.
        k: `[T, H_kv, D]` in q's dtype, H a multiple of H_kv, D-stride 1.
        v: `[T, H_kv, D]` like k.
        cu_seqlens: `[N + 1]` int32, contiguous, token prefix sums from 0. Where it does
            not rise is an empty sequence, so it may end in zeros.
        max_seqlen: An upper bound of the sequence lengths in tokens; not needed here.
        scale: Factor on the scores, usually `D ** -0.5`; above 0.

    Returns:
        A call, for the current stream, that attends over what these tensors hold by
        then. It returns `[T, H, D]` contiguous, in q's dtype, the same tensor every
        time if no input is copied. Rows after the last sequence are zeros.

    Raises:
        ValueError: A tensor or `scale` breaks a demand above.
    """
    if not (is_aligned(q) and is_aligned(k) and is_aligned(v)):
        # Copies: made anew by every call.
        return lambda: _settle(aligned(q), aligned(k), aligned(v), cu_seqlens, scale)()
    return _settle(q, k, v, cu_seqlens, scale)


def _settle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> Callable[[], torch.Tensor]:
    groups = _choose_groups(q, k, v, cu_seqlens, scale, q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not out.numel():
        return lambda: out
    if not torch.cuda.is_current_stream_capturing():
        _compile(q.shape[1], k.shape[1], q.shape[2], q.device)
    attend, marks = _settle_groups(groups, q, k, v, cu_seqlens, out, scale)
    mend = redo.prepare(q, k, v, cu_seqlens, marks, out, groups, scale)

    def call() -> torch.Tensor:
        attend()
        mend()
        return out

    return call


@cached_by_layout
def _choose_groups(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    device: torch.device,
) -> int:
    """Check what `prepare` demands, and return how many groups share a tile."""
    check_inputs(q, k, v, cu_seqlens, scale)
    num_tokens, heads, head_dim = q.shape
    if q.dtype != torch.bfloat16 or head_dim < 64:
        raise ValueError(
            f"hopper_bf16 takes bf16 and head dims from 64 on, got {q.dtype} and "
            f"{head_dim}"
        )
    return _groups(head_dim, heads, num_tokens, _processors(device))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _compile(heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
    """Compile both variants: a graph that is captured may have other rows than now."""
    q = torch.zeros(1, heads, head_dim, dtype=torch.bfloat16, device=device)
    kv = q.new_zeros(1, kv_heads, head_dim)
    cu_seqlens = torch.zeros(2, dtype=torch.int32, device=device)
    for groups in (_FEW, _most_groups(head_dim)):
        out = torch.empty_like(q)
        _, marks = _settle_groups(groups, q, kv, kv, cu_seqlens, out, 1.0)
        redo.prepare(q, kv, kv, cu_seqlens, marks, out, groups, 1.0)


def _settle_groups(
    groups: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> tuple[Callable[[], object], torch.Tensor]:
    """Settle a variant, and return it with the marks that it sets."""
    launch, descs, num_marks = _plan(groups, q, k, v, cu_seqlens, scale, q.device)
    marks = torch.empty(num_marks, dtype=torch.int32, device=q.device)
    settled = launch.settle(
        # Heads come first in what is described; of the tensor only the address counts.
        *(point(desc, x) for desc, x in zip(descs, (q, q, k, k, v, v), strict=True)),
        cu_seqlens,
        out,
        marks,
    )
    return settled, marks


@cached_by_layout
def _plan(
    groups: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    device: torch.device,
) -> tuple[Launch, tuple[TensorDescriptor | None, ...], int]:
    """Return the launch, its descriptors, and how many marks it sets."""
    num_tokens, heads, head_dim = q.shape
    num_seqs = cu_seqlens.numel() - 1
    constants, boxes = _form(head_dim, groups)
    most_tiles = max(1, heads * (num_tokens // (MARKED_ROWS * groups) + num_seqs))
    num_marks = -(-most_tiles * groups // MARKS) * MARKS
    launch = Launch(
        _hopper_bf16_kernel,
        min(most_tiles, _processors(device)),
        num_seqs,
        num_tokens,
        num_marks,
        scale * LOG2_E,
        H=heads,
        H_RATIO=heads // k.shape[1],
        num_warps=4,
        **constants,
    )
    of_heads = (x.transpose(0, 1) for x in (q, q, k, k, v, v))
    descs = (describe(x, *box) for x, box in zip(of_heads, boxes, strict=True))
    return launch, tuple(descs), num_marks


def _groups(head_dim: int, heads: int, num_tokens: int, processors: int) -> int:
    """Return how many groups share a tile; no row's bits depend on it.

    Few rows are spread over all multiprocessors: 16 heads of 1024 rows make 64 tiles of
    four groups, and 128 of two.
    """
    if heads * -(-num_tokens // (MARKED_ROWS * _FEW)) <= processors:
        return _FEW
    return _most_groups(head_dim)


def _most_groups(head_dim: int) -> int:
    return 4 if head_dim <= _WIDEST_OF_FOUR else 3


def _form(
    head_dim: int, groups: int
) -> tuple[dict[str, Any], tuple[tuple[int, int], ...]]:
    """Return the constants of a variant, and the boxes that are copied.

    All have their columns in two parts; a box of 0 columns is none.
    """
    lo, hi = split_width(head_dim)
    # Not by the groups: sums would be in another order.
    block_n, stages = (64, 4) if _most_groups(head_dim) == 4 else (128, 2)
    constants = {
        "D": head_dim,
        "HI": hi,
        "GROUPS": groups,
        "BLOCK_N": block_n,
        "STAGES": stages,
        "REGISTERS": _REGISTERS[groups],
    }
    queries = (MARKED_ROWS, lo), (MARKED_ROWS, hi)
    keys = (block_n, lo), (block_n, hi)
    return constants, (*queries, *keys, *keys)

# SPDX-License-Identifier: Apache-2.0
"""FP8 attention with block scales, specialised by warps for Hopper; long sequences.

Warp groups each hold 64 queries of a head and walk over the keys of their sequence,
another one feeds them through a ring of TMA loads: while one computes weights, others
multiply. `docs/design/architecture.md` says why there is so little beside the products.
Only the scores of a sequence's last block are masked.

Numerics: scores are fp16, weights e4m3, all else is fp32, the output is rounded once. A
weight is the code of e4m3 that its scaled score rounds to (Schraudolph, 1999): off by
at most 8 % of itself, 3.1 % in the root mean square; below 2^-14.7 of the largest so
far too small, and 0 from 2^-15.7 on. The tensor cores keep some 14 bits of a sum of
e4m3 products, so each block's sum over v starts from 0 and is added in fp32, in units
of the block's v scale. A row's bits depend on its sequence alone.
"""

import struct
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan

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
from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout, returning
from vllm_flashinfer_vit.kernels._triton import LOG2_E, split_width
from vllm_flashinfer_vit.kernels.formats import BLOCK, QuantizedQKV, check_blocks

# Up to this head dim four groups share a multiprocessor's registers, above it three.
_WIDEST_OF_FOUR = 80
# Of a thread. Those that load have what is left, 32.
_REGISTERS = {4: 112, 3: 160}
_STAGES = {4: 4, 3: 3}
# The code of the largest number in e4m3.
_LARGEST = 126.0

# Scores are scaled so that 1 is the largest code: what an octave is, and how many 1 is.
_OCTAVE = gl.constexpr(8 / _LARGEST)
_OCTAVES = gl.constexpr(_LARGEST / 8)
_FP16_MAX = gl.constexpr(65504.0)
_FP16_TINY = gl.constexpr(2.0**-24)
_PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)
_MAX = gl.constexpr("max.NaN.f16x2 $0, $1, $2;")


def _weigh_asm() -> str:
    """Return PTX for 16 weights in e4m3: 4 registers from 8 of each operand.

    A weight's code is `_LARGEST` times x, x = (score - best) * factor + offset, cut off
    at 0 and 1; NaN becomes 0, and shows in the row's top. The sum of a code and 1024 in
    fp16 has it, rounded to an integer, in its low byte.
    """
    lines = [".reg .b32 x, largest, magic;", ".reg .b32 h<8>;"]
    lines += [f"mov.b32 largest, {_pair(_LARGEST)};", f"mov.b32 magic, {_pair(1024)};"]
    for i in range(8):
        lines += [f"sub.rn.f16x2 x, ${4 + i}, ${12 + i};"]
        lines += [f"fma.rn.sat.f16x2 x, x, ${20 + i}, ${28 + i};"]
        lines += [f"fma.rn.f16x2 h{i}, x, largest, magic;"]
    for i in range(4):
        lines += [f"prmt.b32 ${i}, h{2 * i}, h{2 * i + 1}, 0x6420;"]
    return "{\n" + "\n".join(lines) + "\n}"


def _pair(value: float) -> str:
    """Return two copies of a number in fp16, as PTX writes 32 bits."""
    return "0x" + struct.pack(">e", value).hex() * 2


_WEIGH = gl.constexpr(_weigh_asm())
_WEIGH_REGISTERS = gl.constexpr(",".join(["=r"] * 4 + ["r"] * 32))


@gluon.jit
def _copy_rows(desc, smem, barrier, head, row, col, ROWS: gl.constexpr):
    """Start the copies of a tile's first ROWS rows, which are no power of two."""
    PART: gl.constexpr = desc.block_shape[1]
    tile = smem.reshape([1, smem.shape[0], smem.shape[1]])
    for first in gl.static_range(0, ROWS, PART):
        tma.async_copy_global_to_shared(
            desc, [head, row + first, col], barrier, tile.slice(first, PART, 1)
        )


@gluon.jit
def _load(
    descs,
    tiles,
    barriers,
    cu_ptr,
    sizes,
    H: gl.constexpr,
    H_RATIO: gl.constexpr,
    QK_HI: gl.constexpr,
    V_HI: gl.constexpr,
):
    """The group that loads: queries once a tile, keys and values ahead of their use."""
    q_lo_desc, q_hi_desc, k_lo_desc, k_hi_desc, v_lo_desc, v_hi_desc = descs
    q_lo, q_hi, k_lo, k_hi, v_lo, v_hi, _ = tiles
    q_full, q_empty, full, empty = barriers
    num_seqs, num_tokens, num_tiles, _ = sizes
    GROUPS: gl.constexpr = q_lo.shape[0]
    QK_LO: gl.constexpr = q_lo.shape[2]
    STAGES: gl.constexpr = v_lo.shape[0]
    V_LO: gl.constexpr = v_lo.shape[1]
    BLOCK_N: gl.constexpr = v_lo.shape[2]
    step = 0
    for turn in range(gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0))):
        tile = gl.program_id(0) + turn * gl.num_programs(0)
        head, seq, start, length, row = find_tile(
            cu_ptr, num_seqs, num_tokens, tile, H, 64 * GROUPS
        )
        base = (start // BLOCK_N + seq) * BLOCK_N
        kv_head = head // H_RATIO
        mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
        for g in gl.static_range(GROUPS):
            row_g = base + row + g * 64
            ready = q_full.index(g)
            mbarrier.expect(ready, 64 * (QK_LO + QK_HI))
            copy(q_lo_desc, q_lo.index(g), ready, head, row_g, 0)
            if QK_HI > 0:
                copy(q_hi_desc, q_hi.index(g), ready, head, row_g, QK_LO)
        for n in range(gl.cdiv(length, BLOCK_N) - 1, -1, -1):
            stage = step % STAGES
            ready = full.index(stage)
            row_n = base + n * BLOCK_N
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready, BLOCK_N * (QK_LO + QK_HI + V_LO + V_HI))
            copy(k_lo_desc, k_lo.index(stage), ready, kv_head, row_n, 0)
            if QK_HI > 0:
                copy(k_hi_desc, k_hi.index(stage), ready, kv_head, row_n, QK_LO)
            copy(v_lo_desc, v_lo.index(stage), ready, kv_head, 0, row_n)
            if V_HI > 0:
                _copy_rows(
                    v_hi_desc, v_hi.index(stage), ready, kv_head, V_LO, row_n, V_HI
                )
            step += 1


@gluon.jit
def _row_max(x):
    """Return the largest score of each row in fp32, NaN if one is NaN."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    # Two neighbours lie in one register.
    for _ in gl.static_range(4):
        a, b = halves(x)
        x = gl.inline_asm_elementwise(
            _MAX, "=r,r,r", [a, b], gl.float16, is_pure=True, pack=2
        )
    top = gl.reduce(x.to(gl.float32), 1, larger)
    return gl.convert_layout(top, layout, assert_trivial=True)


@gluon.jit
def _weigh(scores, best, factor, offset, layout: gl.constexpr):
    """Return the weights as a left operand: no value leaves its thread."""
    M: gl.constexpr = scores.shape[0]
    N: gl.constexpr = scores.shape[1]
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    scores = scores.reshape([M, N // 32, 2, 2, 4, 2]).permute([0, 1, 2, 4, 3, 5])
    scores = gl.convert_layout(scores.reshape([M, N]), layout, assert_trivial=True)
    best = gl.convert_layout(best, rows, assert_trivial=True)[:, None]
    factor = gl.convert_layout(factor, rows, assert_trivial=True)[:, None]
    offset = gl.convert_layout(offset, rows, assert_trivial=True)[:, None]
    return gl.inline_asm_elementwise(
        _WEIGH,
        _WEIGH_REGISTERS,
        [scores, best, factor, offset],
        gl.float8e4nv,
        is_pure=True,
        pack=16,
    )


@gluon.jit
def _score(q_lo, q_hi, k_lo, k_hi, HAS_HI: gl.constexpr):
    """Return q @ k^T."""
    N: gl.constexpr = k_lo.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    zero = gl.zeros([64, N], gl.float16, layout)
    # The assembler lets no other instruction run beside a product in fp16.
    scores = warpgroup_mma(q_lo, k_lo.permute([1, 0]), zero, use_acc=False)
    if HAS_HI:
        scores = warpgroup_mma(q_hi, k_hi.permute([1, 0]), scores)
    return scores


@gluon.jit
def _start(weights, v):
    """Start the weighted sum over the rows of a tile, which lie in its columns."""
    N: gl.constexpr = v.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    weights = gl.convert_layout(weights, operand, assert_trivial=True)
    zero = gl.zeros([weights.shape[0], N], gl.float32, layout)
    return warpgroup_mma(weights, v.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _attend_to_block(
    q_lo,
    q_hi,
    rings,
    scales,
    state,
    step,
    n,
    length,
    QK_HI: gl.constexpr,
    V_HI: gl.constexpr,
):
    """Go on to block n of the keys; with a length, mask what lies after it.

    The state is what is taken off each row's scaled scores, the unit of its sum over v,
    this sum in two parts, and the sum of its weights.
    """
    k_lo, k_hi, v_lo, v_hi, v_ones, full, empty = rings
    q_factor, k_scale_ptr, v_scale_ptr = scales
    top, v_scale, acc_lo, acc_hi, total = state
    STAGES: gl.constexpr = k_lo.shape[0]
    BLOCK_N: gl.constexpr = k_lo.shape[1]
    row_layout: gl.constexpr = top.type.layout
    score_layout: gl.constexpr = row_layout.parent
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, acc_lo.type.layout, 4)
    stage = step % STAGES
    # Loaded ahead of the wait. A factor of 0 would turn the mask into NaN.
    factor = q_factor * gl.load(k_scale_ptr + n)
    factor = gl.maximum(gl.minimum(factor * _OCTAVE, _FP16_MAX), _FP16_TINY)
    factor = gl.full([64], factor, gl.float32, row_layout).to(gl.float16)
    next_v_scale = gl.load(v_scale_ptr + n)
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    scores = _score(q_lo, q_hi, k_lo.index(stage), k_hi.index(stage), QK_HI > 0)
    if length is not None:
        offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, score_layout))
        is_key = offs_n < length - n * BLOCK_N
        scores = gl.where(is_key[None, :], scores, float("-inf"))
    # 2^8.75 times the weights, and so their sum: both cancel.
    best = _row_max(scores)
    best_code = best * factor.to(gl.float32)
    next_top = larger(top, best_code - 1.0)
    # Not by the next top: where scores are so large that it is the best one's code, no
    # weight would be left.
    offset = gl.minimum(best_code - top, 1.0, propagate_nan=_PROPAGATE_NAN)
    weights = _weigh(
        scores, best.to(gl.float16), factor, offset.to(gl.float16), operand_layout
    )
    part_lo = _start(weights, v_lo.index(stage))
    decay = gl.exp2((top - next_top) * _OCTAVES)
    acc_decay = decay * (v_scale / next_v_scale)
    # One part after the other: both at once would spill registers.
    part_lo = warpgroup_mma_wait(0, deps=[part_lo])
    acc_lo = scaled(acc_lo, acc_decay) + part_lo
    part_hi = _start(weights, v_hi.index(stage))
    if v_hi.shape[1] == V_HI:
        part_sum = _start(weights, v_ones.index(0))
        part_hi, part_sum = warpgroup_mma_wait(0, deps=[part_hi, part_sum])
    else:
        part_hi = warpgroup_mma_wait(0, deps=[part_hi])
        part_sum = part_hi
    mbarrier.arrive(empty.index(stage))
    if v_hi.shape[1] == 2 * V_HI:
        part_hi, part_sum = halves(part_hi)
    if V_HI > 0:
        part_hi = gl.convert_layout(part_hi, acc_hi.type.layout, assert_trivial=True)
        acc_hi = scaled(acc_hi, acc_decay) + part_hi
    for _ in gl.static_range(log2(part_sum.shape[1]) - 3):
        _, part_sum = halves(part_sum)
    # Two neighbours are the same.
    part_sum, _ = gl.split(part_sum.reshape([64, 4, 2]))
    part_sum = gl.convert_layout(part_sum, total.type.layout, assert_trivial=True)
    total = scaled(total, decay) + part_sum
    return next_top, next_v_scale, acc_lo, acc_hi, total


@gluon.jit
def _attend(
    GROUP: gl.constexpr,
    tensors,
    H: gl.constexpr,
    H_RATIO: gl.constexpr,
    D: gl.constexpr,
    QK_HI: gl.constexpr,
    V_HI: gl.constexpr,
):
    """A warp group: 64 rows of every tile, from the last block of keys to the first."""
    tiles, barriers, scale_ptrs, cu_ptr, out_ptr, sizes, scale_log2e = tensors
    q_lo_tiles, q_hi_tiles, k_lo, k_hi, v_lo, v_hi, v_ones = tiles
    q_full, q_empty, full, empty = barriers
    q_scale_ptr, k_scale_ptr, v_scale_ptr = scale_ptrs
    num_seqs, num_tokens, num_tiles, num_blocks = sizes
    GROUPS: gl.constexpr = q_lo_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_lo.shape[1]
    V_LO: gl.constexpr = v_lo.shape[1]
    # Not empty, and not used, if there are no such columns. Ones that are not half of
    # the tile stay with them, and are not stored.
    TILE: gl.constexpr = v_hi.shape[1]
    HI: gl.constexpr = max(TILE // 2 if TILE == 2 * V_HI else TILE, 16)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_N, 32]
    )
    lo_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_LO, 32])
    hi_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HI, 32])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    q_lo = q_lo_tiles.index(GROUP)
    q_hi = q_hi_tiles.index(GROUP)
    rings = (k_lo, k_hi, v_lo, v_hi, v_ones, full, empty)
    step = 0
    for turn in range(gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0))):
        tile = gl.program_id(0) + turn * gl.num_programs(0)
        head, seq, start, length, row = find_tile(
            cu_ptr, num_seqs, num_tokens, tile, H, 64 * GROUPS
        )
        row += GROUP * 64
        count = gl.cdiv(length, BLOCK_N)
        block = start // BLOCK_N + seq
        at = (head // H_RATIO) * num_blocks + block
        # Rows after the end have no scale, and are not stored.
        q_factor = scale_log2e * gl.load(
            q_scale_ptr + head * num_blocks + block + row // BLOCK_N,
            mask=row < length,
            other=0.0,
        )
        scales = (q_factor, k_scale_ptr + at, v_scale_ptr + at)
        top = gl.full([64], float("-inf"), gl.float32, row_layout)
        acc_lo = gl.zeros([64, V_LO], gl.float32, lo_layout)
        acc_hi = gl.zeros([64, HI], gl.float32, hi_layout)
        total = gl.zeros([64, 8], gl.float32, sum_layout)
        total, _ = gl.split(total.reshape([64, 4, 2]))
        state = (top, gl.cast(1.0, gl.float32), acc_lo, acc_hi, total)
        mbarrier.wait(q_full.index(GROUP), turn & 1)
        state = _attend_to_block(
            q_lo,
            q_hi,
            rings,
            scales,
            state,
            step,
            count - 1,
            length,
            QK_HI,
            V_HI,
        )
        for n in range(count - 2, -1, -1):
            step += 1
            state = _attend_to_block(
                q_lo,
                q_hi,
                rings,
                scales,
                state,
                step,
                n,
                None,
                QK_HI,
                V_HI,
            )
        step += 1
        _, v_scale, acc_lo, acc_hi, total = state
        mbarrier.arrive(q_empty.index(0))
        # Its columns are all the same.
        total = gl.convert_layout(
            gl.max(total, axis=1), row_layout, assert_trivial=True
        )
        base = out_ptr + start.to(gl.int64) * (H * D)
        norm = v_scale / total
        store_rows(base, scaled(acc_lo, norm), row, length, head, 0, H, D)
        if V_HI > 0:
            store_rows(base, scaled(acc_hi, norm), row, length, head, V_LO, H, D)


# No scalar selects a variant: a capture compiles nothing that a call before it has not.
@gluon.jit(
    do_not_specialize=["num_seqs", "num_tokens"],
    do_not_specialize_on_alignment=["cu_ptr"],
)
def _hopper_fp8_kernel(
    q_lo_desc,
    q_hi_desc,
    k_lo_desc,
    k_hi_desc,
    v_lo_desc,
    v_hi_desc,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    cu_ptr,
    out_ptr,
    num_seqs,
    num_tokens,
    scale_log2e,
    H: gl.constexpr,
    H_RATIO: gl.constexpr,
    D: gl.constexpr,
    QK_HI: gl.constexpr,
    V_HI: gl.constexpr,
    ONES: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Attend for one tile after another: 64 * GROUPS queries of a head of a sequence.

    Grid: (min(tiles that there may be, multiprocessors),)
    """
    QK_LO: gl.constexpr = k_lo_desc.block_shape[2]
    V_LO: gl.constexpr = v_lo_desc.block_shape[1]
    zero_padding(cu_ptr, out_ptr, num_seqs, num_tokens, H * D)
    q_lo = allocate(gl.float8e4nv, GROUPS, 64, QK_LO)
    k_lo = allocate(gl.float8e4nv, STAGES, BLOCK_N, QK_LO)
    v_lo = allocate(gl.float8e4nv, STAGES, V_LO, BLOCK_N)
    # A second part that does not exist is not touched: the first one stands for it.
    q_hi = allocate(gl.float8e4nv, GROUPS, 64, QK_HI) if QK_HI > 0 else q_lo
    k_hi = allocate(gl.float8e4nv, STAGES, BLOCK_N, QK_HI) if QK_HI > 0 else k_lo
    v_hi = allocate(gl.float8e4nv, STAGES, V_HI + ONES, BLOCK_N)
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 4], [1, 32], [gl.num_warps(), 1], [1, 0]
    )
    # As bits: of two equal numbers converted to e4m3 at once, ptxas 12.8 loses one.
    PART: gl.constexpr = v_hi_desc.block_shape[1] if V_HI > 0 else 8
    ones = gl.full([PART, BLOCK_N], 0x38, gl.uint8, layout)
    for i in gl.static_range(STAGES):
        for first in gl.static_range(V_HI, V_HI + ONES, PART):
            v_hi.index(i).slice(first, PART, 0).store(
                ones.to(gl.float8e4nv, bitcast=True)
            )
    v_ones = v_hi
    if ONES == 0:
        v_ones = allocate(gl.float8e4nv, 1, 8, BLOCK_N)
        ones = gl.full([8, BLOCK_N], 0x38, gl.uint8, layout)
        v_ones.index(0).store(ones.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    barriers = (
        make_barriers(GROUPS, 1),
        make_barriers(1, GROUPS),
        make_barriers(STAGES, 1),
        make_barriers(STAGES, GROUPS),
    )
    tiles = (q_lo, q_hi, k_lo, k_hi, v_lo, v_hi, v_ones)
    descs = (q_lo_desc, q_hi_desc, k_lo_desc, k_hi_desc, v_lo_desc, v_hi_desc)
    scale_ptrs = (q_scale_ptr, k_scale_ptr, v_scale_ptr)
    num_blocks = num_tokens // BLOCK_N + num_seqs
    seqs, tiles_of_head = used(cu_ptr, num_seqs, num_tokens, 64 * GROUPS)
    sizes = (seqs, num_tokens, H * tiles_of_head, num_blocks)
    tensors = (tiles, barriers, scale_ptrs, cu_ptr, out_ptr, sizes, scale_log2e)
    if GROUPS == 4:
        gl.warp_specialize(
            [
                (
                    _load,
                    (descs, tiles, barriers, cu_ptr, sizes, H, H_RATIO, QK_HI, V_HI),
                ),
                (_attend, (0, tensors, H, H_RATIO, D, QK_HI, V_HI)),
                (_attend, (1, tensors, H, H_RATIO, D, QK_HI, V_HI)),
                (_attend, (2, tensors, H, H_RATIO, D, QK_HI, V_HI)),
                (_attend, (3, tensors, H, H_RATIO, D, QK_HI, V_HI)),
            ],
            [4, 4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _load,
                    (descs, tiles, barriers, cu_ptr, sizes, H, H_RATIO, QK_HI, V_HI),
                ),
                (_attend, (0, tensors, H, H_RATIO, D, QK_HI, V_HI)),
                (_attend, (1, tensors, H, H_RATIO, D, QK_HI, V_HI)),
                (_attend, (2, tensors, H, H_RATIO, D, QK_HI, V_HI)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


def prepare(
    quantized: QuantizedQKV,
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    max_seqlen: int,
    scale: float,
    head_dim: int,
    dtype: torch.dtype,
) -> Callable[[], torch.Tensor]:
    """Settle attention within each sequence of a packed batch that is quantised.

    Args:
        quantized: What `quantize.prepare` or a projection writes for `cu_seqlens`.
        cu_seqlens: `[N + 1]` int32, contiguous, token prefix sums from 0. Where it does
            not rise is an empty sequence, so it may end in zeros.
        num_tokens: T.
        max_seqlen: An upper bound of the sequence lengths in tokens; not needed here.
        scale: Factor on the scores, usually `D ** -0.5`; above 0.
        head_dim: D, a multiple of 8 from 32 to 128.
        dtype: fp16 or bf16, of the output.

    Returns:
        A call, for the current stream, that attends over what `quantized` and
        `cu_seqlens` hold by then. It returns `[T, H, D]` contiguous, in `dtype`, the
        same tensor every time. Rows after the last sequence are zeros.

    Raises:
        ValueError: The tensors do not fit the sizes, or scale is not above 0.
    """
    q, k, v = quantized.q, quantized.k, quantized.v
    shape = (num_tokens, q.shape[0], head_dim)
    out = torch.empty(shape, dtype=dtype, device=q.device)
    launch, descs = _plan(q, k, v, cu_seqlens, out, scale, q.device)
    if not num_tokens or cu_seqlens.numel() == 1:
        # Without sequences there may be no blocks, and no programs.
        return out.zero_
    settled = launch.settle(
        *(point(desc, x) for desc, x in zip(descs, (q, q, k, k, v, v), strict=True)),
        quantized.q_scale,
        quantized.k_scale,
        quantized.v_scale,
        cu_seqlens,
        out,
    )
    return returning(settled, out)


@cached_by_layout
def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    device: torch.device,
) -> tuple[Launch, tuple[TensorDescriptor | None, ...]]:
    num_tokens, heads, head_dim = out.shape
    num_seqs = cu_seqlens.numel() - 1
    check_blocks(q, v, num_tokens, num_seqs, head_dim, scale)
    constants, boxes = _form(head_dim)
    most_tiles = heads * (num_tokens // (64 * constants["GROUPS"]) + num_seqs)
    launch = Launch(
        _hopper_fp8_kernel,
        min(most_tiles, torch.cuda.get_device_properties(device).multi_processor_count),
        num_seqs,
        num_tokens,
        scale * LOG2_E,
        H=heads,
        H_RATIO=heads // k.shape[0],
        num_warps=4,
        **constants,
    )
    tensors = (q, q, k, k, v, v)
    descs = (describe(x, *box) for x, box in zip(tensors, boxes, strict=True))
    return launch, tuple(descs)


def _form(head_dim: int) -> tuple[dict[str, Any], tuple[tuple[int, int], ...]]:
    """Return the constants that follow from a head dim, and the boxes that are copied.

    q and k have their columns in two parts, v its rows; a box of 0 is none. The second
    part of v has ones for the sums of the rows: as many as make a power of two, or none
    if it is one; a narrow head dim doubles it.
    """
    groups = 4 if head_dim <= _WIDEST_OF_FOUR else 3
    qk_lo, qk_hi = split_width(-(-head_dim // 32) * 32, 32)
    if groups == 3:
        v_lo, v_hi = 64, head_dim - 64
        ones = (1 << (v_hi - 1).bit_length()) - v_hi
    else:
        v_lo, v_hi = split_width(-(-head_dim // 16) * 16, 16)
        ones = v_hi or 8
    constants = {
        "D": head_dim,
        "QK_HI": qk_hi,
        "V_HI": v_hi,
        "ONES": ones,
        "GROUPS": groups,
        "BLOCK_N": BLOCK,
        "STAGES": _STAGES[groups],
        "REGISTERS": _REGISTERS[groups],
    }
    boxes = (
        (64, qk_lo),
        (64, qk_hi),
        (BLOCK, qk_lo),
        (BLOCK, qk_hi),
        (v_lo, BLOCK),
        # The largest power of two that divides it.
        (v_hi & -v_hi, BLOCK),
    )
    return constants, boxes

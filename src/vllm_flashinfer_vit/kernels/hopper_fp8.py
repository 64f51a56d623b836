# SPDX-License-Identifier: Apache-2.0
"""FP8 attention with block scales, specialised by warps for Hopper; long sequences.

Two warp groups each hold 64 queries of a head and walk over the keys of their
sequence, one warp feeds them through a ring of TMA loads. A group's softmax overlaps
with its own product with v and with the products of the other one. The quantised
tensors (`kernels/quantize.py`) are padded per sequence, so nothing but the scores of a
sequence's last block is masked.

Numerics: fp32 softmax; weights are scaled by 2^8, which the sum of the row takes out
again, and rounded to e4m3; the output is rounded once. The tensor cores keep some 14
bits of a sum of e4m3 products, so each block's sum over v starts from 0 and is added in
fp32: in one long sum the terms of a v with a mean would be lost. That sum is kept in
units of the current block's v scale, which costs nothing: the softmax rescales it
anyway. A row's bits depend on nothing but its sequence.
"""

import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_flashinfer_vit.kernels.quantize import BLOCK, QuantizedQKV, check_blocks

_LOG2_E = 1.4426950408889634
_GROUPS = 2
_BLOCK_M = 64 * _GROUPS
_STAGES = 4
# Of 65536 per multiprocessor; the loading warp has 24, the first group what remains.
_REGISTERS = 240

# Two conversions to one register: Triton's own take 50 instructions more per block.
_TO_E4M3 = gl.constexpr(
    """{
    .reg .b16 lo, hi;
    cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
    mov.b32 $0, {lo, hi};
    }"""
)


@gluon.jit
def _find_tile(
    cu_ptr, num_seqs, num_tokens, tile, tiles_per_head, BLOCK_M: gl.constexpr
):
    """Return a tile's head, its sequence and that one's start and length, and its row.

    Sequence n has its first tile at cu[n] // BLOCK_M + n. Tails of zeros or of repeated
    offsets are no sequences. A row at or behind the length means an empty tile.
    """
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    block = tile % tiles_per_head
    seq = -1
    for first in range(0, num_seqs, 128):
        offs_n = first + gl.arange(0, 128, layout=layout)
        mask = offs_n < num_seqs
        start = gl.load(cu_ptr + offs_n, mask=mask, other=0)
        end = gl.load(cu_ptr + offs_n + 1, mask=mask, other=0)
        starts_before = (end > start) & (start // BLOCK_M + offs_n <= block)
        seq = gl.maximum(seq, gl.max(gl.where(starts_before, offs_n, -1), axis=0))
    start = 0
    length = 0
    row = 0
    if seq >= 0:
        start = gl.load(cu_ptr + seq)
        length = gl.minimum(gl.load(cu_ptr + seq + 1), num_tokens) - start
        row = (block - start // BLOCK_M - seq) * BLOCK_M
    return tile // tiles_per_head, seq, start, length, row


@gluon.jit
def _copy(desc, smem, barrier, head, row, col):
    """Start the copy of a tile to shared memory."""
    tile = smem.reshape([1, smem.shape[0], smem.shape[1]])
    tma.async_copy_global_to_shared(desc, [head, row, col], barrier, tile)


@gluon.jit
def _load(
    descs,
    tiles,
    barriers,
    cu_ptr,
    sizes,
    H_RATIO: gl.constexpr,
    QK_HI: gl.constexpr,
    V_HI: gl.constexpr,
):
    """The loading warp: queries once a tile, keys and values ahead of their use."""
    q_lo_desc, q_hi_desc, k_lo_desc, k_hi_desc, v_lo_desc, v_hi_desc = descs
    q_lo, q_hi, k_lo, k_hi, v_lo, v_hi = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = barriers
    num_seqs, num_tokens, num_tiles, tiles_per_head = sizes
    GROUPS: gl.constexpr = q_lo.shape[0]
    QK_LO: gl.constexpr = q_lo.shape[2]
    STAGES: gl.constexpr = v_lo.shape[0]
    V_LO: gl.constexpr = v_lo.shape[1]
    BLOCK_N: gl.constexpr = v_lo.shape[2]
    done = 0
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        head, seq, start, length, row = _find_tile(
            cu_ptr, num_seqs, num_tokens, tile, tiles_per_head, 64 * GROUPS
        )
        if row < length:
            base = (start // BLOCK_N + seq) * BLOCK_N
            kv_head = head // H_RATIO
            mbarrier.wait(q_empty.index(0), (done & 1) ^ 1)
            for g in gl.static_range(GROUPS):
                row_g = base + row + g * 64
                full = q_full.index(g)
                mbarrier.expect(full, 64 * (QK_LO + QK_HI))
                _copy(q_lo_desc, q_lo.index(g), full, head, row_g, 0)
                if QK_HI > 0:
                    _copy(q_hi_desc, q_hi.index(g), full, head, row_g, QK_LO)
            done += 1
            for n in range(gl.cdiv(length, BLOCK_N) - 1, -1, -1):
                stage = step % STAGES
                phase = ((step // STAGES) & 1) ^ 1
                row_n = base + n * BLOCK_N
                mbarrier.wait(k_empty.index(stage), phase)
                full = k_full.index(stage)
                mbarrier.expect(full, BLOCK_N * (QK_LO + QK_HI))
                _copy(k_lo_desc, k_lo.index(stage), full, kv_head, row_n, 0)
                if QK_HI > 0:
                    _copy(k_hi_desc, k_hi.index(stage), full, kv_head, row_n, QK_LO)
                mbarrier.wait(v_empty.index(stage), phase)
                full = v_full.index(stage)
                mbarrier.expect(full, BLOCK_N * (V_LO + V_HI))
                _copy(v_lo_desc, v_lo.index(stage), full, kv_head, 0, row_n)
                if V_HI > 0:
                    _copy(v_hi_desc, v_hi.index(stage), full, kv_head, V_LO, row_n)
                step += 1


@gluon.jit
def _row_max(x):
    # Eight chains a thread instead of two: a chain of 32 would wait for its latency.
    parts = gl.max(x.reshape([x.shape[0], x.shape[1] // 16, 16]), axis=1)
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return gl.convert_layout(gl.max(parts, axis=1), layout, assert_trivial=True)


@gluon.jit
def _row_sum(x):
    parts = gl.sum(x.reshape([x.shape[0], x.shape[1] // 16, 16]), axis=1)
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return gl.convert_layout(gl.sum(parts, axis=1), layout, assert_trivial=True)


@gluon.jit
def _as_operand(weights, layout: gl.constexpr):
    """Round to e4m3 in the layout of a left operand: no value leaves its thread."""
    M: gl.constexpr = weights.shape[0]
    N: gl.constexpr = weights.shape[1]
    weights = weights.reshape([M, N // 32, 2, 2, 4, 2]).permute([0, 1, 2, 4, 3, 5])
    weights = gl.convert_layout(weights.reshape([M, N]), layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        _TO_E4M3, "=r,f,f,f,f", [weights], gl.float8e4nv, is_pure=True, pack=4
    )


@gluon.jit
def _score(q_lo, q_hi, k_lo, k_hi, HAS_HI: gl.constexpr):
    """Start q @ k^T."""
    N: gl.constexpr = k_lo.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    zero = gl.zeros([64, N], gl.float32, layout)
    scores = warpgroup_mma(
        q_lo, k_lo.permute([1, 0]), zero, use_acc=False, is_async=True
    )
    if HAS_HI:
        scores = warpgroup_mma(q_hi, k_hi.permute([1, 0]), scores, is_async=True)
    return scores


@gluon.jit
def _weight(weights, v_lo, v_hi, acc_lo, acc_hi, HAS_HI: gl.constexpr):
    """Start the weighted sum over the v of one block; accumulators lend their type."""
    part_lo = warpgroup_mma(
        weights, v_lo.permute([1, 0]), acc_lo, use_acc=False, is_async=True
    )
    part_hi = acc_hi
    if HAS_HI:
        hi: gl.constexpr = gl.DotOperandLayout(0, acc_hi.type.layout, 4)
        weights = gl.convert_layout(weights, hi, assert_trivial=True)
        part_hi = warpgroup_mma(
            weights, v_hi.permute([1, 0]), acc_hi, use_acc=False, is_async=True
        )
    return part_lo, part_hi


@gluon.jit
def _scaled(acc, factor):
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.convert_layout(factor, layout, assert_trivial=True)[:, None]


@gluon.jit
def _store(out_ptr, acc, row, length, head, COL: gl.constexpr, H, D: gl.constexpr):
    """Write the columns from COL on that exist of the rows that exist."""
    layout: gl.constexpr = acc.type.layout
    offs_m = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    offs_d = COL + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    offs = offs_m.to(gl.int64)[:, None] * (H * D) + (head * D + offs_d)[None, :]
    mask = (offs_m < length)[:, None] & (offs_d < D)[None, :]
    gl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)


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
    """A warp group: 64 rows of every tile, from the last block of keys to the first.

    The product with v of one block runs while the next one's weights are computed. The
    groups start their products in turns, so that one computes while another multiplies.
    """
    tiles, barriers, scale_ptrs, cu_ptr, out_ptr, sizes, scale_log2e = tensors
    q_lo_tiles, q_hi_tiles, k_lo, k_hi, v_lo, v_hi = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = barriers
    q_scale_ptr, k_scale_ptr, v_scale_ptr = scale_ptrs
    num_seqs, num_tokens, num_tiles, tiles_per_head = sizes
    GROUPS: gl.constexpr = q_lo_tiles.shape[0]
    STAGES: gl.constexpr = k_lo.shape[0]
    BLOCK_N: gl.constexpr = k_lo.shape[1]
    HAS_QK_HI: gl.constexpr = QK_HI > 0
    HAS_V_HI: gl.constexpr = V_HI > 0
    V_PARTS: gl.constexpr = 2 if HAS_V_HI else 1
    V_LO: gl.constexpr = v_lo.shape[1]
    V_HI_PAD: gl.constexpr = v_hi.shape[1]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_N, 32]
    )
    lo_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_LO, 32])
    hi_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, V_HI_PAD, 32]
    )
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, lo_layout, 4)
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, score_layout))
    q_lo = q_lo_tiles.index(GROUP)
    q_hi = q_hi_tiles.index(GROUP)
    zero_lo = gl.zeros([64, V_LO], gl.float32, lo_layout)
    zero_hi = gl.zeros([64, V_HI_PAD], gl.float32, hi_layout)
    num_blocks = num_tokens // BLOCK_N + num_seqs
    IS_FIRST: gl.constexpr = 1 if GROUP == 0 else 0
    done = 0
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        head, seq, start, length, row = _find_tile(
            cu_ptr, num_seqs, num_tokens, tile, tiles_per_head, 64 * GROUPS
        )
        if row < length:
            row += GROUP * 64
            count = gl.cdiv(length, BLOCK_N)
            block = start // BLOCK_N + seq
            at = (head // H_RATIO) * num_blocks + block + count - 1
            # Rows behind the end have no scale, and are not stored.
            factor = scale_log2e * gl.load(
                q_scale_ptr + head * num_blocks + block + row // BLOCK_N,
                mask=row < length,
                other=0.0,
            )
            factor_n = factor * gl.load(k_scale_ptr + at)
            v_scale = gl.load(v_scale_ptr + at)

            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(q_full.index(GROUP), done & 1)
            mbarrier.wait(k_full.index(stage), phase)
            scores = _score(q_lo, q_hi, k_lo.index(stage), k_hi.index(stage), HAS_QK_HI)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage))
            is_key = offs_n < length - (count - 1) * BLOCK_N
            scores = gl.where(is_key[None, :], scores, float("-inf"))
            # 2^8 times the weights, and so their sum: both cancel.
            top = _row_max(scores) * factor_n - 8.0
            weights = gl.exp2(scores * factor_n - top[:, None])
            total = _row_sum(weights)
            acc_lo = zero_lo
            acc_hi = zero_hi
            decay = gl.full_like(top, 1.0)
            step += 1
            mbarrier.wait(
                k_full.index(step % STAGES), (step // STAGES) & 1, pred=count > 1
            )
            mbarrier.wait(turns.index(GROUP), (turn & 1) ^ IS_FIRST, pred=count > 1)

            for n in range(1, count):
                last_stage = stage
                last_phase = phase
                stage = step % STAGES
                phase = (step // STAGES) & 1
                scores = _score(
                    q_lo, q_hi, k_lo.index(stage), k_hi.index(stage), HAS_QK_HI
                )
                factor_n = factor * gl.load(k_scale_ptr + at - n)
                next_v_scale = gl.load(v_scale_ptr + at - n)
                operand = _as_operand(weights, operand_layout)
                mbarrier.wait(v_full.index(last_stage), last_phase)
                part_lo, part_hi = _weight(
                    operand,
                    v_lo.index(last_stage),
                    v_hi.index(last_stage),
                    zero_lo,
                    zero_hi,
                    HAS_V_HI,
                )
                mbarrier.arrive(turns.index((GROUP + 1) % GROUPS))
                turn += 1
                scores = warpgroup_mma_wait(V_PARTS, deps=[scores])
                mbarrier.arrive(k_empty.index(stage))
                next_top = gl.maximum(top, _row_max(scores) * factor_n - 8.0)
                weights = gl.exp2(scores * factor_n - next_top[:, None])
                next_decay = gl.exp2(top - next_top)
                total = total * next_decay + _row_sum(weights)
                next_decay *= v_scale / next_v_scale
                top = next_top
                v_scale = next_v_scale
                step += 1
                # Here, not where it is needed: the compiler would move the wait for v
                # in front of the softmax, but not across a branch.
                has_next = n + 1 < count
                mbarrier.wait(
                    k_full.index(step % STAGES), (step // STAGES) & 1, pred=has_next
                )
                mbarrier.wait(turns.index(GROUP), (turn & 1) ^ IS_FIRST, pred=has_next)
                if HAS_V_HI:
                    part_lo, part_hi = warpgroup_mma_wait(0, deps=[part_lo, part_hi])
                    acc_hi = _scaled(acc_hi, decay) + part_hi
                else:
                    part_lo = warpgroup_mma_wait(0, deps=[part_lo])
                acc_lo = _scaled(acc_lo, decay) + part_lo
                decay = next_decay
                mbarrier.arrive(v_empty.index(last_stage))

            mbarrier.arrive(q_empty.index(0))
            done += 1
            operand = _as_operand(weights, operand_layout)
            mbarrier.wait(v_full.index(stage), phase)
            part_lo, part_hi = _weight(
                operand,
                v_lo.index(stage),
                v_hi.index(stage),
                zero_lo,
                zero_hi,
                HAS_V_HI,
            )
            base = out_ptr + start.to(gl.int64) * (H * D)
            norm = v_scale / total
            if HAS_V_HI:
                part_lo, part_hi = warpgroup_mma_wait(0, deps=[part_lo, part_hi])
                mbarrier.arrive(v_empty.index(stage))
                acc_hi = _scaled(_scaled(acc_hi, decay) + part_hi, norm)
                _store(base, acc_hi, row, length, head, V_LO, H, D)
            else:
                part_lo = warpgroup_mma_wait(0, deps=[part_lo])
                mbarrier.arrive(v_empty.index(stage))
            acc_lo = _scaled(_scaled(acc_lo, decay) + part_lo, norm)
            _store(base, acc_lo, row, length, head, 0, H, D)


@gluon.jit
def _zero_padding(cu_ptr, out_ptr, num_seqs, num_tokens, ROW: gl.constexpr):
    """Clear the rows behind the last sequence, which the programs share."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    offs = gl.arange(0, 512, layout=layout)
    end = 0
    for first in range(0, num_seqs + 1, 512):
        cu = gl.load(cu_ptr + first + offs, mask=first + offs <= num_seqs, other=0)
        end = gl.maximum(end, gl.max(cu, axis=0))
    zeros = gl.zeros([512], out_ptr.dtype.element_ty, layout)
    for row in range(end + gl.program_id(0), num_tokens, gl.num_programs(0)):
        for col in gl.static_range(0, ROW, 512):
            offs_row = gl.cast(row, gl.int64) * ROW + col + offs
            gl.store(out_ptr + offs_row, zeros, mask=col + offs < ROW)


@gluon.jit
def _allocate(COUNT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [ROWS, COLS], gl.float8e4nv
    )
    return gl.allocate_shared_memory(gl.float8e4nv, [COUNT, ROWS, COLS], layout)


@gluon.jit
def _make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(
        gl.int64, [COUNT, 1], mbarrier.MBarrierLayout()
    )
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), ARRIVALS)
    return barriers


# No scalar selects a variant: a capture compiles nothing that a call before it has not.
@gluon.jit(
    do_not_specialize=["num_seqs", "num_tokens", "num_tiles", "tiles_per_head"],
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
    num_tiles,
    tiles_per_head,
    scale_log2e,
    H: gl.constexpr,
    H_RATIO: gl.constexpr,
    D: gl.constexpr,
    QK_HI: gl.constexpr,
    V_HI: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Attend for one tile after another: 64 * GROUPS queries of a head of a sequence.

    The tiles of a head run together, so that k and v come from the L2.
    Grid: (min(num_tiles, multiprocessors),)
    """
    QK_LO: gl.constexpr = k_lo_desc.block_shape[2]
    V_LO: gl.constexpr = v_lo_desc.block_shape[1]
    _zero_padding(cu_ptr, out_ptr, num_seqs, num_tokens, H * D)
    q_lo = _allocate(GROUPS, 64, QK_LO)
    k_lo = _allocate(STAGES, BLOCK_N, QK_LO)
    v_lo = _allocate(STAGES, V_LO, BLOCK_N)
    # A second part that does not exist is not touched: the first one stands for it.
    q_hi = _allocate(GROUPS, 64, QK_HI) if QK_HI > 0 else q_lo
    k_hi = _allocate(STAGES, BLOCK_N, QK_HI) if QK_HI > 0 else k_lo
    v_hi = _allocate(STAGES, V_HI, BLOCK_N) if V_HI > 0 else v_lo
    barriers = (
        _make_barriers(GROUPS, 1),
        _make_barriers(1, GROUPS),
        _make_barriers(STAGES, 1),
        _make_barriers(STAGES, GROUPS),
        _make_barriers(STAGES, 1),
        _make_barriers(STAGES, GROUPS),
        _make_barriers(GROUPS, 1),
    )
    tiles = (q_lo, q_hi, k_lo, k_hi, v_lo, v_hi)
    descs = (q_lo_desc, q_hi_desc, k_lo_desc, k_hi_desc, v_lo_desc, v_hi_desc)
    scale_ptrs = (q_scale_ptr, k_scale_ptr, v_scale_ptr)
    sizes = (num_seqs, num_tokens, num_tiles, tiles_per_head)
    tensors = (tiles, barriers, scale_ptrs, cu_ptr, out_ptr, sizes, scale_log2e)
    gl.warp_specialize(
        [
            (_attend, (0, tensors, H, H_RATIO, D, QK_HI, V_HI)),
            (_attend, (1, tensors, H, H_RATIO, D, QK_HI, V_HI)),
            (_load, (descs, tiles, barriers, cu_ptr, sizes, H_RATIO, QK_HI, V_HI)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def attention(
    quantized: QuantizedQKV,
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    max_seqlen: int,
    scale: float,
    head_dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Attend within each sequence of a packed batch that has been quantised.

    Args:
        quantized: What `quantize_blocks` has returned for these `cu_seqlens`.
        cu_seqlens: `[N + 1]` int32, contiguous, token prefix sums from 0. Where it does
            not rise is an empty sequence, so it may end in zeros.
        num_tokens: T.
        max_seqlen: An upper bound of the sequence lengths in tokens; not needed here.
        scale: Factor on the scores, usually `D ** -0.5`; above 0.
        head_dim: D, a multiple of 8 from 32 to 80.
        dtype: fp16 or bf16, of the output.

    Returns:
        `[T, H, D]` contiguous, in `dtype`. Rows behind the last sequence are zeros.

    Raises:
        ValueError: The tensors do not fit the sizes, D is above 80, or scale
            is not above 0.
    """
    q, k, v = quantized.q, quantized.k, quantized.v
    heads, _, d_qk = q.shape
    d_v = v.shape[1]
    num_seqs = cu_seqlens.numel() - 1
    check_blocks(q, v, num_tokens, num_seqs, head_dim, scale)
    if head_dim > 80:
        raise ValueError(
            f"head dim {head_dim} needs more registers than a thread has; at most 80, "
            "or VLLM_FLASHINFER_VIT_KERNEL=triton_fp8"
        )
    shape = (num_tokens, heads, head_dim)
    out = torch.empty(shape, dtype=dtype, device=q.device)
    if num_tokens == 0:
        return out
    qk_lo, qk_hi = _split(d_qk, 32)
    v_lo, v_hi = _split(d_v, 16)
    tiles_per_head = num_tokens // _BLOCK_M + num_seqs
    num_tiles = heads * tiles_per_head
    grid = min(num_tiles, _num_sms(q.device))
    _hopper_fp8_kernel[(grid,)](
        _describe(q, 64, qk_lo),
        _describe(q, 64, qk_hi),
        _describe(k, BLOCK, qk_lo),
        _describe(k, BLOCK, qk_hi),
        _describe(v, v_lo, BLOCK),
        _describe(v, v_hi, BLOCK),
        quantized.q_scale,
        quantized.k_scale,
        quantized.v_scale,
        cu_seqlens,
        out,
        num_seqs,
        num_tokens,
        num_tiles,
        tiles_per_head,
        scale * _LOG2_E,
        H=heads,
        H_RATIO=heads // k.shape[0],
        D=head_dim,
        QK_HI=qk_hi,
        V_HI=v_hi,
        GROUPS=_GROUPS,
        BLOCK_N=BLOCK,
        STAGES=_STAGES,
        REGISTERS=_REGISTERS,
        num_warps=4,
    )
    return out


def _split(width: int, least: int) -> tuple[int, int]:
    """Cut a width into two powers of two, the second one 0 or at least `least`."""
    low = 1 << (width.bit_length() - 1)
    rest = width - low
    return low, max(least, triton.next_power_of_2(rest)) if rest else 0


def _describe(x: torch.Tensor, rows: int, cols: int) -> TensorDescriptor | None:
    """Describe tiles of `[rows, cols]` of `[H, R, C]`; what lies outside reads as 0."""
    if rows == 0 or cols == 0:
        return None
    block = [1, rows, cols]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count

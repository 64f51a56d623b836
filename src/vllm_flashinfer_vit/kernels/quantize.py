# SPDX-License-Identifier: Apache-2.0
"""q, k and v to e4m3 in blocks, in one launch, rotary embedding included.

It replaces the copy and rotation of q and k, and a quantising launch for each of q, k
and v. Every sequence is cut into blocks of 128 tokens with a scale per head, and v is
transposed: an FP8 matrix instruction wants both operands contiguous in the dimension
that it sums over.

Numerics: q and k are turned in fp32 and rounded to the input's dtype, bit for bit as
`kernels/rope.py` does, then multiplied by the reciprocal of their scale and rounded to
nearest even. q and k end at 28 = 448 / 16, as if their scales were 16 times as large,
and a little earlier at head dims above 83, see `qk_max`: what that loses is 1400 to
1800 times smaller than the largest value of its block. Values beyond the range
saturate; NaN and Inf become NaN. The bits equal those of `kernels/quantize_ref.py`.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._clip_counts import (
    check_counts,
    count_blocks,
    count_cut_off,
)
from vllm_flashinfer_vit.kernels._launch import Launch, Slot, cached_by_layout, nothing
from vllm_flashinfer_vit.kernels._pairs import finite, to_e4m3
from vllm_flashinfer_vit.kernels._quantize import (
    absmax_pairs,
    absmax_tiles,
    angle_strides,
    block_scale,
    check_inputs,
    check_scales,
    contiguous_columns,
    head_constants,
    head_items,
    head_strides,
    load_angles,
    load_pairs,
    store_pairs,
    turn_pairs,
)
from vllm_flashinfer_vit.kernels._triton import (
    find_sequence,
    load_parts,
    split_width,
    store_transposed,
    stride_unit,
)
from vllm_flashinfer_vit.kernels.formats import (
    BLOCK,
    E4M3_MAX,
    QuantizedQKV,
    qk_max,
)

# Heads of a program, which share the angles: at 8x4096 and D=72 an H200 takes 150 us
# with 8, 155 us with 4, 167 us with 2.
_GROUP = 8
# Two programs of 16 warps share an SM, which hides more of the wait for memory: 8 warps
# of 128 registers take 163 us. Above D=80 the cap would cost spills.
_NUM_WARPS = 16
_MAXNREG = 64
_E4M3_MAX = tl.constexpr(E4M3_MAX)


# Nothing but the model and the layout of its tensors selects a variant.
@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_seqs",
        "num_blocks",
        "group",
        "stride_qt",
        "stride_qh",
        "stride_kt",
        "stride_kh",
        "stride_vt",
        "stride_vh",
        "stride_ct",
        "stride_st",
    ],
    do_not_specialize_on_alignment=["scales_ptr", "counts_ptr", "cu_seqlens_ptr"],
)
def _quantize_blocks_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    scales_ptr,
    counts_ptr,
    cu_seqlens_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_tokens,
    num_seqs,
    num_blocks,
    group,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ct,
    stride_st,
    UNIT: tl.constexpr,
    UNIT_X: tl.constexpr,
    UNIT_V: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
    V_LO: tl.constexpr,
    V_HI_PAD: tl.constexpr,
    QK_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise a block of up to `group` heads of q, k or v.

    Strides of q and k count UNIT_Xs, of cos and sin UNITs, of v UNIT_Vs.
    Grid: (num_blocks * (cdiv(H, group) + 2 * cdiv(H_KV, group)),)
    """
    pid = tl.program_id(0)
    num_groups_q = tl.cdiv(H, group)
    num_groups_kv = tl.cdiv(H_KV, group)
    num_groups = num_groups_q + 2 * num_groups_kv
    pid_b = pid // num_groups
    pid_g = pid % num_groups
    pid_n = find_sequence(cu_seqlens_ptr, num_seqs, pid_b, BLOCK)
    if pid_n < 0:
        return
    start = tl.load(cu_seqlens_ptr + pid_n)
    end = tl.minimum(tl.load(cu_seqlens_ptr + pid_n + 1), num_tokens)
    start += (pid_b - start // BLOCK - pid_n) * BLOCK
    rows = tl.minimum(end - start, BLOCK)
    if rows <= 0:
        return
    if HAS_COUNTS:
        count_blocks(counts_ptr, pid_g == 0, H, H_KV)
    start = start.to(tl.int64)

    if pid_g < num_groups_q + num_groups_kv:
        is_q = pid_g < num_groups_q
        first = tl.where(is_q, pid_g, pid_g - num_groups_q) * group
        last = tl.minimum(first + group, tl.where(is_q, H, H_KV))
        stride_t = tl.where(is_q, stride_qt, stride_kt)
        stride_h = tl.where(is_q, stride_qh, stride_kh).to(tl.int64)
        base = tl.where(is_q, q_ptr, k_ptr) + start * stride_t * UNIT_X
        out_base = tl.where(is_q, q_out_ptr, k_out_ptr)
        scale_base = tl.where(is_q, q_scale_ptr, k_scale_ptr)
        items = head_items(D, UNIT, LO, HI)
        angles = load_angles(
            cos_ptr + start * stride_ct * UNIT,
            sin_ptr + start * stride_st * UNIT,
            stride_ct,
            stride_st,
            rows,
            items,
            TURNED,
            UNIT,
            HI,
        )
        stride_h *= UNIT_X
        head = base + first.to(tl.int64) * stride_h
        # The next head is read while this one's scale is found. Given scales leave
        # nothing to wait for, so that it would only cost registers (1 %).
        if not HAS_SCALES:
            pairs = load_pairs(
                head, stride_t, rows, items, D, TURNED, UNIT, UNIT_X, INTERLEAVED, HI
            )
        for i in range(first, last):
            if HAS_SCALES:
                pairs = load_pairs(
                    head,
                    stride_t,
                    rows,
                    items,
                    D,
                    TURNED,
                    UNIT,
                    UNIT_X,
                    INTERLEAVED,
                    HI,
                )
            turned = turn_pairs(pairs, angles, items, D, TURNED, UNIT, HI)
            head += stride_h
            if HAS_SCALES:
                scale = tl.load(scales_ptr + tl.where(is_q, 0, 1)) * (
                    _E4M3_MAX / QK_MAX
                )
            else:
                ahead = tl.where(i + 1 < last, rows, 0)
                pairs = load_pairs(
                    head,
                    stride_t,
                    ahead,
                    items,
                    D,
                    TURNED,
                    UNIT,
                    UNIT_X,
                    INTERLEAVED,
                    HI,
                )
                scale = block_scale(absmax_pairs(turned, UNIT, HI > 0), QK_MAX)
            at = tl.cast(i, tl.int64) * num_blocks + pid_b
            tl.store(scale_base + at, scale)
            inverse = tl.div_rn(1.0, scale)
            if HAS_COUNTS:
                amax = absmax_pairs(turned, UNIT, HI > 0)
                tensor = tl.where(is_q, 0, 1)
                count_cut_off(counts_ptr, tensor, amax, inverse, QK_MAX)
            store_pairs(
                out_base + at * (BLOCK * D_QK),
                D_QK,
                BLOCK,
                items,
                turned,
                inverse,
                QK_MAX if HAS_SCALES else None,
                D,
                D_QK,
                HI,
                BLOCK,
            )
        return

    # Rows are read in the order in which their keys are stored.
    offs_n = tl.arange(0, BLOCK)
    key = offs_n // 16 * 16 + offs_n // 2 % 2 * 8 + offs_n // 4 % 4 * 2 + offs_n % 2
    row_v = key * stride_vt * UNIT_V
    num_rows = num_blocks.to(tl.int64) * BLOCK
    first = (pid_g - num_groups_q - num_groups_kv) * group
    last = tl.minimum(first + group, H_KV)
    step = stride_vh.to(tl.int64) * UNIT_V
    head = v_ptr + start * stride_vt * UNIT_V + first * step
    next_lo, next_hi = load_parts(head, row_v, key < rows, D, V_LO, V_HI_PAD)
    for i in range(first, last):
        pid_h = tl.cast(i, tl.int64)
        v_lo, v_hi = finite(next_lo), finite(next_hi)
        head += step
        ahead = tl.where(i + 1 < last, rows, 0)
        next_lo, next_hi = load_parts(head, row_v, key < ahead, D, V_LO, V_HI_PAD)
        if HAS_SCALES:
            scale = tl.load(scales_ptr + 2)
        else:
            amax = absmax_tiles(v_lo, v_hi, UNIT_V, V_HI_PAD > 0)
            scale = block_scale(amax, _E4M3_MAX)
        tl.store(v_scale_ptr + pid_h * num_blocks + pid_b, scale)
        inverse = tl.div_rn(1.0, scale)
        if HAS_COUNTS:
            amax = absmax_tiles(v_lo, v_hi, UNIT_V, V_HI_PAD > 0)
            count_cut_off(counts_ptr, 2, amax, inverse, _E4M3_MAX)
        out = v_out_ptr + pid_h * D_V * num_rows + pid_b.to(tl.int64) * BLOCK
        v_lo = to_e4m3(v_lo, inverse)
        store_transposed(out, num_rows, offs_n, 0, V_LO, V_LO, v_lo)
        if V_HI_PAD > 0:
            v_hi = to_e4m3(v_hi, inverse)
            store_transposed(out, num_rows, offs_n, V_LO, D_V - V_LO, V_HI_PAD, v_hi)


def quantize_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    interleaved: bool = False,
    counts: torch.Tensor | None = None,
) -> QuantizedQKV:
    """Turn q and k, and quantise q, k and v in blocks of 128 tokens of a sequence.

    A block's scale is the largest finite absolute value of its rows over `qk_max` for q
    and k and over 448 for v, 1 for a block without one: what lies in another block or
    after the end has no part in it.

    Args:
        q: `[T, H, D]` fp32, fp16 or bf16, D a multiple of 8 from 32 to 128, D-stride
            1, T-stride below 2^24, any H-stride. Strides of 8 elements, and halves of
            8, are read fastest.
        k: `[T, H_kv, D]` in q's dtype, H a multiple of H_kv, D-stride 1.
        v: `[T, H_kv, D]` like k.
        cu_seqlens: `[N + 1]` int32, contiguous, token prefix sums from 0. Where it does
            not rise is an empty sequence, so it may end in zeros.
        cos: `[T, R / 2]` with even R <= D, any floating dtype, to turn q and k by;
            columns from R on stay. None for q and k that need no rotation. Its last
            stride should be 1, otherwise it is copied.
        sin: Like cos.
        scales: `[3]` fp32 on the device, for q, k and v, or None for block scales.
        interleaved: Which elements turn together; see `kernels.rope.rope`.
        counts: `[2, 3]` int64 on the device, contiguous, with given scales only. To the
            first row are added the blocks of q, k and v, to the second those of them
            whose largest finite value the scales cut off, by more than it rounds.

    Returns:
        Fresh tensors; see `QuantizedQKV`. Given scales fill the scale tensors, for q
        and k 448 / `qk_max` times as large; what is beyond 448 of them saturates.

    Raises:
        ValueError: A tensor breaks a demand above.
    """
    launch, quantized = prepare(
        q, k, v, cu_seqlens, cos, sin, scales, interleaved, counts
    )
    launch(*(x for x in (scales, counts) if x is not None))
    return quantized


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    interleaved: bool = False,
    counts: torch.Tensor | None = None,
) -> tuple[Callable[..., object], QuantizedQKV]:
    """Settle `quantize_blocks` for what q, k, v and cu_seqlens will hold.

    Args:
        q: As for `quantize_blocks`, like the other arguments.
        k: See `q`.
        v: See `q`.
        cu_seqlens: See `q`.
        cos: See `q`; a copy that it needs is made now.
        sin: Like cos.
        scales: What those of each call are like, or None for block scales.
        interleaved: See `q`.
        counts: What those of each call are like, or None to count nothing.

    Returns:
        The call, for the current stream, which takes scales and then counts, those of
        them that are not None here; and the tensors that every call writes.

    Raises:
        ValueError: As `quantize_blocks`.
    """
    cos, sin = contiguous_columns(cos), contiguous_columns(sin)
    launch, shapes = _plan(q, k, v, cu_seqlens, cos, sin, scales, interleaved, counts)
    dtypes = (torch.float8_e4m3fn,) * 3 + (torch.float32,) * 3
    out = QuantizedQKV(
        *(
            torch.empty(shape, dtype=dtype, device=q.device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
    )
    if not q.shape[0]:
        return nothing, out
    settled = launch.settle(
        q,
        k,
        v,
        q if cos is None else cos,
        q if sin is None else sin,
        out.q_scale if scales is None else Slot(scales),
        out.q_scale if counts is None else Slot(counts),
        cu_seqlens,
        *out,
    )
    return settled, out


@cached_by_layout
def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    scales: torch.Tensor | None,
    interleaved: bool,
    counts: torch.Tensor | None,
) -> tuple[Launch, tuple[tuple[int, ...], ...]]:
    check_inputs(q, k, v, cu_seqlens, cos, sin)
    if scales is not None:
        check_scales(scales)
    if counts is not None:
        check_counts(counts, scales)
    num_tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    num_seqs = cu_seqlens.numel() - 1
    num_blocks = num_tokens // BLOCK + num_seqs
    rows = num_blocks * BLOCK
    d_qk, d_v = _round_up(head_dim, 32), _round_up(head_dim, 16)
    constants = head_constants(q, k, cos, sin, interleaved)
    unit, unit_x = constants["UNIT"], constants["UNIT_X"]
    unit_v = stride_unit(*v.stride()[:2])
    v_lo, v_hi_pad = split_width(d_v)
    groups = triton.cdiv(heads, _GROUP) + 2 * triton.cdiv(kv_heads, _GROUP)
    launch = Launch(
        _quantize_blocks_kernel,
        num_blocks * groups,
        num_tokens,
        num_seqs,
        num_blocks,
        _GROUP,
        *(stride // unit_x for stride in head_strides(q, k)),
        *(stride // unit_v for stride in head_strides(v)),
        *(stride // unit for stride in angle_strides(cos, sin)),
        UNIT_V=unit_v,
        HAS_SCALES=scales is not None,
        HAS_COUNTS=counts is not None,
        D_QK=d_qk,
        D_V=d_v,
        V_LO=v_lo,
        V_HI_PAD=v_hi_pad,
        QK_MAX=qk_max(head_dim),
        num_warps=_NUM_WARPS,
        maxnreg=_MAXNREG if head_dim <= 80 else None,
        **constants,
    )
    shapes = (
        (heads, rows, d_qk),
        (kv_heads, rows, d_qk),
        (kv_heads, d_v, rows),
        (heads, num_blocks),
        (kv_heads, num_blocks),
        (kv_heads, num_blocks),
    )
    return launch, shapes


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

# SPDX-License-Identifier: Apache-2.0
"""Attention within windows of up to 128 tokens, with the rotary embedding inside.

One program holds a whole window of a head: it reads q, k and v once from any strided
views, turns q and k in registers, and writes the output once; scores never leave the
chip. It replaces the copy of q and k, the rotary kernel and a variable-length kernel
made for long sequences. The pairs that the embedding turns are cut into a power of two
and a rest (32 + 8 for D=80), so that a head is not padded to 128.

Numerics: fp32 scores, softmax and sums. Turned q and k are rounded to the input's
dtype, as an unfused embedding rounds them: the fused result has the bits of
`kernels/rope.py` followed by this kernel. Weights are rounded before the sum over v.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout, returning
from vllm_flashinfer_vit.kernels._triton import (
    LOG2_E,
    check_qkv,
    clearing_programs,
    load_columns,
    split_pairs,
    split_width,
    store_columns,
    stride_unit,
    zero_rows,
)
from vllm_flashinfer_vit.kernels.formats import MAX_WINDOW
from vllm_flashinfer_vit.kernels.rope import rotate


class _Config(NamedTuple):
    num_warps: int
    maxnreg: int | None


# By BLOCK, with the embedding inside, on an H200. At 64 tokens, D=80 and 256 windows a
# cap of 128 registers gives 56 us, none 62, one of 80 74; two heads a program 78.
_CONFIGS = {
    16: _Config(num_warps=2, maxnreg=None),
    32: _Config(num_warps=2, maxnreg=None),
    64: _Config(num_warps=4, maxnreg=128),
    128: _Config(num_warps=8, maxnreg=128),
}


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_seqs",
        "stride_qt",
        "stride_qh",
        "stride_kt",
        "stride_kh",
        "stride_vt",
        "stride_vh",
        "stride_ct",
        "stride_st",
    ],
    do_not_specialize_on_alignment=["cu_seqlens_ptr"],
)
def _window_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    cu_seqlens_ptr,
    out_ptr,
    num_tokens,
    num_seqs,
    scale_log2e,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ct,
    stride_st,
    UNIT: tl.constexpr,
    UNIT_C: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    D_LO: tl.constexpr,
    D_HI_PAD: tl.constexpr,
    HALF_LO: tl.constexpr,
    HALF_HI_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend for one head of one sequence, or clear rows after the last one.

    Strides count UNITs, those of cos and sin UNIT_Cs.
    Grid: (num_seqs * H + clearing_programs(num_tokens),)
    """
    HALF_HI: tl.constexpr = D // 2 - HALF_LO
    D_HI: tl.constexpr = D - D_LO
    pid = tl.program_id(0)
    num_attending = num_seqs * H
    if pid >= num_attending:
        first, step = pid - num_attending, tl.num_programs(0) - num_attending
        zero_rows(cu_seqlens_ptr, out_ptr, num_tokens, num_seqs, first, step, H * D)
        return

    pid_n = pid // H
    start = tl.load(cu_seqlens_ptr + pid_n)
    length = tl.minimum(tl.load(cu_seqlens_ptr + pid_n + 1), num_tokens) - start
    if length <= 0:
        return
    start = start.to(tl.int64)
    offs_n = tl.arange(0, BLOCK)
    mask = offs_n < length
    row = offs_n.to(tl.int64)

    if HAS_ROPE:
        cos_base = cos_ptr + start * stride_ct * UNIT_C
        sin_base = sin_ptr + start * stride_st * UNIT_C
        row_c = row * stride_ct * UNIT_C
        row_s = row * stride_st * UNIT_C
    row_q = row * stride_qt * UNIT
    row_k = row * stride_kt * UNIT
    row_v = row * stride_vt * UNIT
    row_o = row * (H * D)
    pid_h = (pid % H).to(tl.int64)
    pid_kv = pid_h // (H // H_KV)
    q_base = q_ptr + (start * stride_qt + pid_h * stride_qh) * UNIT
    k_base = k_ptr + (start * stride_kt + pid_kv * stride_kh) * UNIT
    v_base = v_ptr + (start * stride_vt + pid_kv * stride_vh) * UNIT
    o_base = out_ptr + (start * H + pid_h) * D

    # All loads come before the first use: their latencies overlap.
    q1_lo, q2_lo = _load_pairs(q_base, row_q, mask, 0, HALF_LO, HALF_LO, D, INTERLEAVED)
    k1_lo, k2_lo = _load_pairs(k_base, row_k, mask, 0, HALF_LO, HALF_LO, D, INTERLEAVED)
    if HALF_HI > 0:
        q1_hi, q2_hi = _load_pairs(
            q_base, row_q, mask, HALF_LO, HALF_HI, HALF_HI_PAD, D, INTERLEAVED
        )
        k1_hi, k2_hi = _load_pairs(
            k_base, row_k, mask, HALF_LO, HALF_HI, HALF_HI_PAD, D, INTERLEAVED
        )
    if HAS_ROPE:
        cos_lo = load_columns(cos_base, row_c, mask, 0, HALF_LO, HALF_LO)
        sin_lo = load_columns(sin_base, row_s, mask, 0, HALF_LO, HALF_LO)
        if HALF_HI > 0:
            cos_hi = load_columns(cos_base, row_c, mask, HALF_LO, HALF_HI, HALF_HI_PAD)
            sin_hi = load_columns(sin_base, row_s, mask, HALF_LO, HALF_HI, HALF_HI_PAD)
    v_lo = load_columns(v_base, row_v, mask, 0, D_LO, D_LO)
    if D_HI > 0:
        v_hi = load_columns(v_base, row_v, mask, D_LO, D_HI, D_HI_PAD)

    if HAS_ROPE:
        q1_lo, q2_lo = rotate(q1_lo, q2_lo, cos_lo, sin_lo)
        k1_lo, k2_lo = rotate(k1_lo, k2_lo, cos_lo, sin_lo)
    q_lo = _interleave(q1_lo, q2_lo, BLOCK, HALF_LO)
    k_lo = _interleave(k1_lo, k2_lo, BLOCK, HALF_LO)
    scores = tl.dot(q_lo, tl.trans(k_lo), input_precision="ieee")
    if HALF_HI > 0:
        if HAS_ROPE:
            q1_hi, q2_hi = rotate(q1_hi, q2_hi, cos_hi, sin_hi)
            k1_hi, k2_hi = rotate(k1_hi, k2_hi, cos_hi, sin_hi)
        q_hi = _interleave(q1_hi, q2_hi, BLOCK, HALF_HI_PAD)
        k_hi = _interleave(k1_hi, k2_hi, BLOCK, HALF_HI_PAD)
        scores = tl.dot(q_hi, tl.trans(k_hi), scores, input_precision="ieee")

    scores = tl.where(mask[None, :], scores * scale_log2e, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
    total = tl.sum(weights, axis=1)[:, None]
    weights = weights.to(v_lo.dtype)
    o_lo = tl.dot(weights, v_lo, input_precision="ieee") / total
    store_columns(o_base, row_o, mask, 0, D_LO, D_LO, o_lo)
    if D_HI > 0:
        o_hi = tl.dot(weights, v_hi, input_precision="ieee") / total
        store_columns(o_base, row_o, mask, D_LO, D_HI, D_HI_PAD, o_hi)


@triton.jit
def _load_pairs(
    base,
    row,
    mask,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Load both elements of the pairs FIRST to FIRST + WIDTH, like `load_columns`."""
    if INTERLEAVED:
        x = load_columns(base, row, mask, 2 * FIRST, 2 * WIDTH, 2 * WIDTH_PAD)
        return split_pairs(x)
    else:
        x1 = load_columns(base, row, mask, FIRST, WIDTH, WIDTH_PAD)
        return x1, load_columns(base, row, mask, D // 2 + FIRST, WIDTH, WIDTH_PAD)


@triton.jit
def _interleave(x1, x2, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Make one tile of two; q and k agree in the order, so the scores do not see it."""
    # The maximum of x with itself is x, but a reduction stops Triton from moving the
    # conversion to a matrix operand up to the loads, where it would convert q, cos and
    # sin instead of the turned q: 168 registers and 21 barriers, not 96 and 9.
    x = tl.reshape(tl.join(x1, x2), [BLOCK, 2 * WIDTH])
    return tl.max(tl.join(x, x), axis=2).to(x.dtype)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
) -> Callable[[], torch.Tensor]:
    """Settle attention within each sequence of a packed batch of short sequences.

    The bits of a sequence's output depend on its own rows and on the power of two
    that `max_seqlen` rounds up to, not on the other sequences.

    Args:
        q: `[T, H, D]` fp32, fp16 or bf16, D a multiple of 8 from 32 to 128, D-stride
            1, any other strides. Multiples of 8 elements are read fastest.
        k: `[T, H_kv, D]` in q's dtype, H a multiple of H_kv, D-stride 1.
        v: `[T, H_kv, D]` like k.
        cu_seqlens: `[N + 1]` int32, contiguous, token prefix sums from 0. A negative
            length is an empty sequence, so it may end in zeros.
        max_seqlen: An upper bound of the sequence lengths, at most 128 tokens.
        scale: Factor on the scores, usually `D ** -0.5`.
        cos: `[T, D / 2]`, any floating dtype, to rotate q and k by; None for q and k
            that need no rotation. Its last stride should be 1, otherwise a copy of it
            is made now.
        sin: Like cos.
        interleaved: Which elements turn together; see `kernels.rope.rope`.

    Returns:
        A call, for the current stream, that attends over what q, k, v and cu_seqlens
        hold by then. It returns `[T, H, D]` contiguous, in q's dtype, the same tensor
        every time. Rows after the last sequence are zeros.

    Raises:
        ValueError: A tensor or `max_seqlen` breaks a demand above.
    """
    if cos is not None and cos.stride()[-1] != 1:
        cos = cos.contiguous()
    if sin is not None and sin.stride()[-1] != 1:
        sin = sin.contiguous()
    launch = _launch(q, k, v, cu_seqlens, max_seqlen, scale, cos, sin, interleaved)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return lambda: out
    # Without an embedding, nothing reads what stands for its tables.
    turn = (q, q) if cos is None or sin is None else (cos, sin)
    return returning(launch.settle(q, k, v, *turn, cu_seqlens, out), out)


@cached_by_layout
def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> Launch:
    _check_inputs(q, k, v, cu_seqlens, max_seqlen, cos, sin)
    num_tokens, heads, head_dim = q.shape
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    unit = stride_unit(*strides)
    strides_c = (0, 0)
    if cos is not None and sin is not None:
        strides_c = (cos.stride(0), sin.stride(0))
    unit_c = stride_unit(*strides_c)
    block = max(16, triton.next_power_of_2(max_seqlen))
    config = _CONFIGS[block]
    d_lo, d_hi_pad = split_width(head_dim)
    interleaved = interleaved and cos is not None
    # Interleaved pairs are loaded side by side: half as many fill a matrix operand.
    half_lo, half_hi_pad = split_width(head_dim // 2, 8 if interleaved else 16)
    num_seqs = cu_seqlens.numel() - 1
    return Launch(
        _window_kernel,
        num_seqs * heads + clearing_programs(num_tokens),
        num_tokens,
        num_seqs,
        scale * LOG2_E,
        *(stride // unit for stride in strides),
        *(stride // unit_c for stride in strides_c),
        UNIT=unit,
        UNIT_C=unit_c,
        HAS_ROPE=cos is not None,
        INTERLEAVED=interleaved,
        H=heads,
        H_KV=k.shape[1],
        D=head_dim,
        D_LO=d_lo,
        D_HI_PAD=d_hi_pad,
        HALF_LO=half_lo,
        HALF_HI_PAD=half_hi_pad,
        BLOCK=block,
        num_warps=config.num_warps,
        num_stages=1,
        maxnreg=config.maxnreg,
        enable_fp_fusion=False,
    )


def _check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> None:
    if not 0 <= max_seqlen <= MAX_WINDOW:
        raise ValueError(
            f"the window kernel takes sequences of up to {MAX_WINDOW} tokens, "
            f"got max_seqlen={max_seqlen}"
        )
    check_qkv(q, k, v, cu_seqlens)
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin must be given together or not at all")
    if cos is not None and sin is not None:
        expected = (q.shape[0], q.shape[2] // 2)
        if tuple(cos.shape) != expected or tuple(sin.shape) != expected:
            raise ValueError(
                f"cos and sin must be [T, D / 2] = {list(expected)}, got "
                f"{tuple(cos.shape)} and {tuple(sin.shape)}; rotate a part of the "
                "head dim beforehand with kernels.rope"
            )

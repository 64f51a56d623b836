# SPDX-License-Identifier: Apache-2.0
"""Attention within sequences of any length, made for 129 to 4096 tokens on Hopper.

One program holds a block of queries of a head and walks over the keys of its sequence.
It reads any strided views, and clears the rows after the last sequence in the same
launch, so that a graph's padding needs no pass of its own. A head dim is cut into a
power of two and a rest (80 is 64 + 16), where cuDNN pads to 128 and FA3 to 96.

Numerics: fp32 scores, softmax and sums; weights are rounded to the input's dtype before
the sum over v. A row's bits do not depend on which block of queries it lies in, hence
neither on the batch nor on `max_seqlen`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._alignment import UNIT, aligned, is_aligned
from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout, returning
from vllm_flashinfer_vit.kernels._triton import (
    LOG2_E,
    check_qkv,
    clearing_programs,
    find_sequence,
    load_columns,
    split_width,
    store_columns,
    zero_rows,
)

# Keys per step. 128 leaves room for half the warps: 8 x 1024 takes 147 us, not 121.
_BLOCK_N = 64
# Two blocks of 8 warps, or four of 4, share an SM, so that one computes its softmax
# while another multiplies; with 182 registers 8 x 1024 takes 154 us, not 121.
_MAXNREG = 128
# Offsets within a block of 128 rows are int32.
_MAX_STRIDE = 1 << 24


# Nothing but the model and the class of `max_seqlen` selects a variant: a call in a
# graph's capture compiles nothing that an eager call of its class has not.
UNSPECIALIZED: Any = {
    "do_not_specialize": [
        *("num_tokens", "num_seqs", "stride_qt", "stride_qh"),
        *("stride_kt", "stride_kh", "stride_vt", "stride_vh"),
    ],
    "do_not_specialize_on_alignment": ["cu_seqlens_ptr"],
}


class Config(NamedTuple):
    """Rows of a block, and how it is launched."""

    block_m: int
    num_warps: int
    num_stages: int


def _config(max_seqlen: int, head_dim: int) -> Config:
    """Choose by measurement on an H200, bf16, 16 heads; us at D=80 if not said."""
    if head_dim <= 64:
        # Room for a third stage: 20 x 400 takes 53, not 63 (blocks of 128 rows: 61).
        return Config(64, 4, num_stages=3)
    if head_dim <= 80 and max_seqlen <= 512:
        # Fewer rows after the end: 20 x 400 takes 72, not 79; 60 x 144 56, not 68.
        return Config(64, 4, num_stages=2)
    # Half the reads of k and v from the L2: 8 x 1024 takes 119, not 121 (D=72: 125, not
    # 136). Two stages take 128; at D=128 only they leave room for two blocks.
    return Config(128, 8, num_stages=3 if head_dim <= 96 else 2)


@triton.jit
def attend_block(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    start,
    length,
    first,
    pid_h,
    scale_log2e,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    UNIT: tl.constexpr,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    D_LO: tl.constexpr,
    D_HI_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Attend for BLOCK_M queries of a head, from row `first` of their sequence on.

    The sequence has `length` rows, from row `start` of the batch on.
    """
    D_HI: tl.constexpr = D - D_LO
    start = start.to(tl.int64)
    pid_h = tl.cast(pid_h, tl.int64)
    pid_kv = pid_h // (H // H_KV)
    q_base = q_ptr + ((start + first) * stride_qt + pid_h * stride_qh) * UNIT
    k_base = k_ptr + (start * stride_kt + pid_kv * stride_kh) * UNIT
    v_base = v_ptr + (start * stride_vt + pid_kv * stride_vh) * UNIT

    # Offsets within a block fit int32, in half the registers; bases are int64.
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < length - first
    row_q = offs_m * stride_qt * UNIT
    q_lo = load_columns(q_base, row_q, mask_m, 0, D_LO, D_LO)
    acc_lo = tl.zeros([BLOCK_M, D_LO], tl.float32)
    if D_HI > 0:
        q_hi = load_columns(q_base, row_q, mask_m, D_LO, D_HI, D_HI_PAD)
        acc_hi = tl.zeros([BLOCK_M, D_HI_PAD], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Eight sums a row: adding columns of one thread needs no exchange between threads.
    total = tl.zeros([BLOCK_M, 8], tl.float32)

    offs_n = tl.arange(0, BLOCK_N)
    row_k = offs_n * stride_kt * UNIT
    row_v = offs_n * stride_vt * UNIT
    for n in tl.range(0, length, BLOCK_N, num_stages=NUM_STAGES):
        # Keys after the end may be another sequence's, or NaN: not even read.
        mask_n = offs_n < length - n
        k_lo = load_columns(k_base, row_k, mask_n, 0, D_LO, D_LO)
        if D_HI > 0:
            k_hi = load_columns(k_base, row_k, mask_n, D_LO, D_HI, D_HI_PAD)
            scores = tl.dot(q_hi, tl.trans(k_hi), input_precision="ieee")
            scores = tl.dot(q_lo, tl.trans(k_lo), scores, input_precision="ieee")
        else:
            scores = tl.dot(q_lo, tl.trans(k_lo), input_precision="ieee")
        # The maximum is in both branches to keep them branches: LLVM would turn the
        # mask alone into selects in every step, at 5 % of the time.
        if n + BLOCK_N > length:
            scores = tl.where(mask_n[None, :], scores, float("-inf"))
            block_top = tl.max(scores, axis=1)
        else:
            block_top = tl.max(scores, axis=1)
        new_top = tl.maximum(top, block_top * scale_log2e)
        weights = tl.exp2(scores * scale_log2e - new_top[:, None])
        decay = tl.exp2(top - new_top)[:, None]
        top = new_top
        parts = tl.reshape(weights, [BLOCK_M, BLOCK_N // 8, 8])
        total = total * decay + tl.sum(parts, axis=1)

        v_lo = load_columns(v_base, row_v, mask_n, 0, D_LO, D_LO)
        weights = weights.to(v_lo.dtype)
        acc_lo = tl.dot(weights, v_lo, acc_lo * decay, input_precision="ieee")
        if D_HI > 0:
            v_hi = load_columns(v_base, row_v, mask_n, D_LO, D_HI, D_HI_PAD)
            acc_hi = tl.dot(weights, v_hi, acc_hi * decay, input_precision="ieee")
        k_base += tl.cast(stride_kt, tl.int64) * (BLOCK_N * UNIT)
        v_base += tl.cast(stride_vt, tl.int64) * (BLOCK_N * UNIT)

    # Computed here, not before the loop, where it would cost spills.
    o_base = out_ptr + ((start + first) * H + pid_h) * D
    row_o = offs_m * (H * D)
    norm = 1 / tl.sum(total, axis=1)[:, None]
    store_columns(o_base, row_o, mask_m, 0, D_LO, D_LO, acc_lo * norm)
    if D_HI > 0:
        store_columns(o_base, row_o, mask_m, D_LO, D_HI, D_HI_PAD, acc_hi * norm)


@triton.jit(**UNSPECIALIZED)
def _flash_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
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
    UNIT: tl.constexpr,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    D_LO: tl.constexpr,
    D_HI_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Attend for BLOCK_M queries of one head, or clear rows after the last sequence.

    Strides count UNITs; q, k and v start at a multiple of 16 bytes. The blocks of a
    head of a sequence run together, so that its k and v come from the L2.
    Grid: (H * (num_tokens // BLOCK_M + num_seqs) + clearing_programs(num_tokens),)
    """
    pid = tl.program_id(0)
    num_blocks = H * (num_tokens // BLOCK_M + num_seqs)
    if pid >= num_blocks:
        first, step = pid - num_blocks, tl.num_programs(0) - num_blocks
        zero_rows(cu_seqlens_ptr, out_ptr, num_tokens, num_seqs, first, step, H * D)
        return

    pid_n = find_sequence(cu_seqlens_ptr, num_seqs, pid // H, BLOCK_M)
    if pid_n < 0:
        return
    start = tl.load(cu_seqlens_ptr + pid_n)
    length = tl.minimum(tl.load(cu_seqlens_ptr + pid_n + 1), num_tokens) - start
    head_blocks = tl.cdiv(length, BLOCK_M)
    item = pid - H * (start // BLOCK_M + pid_n)
    if item >= H * head_blocks:
        return
    first = (item % head_blocks) * BLOCK_M
    pid_h = item // head_blocks
    attend_block(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        start,
        length,
        first,
        pid_h,
        scale_log2e,
        stride_qt,
        stride_qh,
        stride_kt,
        stride_kh,
        stride_vt,
        stride_vh,
        UNIT,
        H,
        H_KV,
        D,
        D_LO,
        D_HI_PAD,
        BLOCK_M,
        BLOCK_N,
        NUM_STAGES,
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
        q: `[T, H, D]` fp16 or bf16 (fp32: right, not fast), D a multiple of 8 from 32
            to 128, D-stride 1, T-stride below 2^24, any H-stride. What is not aligned
            to 16 bytes (strides of 8 elements) is copied first.
        k: `[T, H_kv, D]` in q's dtype, H a multiple of H_kv, D-stride 1.
        v: `[T, H_kv, D]` like k.
        cu_seqlens: `[N + 1]` int32, contiguous, token prefix sums from 0. A negative
            length is an empty sequence, so it may end in zeros.
        max_seqlen: An upper bound of the sequence lengths in tokens.
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
        return lambda: _settle(
            aligned(q), aligned(k), aligned(v), cu_seqlens, max_seqlen, scale
        )()
    return _settle(q, k, v, cu_seqlens, max_seqlen, scale)


def _settle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> Callable[[], torch.Tensor]:
    config = _config(max_seqlen, q.shape[-1])
    launch = _launch(q, k, v, cu_seqlens, config, scale)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return lambda: out
    return returning(launch.settle(q, k, v, cu_seqlens, out), out)


@cached_by_layout
def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    config: Config,
    scale: float,
) -> Launch:
    check_inputs(q, k, v, cu_seqlens, scale)
    num_tokens, heads, _ = q.shape
    num_seqs = cu_seqlens.numel() - 1
    num_blocks = heads * (num_tokens // config.block_m + num_seqs)
    return Launch(
        _flash_kernel,
        num_blocks + clearing_programs(num_tokens),
        *scalars_of(q, k, v, num_seqs, scale),
        **constants_of(q, k, config),
    )


def scalars_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_seqs: int, scale: float
) -> tuple[int | float, ...]:
    """Return a launch's scalars: rows, sequences, the scale, and six strides."""
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    # In units: every load is one of 16 bytes, asynchronous.
    units = (stride // UNIT for stride in strides)
    return q.shape[0], num_seqs, scale * LOG2_E, *units


def constants_of(q: torch.Tensor, k: torch.Tensor, config: Config) -> dict[str, int]:
    """Return a launch's constants and Triton's options."""
    head_dim = q.shape[2]
    d_lo, d_hi_pad = split_width(head_dim)
    return {
        "UNIT": UNIT,
        "H": q.shape[1],
        "H_KV": k.shape[1],
        "D": head_dim,
        "D_LO": d_lo,
        "D_HI_PAD": d_hi_pad,
        "BLOCK_M": config.block_m,
        "BLOCK_N": _BLOCK_N,
        "NUM_STAGES": config.num_stages,
        "num_warps": config.num_warps,
        "maxnreg": _MAXNREG,
    }


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> None:
    """Check what `prepare` demands.

    Raises:
        ValueError: As `prepare`.
    """
    check_qkv(q, k, v, cu_seqlens)
    if any(x.stride(0) >= _MAX_STRIDE for x in (q, k, v)):
        found = [x.stride() for x in (q, k, v)]
        raise ValueError(f"T-strides must be below {_MAX_STRIDE}, got {found}")
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")

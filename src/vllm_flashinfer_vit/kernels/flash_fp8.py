# SPDX-License-Identifier: Apache-2.0
"""Attention over q, k and v in e4m3 with a scale per block of 128 tokens and head.

It reads what `kernels/quantize.py` writes, whose blocks are padded with zeros: loads
need no masks, and only a sequence's last block of keys masks its scores. Both products
run in e4m3. The quantiser stores the keys of v in the order in which a thread holds the
weights, so that these become an operand without an exchange between threads.

Numerics: fp32 scores, softmax and sums. Weights are scaled by 2^8 before they are
rounded to e4m3. The matrix unit sums one block of keys in its reduced precision; blocks
are added in fp32, in units of the last block's scale. A row's bits do not depend on the
rest of the batch.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout, returning
from vllm_flashinfer_vit.kernels._triton import (
    LOG2_E,
    clearing_programs,
    find_sequence,
    split_width,
    store_columns,
    zero_rows,
)
from vllm_flashinfer_vit.kernels.formats import BLOCK, QuantizedQKV, check_blocks

# Two programs an SM; a cap for a third would cost spills.
_BLOCK_M = 64
_NUM_WARPS = 4
_NUM_STAGES = 3


# Nothing but the model selects a variant.
@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "num_blocks"],
    do_not_specialize_on_alignment=["cu_seqlens_ptr"],
)
def _flash_fp8_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    cu_seqlens_ptr,
    out_ptr,
    num_tokens,
    num_seqs,
    num_blocks,
    scale_log2e,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    D_QK: tl.constexpr,
    QK_LO: tl.constexpr,
    QK_HI: tl.constexpr,
    D_V: tl.constexpr,
    V_LO: tl.constexpr,
    V_HI_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Attend for BLOCK_M queries of one head, or clear rows after the last sequence.

    The queries of a head run together, so that k and v come from the L2.
    Grid: (H * num_blocks * BLOCK // BLOCK_M + clearing_programs(num_tokens),)
    """
    PARTS: tl.constexpr = BLOCK // BLOCK_M
    pid = tl.program_id(0)
    num_attending = H * num_blocks * PARTS
    if pid >= num_attending:
        first, step = pid - num_attending, tl.num_programs(0) - num_attending
        zero_rows(cu_seqlens_ptr, out_ptr, num_tokens, num_seqs, first, step, H * D)
        return

    pid_b = pid // PARTS % num_blocks
    pid_n = find_sequence(cu_seqlens_ptr, num_seqs, pid_b, BLOCK)
    if pid_n < 0:
        return
    start = tl.load(cu_seqlens_ptr + pid_n)
    length = tl.minimum(tl.load(cu_seqlens_ptr + pid_n + 1), num_tokens) - start
    first_b = start // BLOCK + pid_n
    first = (pid_b - first_b) * BLOCK + pid % PARTS * BLOCK_M
    if first >= length:
        return
    pid_h = (pid // (num_blocks * PARTS)).to(tl.int64)
    at_q = pid_h * num_blocks + pid_b
    at_kv = pid_h // (H // H_KV) * num_blocks + first_b
    num_rows = num_blocks.to(tl.int64) * BLOCK

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK)
    q_base = q_ptr + (at_q * BLOCK + pid % PARTS * BLOCK_M) * D_QK
    k_base = k_ptr + at_kv * (BLOCK * D_QK)
    v_base = v_ptr + (pid_h // (H // H_KV) * D_V * num_rows + first_b * BLOCK)
    q_lo = _load(q_base, offs_m * D_QK, tl.arange(0, QK_LO))
    acc_lo = tl.zeros([BLOCK_M, V_LO], tl.float32)
    part_lo = tl.zeros([BLOCK_M, V_LO], tl.float32)
    row_v_lo = tl.arange(0, V_LO) * num_rows
    if QK_HI > 0:
        q_hi = _load(q_base, offs_m * D_QK, QK_LO + tl.arange(0, QK_HI))
    if V_HI_PAD > 0:
        acc_hi = tl.zeros([BLOCK_M, V_HI_PAD], tl.float32)
        part_hi = tl.zeros([BLOCK_M, V_HI_PAD], tl.float32)
        col_v_hi = V_LO + tl.arange(0, V_HI_PAD)
        if V_LO + V_HI_PAD > D_V:
            # No column follows the last head's: those too many repeat its last one.
            col_v_hi = tl.minimum(col_v_hi, D_V - 1)
        row_v_hi = col_v_hi * num_rows
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    decay = tl.zeros([BLOCK_M], tl.float32)
    # Eight sums a row: adding columns of one thread needs no exchange between threads.
    total = tl.zeros([BLOCK_M, 8], tl.float32)
    q_factor = tl.load(q_scale_ptr + at_q) * scale_log2e
    v_scale = 1.0

    for n in tl.range(0, length, BLOCK, num_stages=NUM_STAGES):
        k_factor = tl.load(k_scale_ptr + at_kv)
        v_scale_new = tl.load(v_scale_ptr + at_kv)
        k_lo = _load(k_base, offs_n * D_QK, tl.arange(0, QK_LO))
        scores = tl.dot(q_lo, tl.trans(k_lo))
        if QK_HI > 0:
            k_hi = _load(k_base, offs_n * D_QK, QK_LO + tl.arange(0, QK_HI))
            scores = tl.dot(q_hi, tl.trans(k_hi), scores)
        # The sums of the block before: their product has run beside this one's scores.
        acc_lo = acc_lo * decay[:, None] + part_lo
        if V_HI_PAD > 0:
            acc_hi = acc_hi * decay[:, None] + part_hi
        # The maximum is in both branches to keep them branches: LLVM would turn the
        # mask alone into selects in every step.
        if n + BLOCK > length:
            scores = tl.where((offs_n < length - n)[None, :], scores, float("-inf"))
            block_top = tl.max(scores, axis=1)
        else:
            block_top = tl.max(scores, axis=1)
        factor = q_factor * k_factor
        new_top = tl.maximum(top, block_top * factor)
        # 2^8 times the weights, and so their sum: both cancel.
        weights = tl.exp2(scores * factor - (new_top - 8.0)[:, None])
        decay = tl.exp2(top - new_top)
        top = new_top
        parts = tl.reshape(weights, [BLOCK_M, BLOCK // 8, 8])
        total = total * decay[:, None] + tl.sum(parts, axis=1)
        decay *= v_scale / v_scale_new
        v_scale = v_scale_new

        weights = _order_as_keys(weights.to(tl.float8e4nv), BLOCK_M, BLOCK)
        v_lo = _load(v_base, row_v_lo, offs_n)
        part_lo = tl.dot(weights, tl.trans(v_lo))
        if V_HI_PAD > 0:
            v_hi = _load(v_base, row_v_hi, offs_n)
            part_hi = tl.dot(weights, tl.trans(v_hi))
        k_base += BLOCK * D_QK
        v_base += BLOCK
        at_kv += 1

    # Computed here, not before the loop, where it would cost registers.
    o_base = out_ptr + ((start + first).to(tl.int64) * H + pid_h) * D
    row_o = offs_m * (H * D)
    mask_m = offs_m < length - first
    norm = (v_scale / tl.sum(total, axis=1))[:, None]
    acc_lo = (acc_lo * decay[:, None] + part_lo) * norm
    store_columns(o_base, row_o, mask_m, 0, min(D, V_LO), V_LO, acc_lo)
    if V_HI_PAD > 0:
        acc_hi = (acc_hi * decay[:, None] + part_hi) * norm
        store_columns(o_base, row_o, mask_m, V_LO, D - V_LO, V_HI_PAD, acc_hi)


@triton.jit
def _load(base, row, col):
    return tl.load(base + (row[:, None] + col[None, :]))


@triton.jit
def _order_as_keys(weights, M: tl.constexpr, N: tl.constexpr):
    """Bring columns to the order of v's keys; see `QuantizedQKV`."""
    weights = tl.reshape(weights, [M, N // 32, 2, 2, 4, 2])
    return tl.reshape(tl.permute(weights, [0, 1, 2, 4, 3, 5]), [M, N])


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
        head_dim: D.
        dtype: fp32, fp16 or bf16, of the output.

    Returns:
        A call, for the current stream, that attends over what `quantized` and
        `cu_seqlens` hold by then. It returns `[T, H, D]` contiguous, in `dtype`, the
        same tensor every time. Rows after the last sequence are zeros.

    Raises:
        ValueError: The tensors do not fit the sizes, or scale is not above 0.
    """
    launch = _plan(
        quantized.q, quantized.v, cu_seqlens, num_tokens, scale, head_dim, dtype
    )
    heads = quantized.q.shape[0]
    shape = (num_tokens, heads, head_dim)
    out = torch.empty(shape, dtype=dtype, device=quantized.q.device)
    if not num_tokens:
        return lambda: out
    return returning(launch.settle(*quantized, cu_seqlens, out), out)


@cached_by_layout
def _plan(
    q: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    scale: float,
    head_dim: int,
    dtype: torch.dtype,
) -> Launch:
    # A launch keeps the variant that it compiled, which writes one dtype.
    heads, _, d_qk = q.shape
    kv_heads, d_v, _ = v.shape
    num_seqs = cu_seqlens.numel() - 1
    num_blocks = check_blocks(q, v, num_tokens, num_seqs, head_dim, scale)
    qk_lo, qk_hi = split_width(d_qk)
    v_lo, v_hi_pad = split_width(d_v)
    parts = BLOCK // _BLOCK_M
    return Launch(
        _flash_fp8_kernel,
        heads * num_blocks * parts + clearing_programs(num_tokens),
        num_tokens,
        num_seqs,
        num_blocks,
        scale * LOG2_E,
        H=heads,
        H_KV=kv_heads,
        D=head_dim,
        D_QK=d_qk,
        QK_LO=qk_lo,
        QK_HI=qk_hi,
        D_V=d_v,
        V_LO=v_lo,
        V_HI_PAD=v_hi_pad,
        BLOCK=BLOCK,
        BLOCK_M=_BLOCK_M,
        NUM_STAGES=_NUM_STAGES,
        num_warps=_NUM_WARPS,
    )

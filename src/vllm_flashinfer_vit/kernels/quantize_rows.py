# SPDX-License-Identifier: Apache-2.0
"""q, k and v to e4m3 by one scale for each, tokens staying rows, as cuDNN wants them.

It replaces the copy and rotation of q and k, and a quantising launch for each of q, k
and v. The numerics are those of `kernels/quantize.py`; the bits equal those of
`kernels/quantize_ref.py`.
"""

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._clip_counts import (
    check_counts,
    count_blocks,
    count_cut_off,
)
from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout
from vllm_flashinfer_vit.kernels._quantize import (
    absmax_pairs,
    absmax_tiles,
    angle_strides,
    check_inputs,
    check_scales,
    contiguous_columns,
    head_constants,
    head_items,
    head_strides,
    load_angles,
    load_columns_in_order,
    load_pairs,
    store_columns_in_order,
    store_pairs,
    turn_pairs,
)
from vllm_flashinfer_vit.kernels._triton import last_row
from vllm_flashinfer_vit.kernels.formats import BLOCK, E4M3_MAX

_NUM_WARPS = 8
_E4M3_MAX = tl.constexpr(E4M3_MAX)


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
    do_not_specialize_on_alignment=["scales_ptr", "counts_ptr", "cu_seqlens_ptr"],
)
def _quantize_rows_kernel(
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
    num_tokens,
    num_seqs,
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
    HAS_COUNTS: tl.constexpr,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise BLOCK rows of one head of q, and of k and v if they have this head.

    Strides of q, k and v count UNIT_Xs, those of cos and sin UNITs.
    Grid: (cdiv(num_tokens, BLOCK) * H,)
    """
    pid = tl.program_id(0)
    start = (pid // H).to(tl.int64) * BLOCK
    pid_h = (pid % H).to(tl.int64)
    end = last_row(cu_seqlens_ptr, num_seqs, num_tokens)
    # The tiles may have room for more rows than a block.
    rows = tl.minimum(tl.maximum(end - start, 0), BLOCK).to(tl.int32)
    # Rows after the end are stored, as zeros, but not read.
    rows_out = tl.minimum(num_tokens - start, BLOCK).to(tl.int32)
    if HAS_COUNTS:
        count_blocks(counts_ptr, (pid_h == 0) & (rows > 0), H, H_KV)
    items = head_items(D, UNIT, LO, HI)
    q_base = q_ptr + (start * stride_qt + pid_h * stride_qh) * UNIT_X
    cos_base = cos_ptr + start * stride_ct * UNIT
    sin_base = sin_ptr + start * stride_st * UNIT
    q = load_pairs(
        q_base, stride_qt, rows, items, D, TURNED, UNIT, UNIT_X, INTERLEAVED, HI
    )
    angles = load_angles(
        cos_base, sin_base, stride_ct, stride_st, rows, items, TURNED, UNIT, HI
    )
    q = turn_pairs(q, angles, items, D, TURNED, UNIT, HI)
    inverse = tl.div_rn(1.0, tl.load(scales_ptr))
    if HAS_COUNTS:
        amax = absmax_pairs(q, UNIT, HI > 0)
        count_cut_off(counts_ptr, 0, amax, inverse, _E4M3_MAX)
    base = q_out_ptr + (start * H + pid_h) * D_PAD
    ROW: tl.constexpr = H * D_PAD
    store_pairs(base, ROW, rows_out, items, q, inverse, None, D, D_PAD, HI, BLOCK)
    if pid_h >= H_KV:
        return
    k_base = k_ptr + (start * stride_kt + pid_h * stride_kh) * UNIT_X
    v_base = v_ptr + (start * stride_vt + pid_h * stride_vh) * UNIT_X
    ROW_KV: tl.constexpr = H_KV * D_PAD
    at = start * ROW_KV + pid_h * D_PAD
    k = load_pairs(
        k_base, stride_kt, rows, items, D, TURNED, UNIT, UNIT_X, INTERLEAVED, HI
    )
    v_lo, v_hi = load_columns_in_order(v_base, stride_vt, rows, items, UNIT, UNIT_X, HI)
    k = turn_pairs(k, angles, items, D, TURNED, UNIT, HI)
    base = k_out_ptr + at
    inverse = tl.div_rn(1.0, tl.load(scales_ptr + 1))
    if HAS_COUNTS:
        amax = absmax_pairs(k, UNIT, HI > 0)
        count_cut_off(counts_ptr, 1, amax, inverse, _E4M3_MAX)
    store_pairs(base, ROW_KV, rows_out, items, k, inverse, None, D, D_PAD, HI, BLOCK)
    base = v_out_ptr + at
    inverse = tl.div_rn(1.0, tl.load(scales_ptr + 2))
    if HAS_COUNTS:
        amax = absmax_tiles(v_lo, v_hi, 2 * UNIT, HI > 0)
        count_cut_off(counts_ptr, 2, amax, inverse, _E4M3_MAX)
    store_columns_in_order(
        base, ROW_KV, rows_out, items, v_lo, v_hi, inverse, D, D_PAD, HI, BLOCK
    )


def quantize_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scales: torch.Tensor,
    head_dim_padded: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn q and k, and quantise q, k and v by one scale for each, rows staying rows.

    Args:
        q: Like k and v as `quantize_blocks` takes it.
        k: See `q`.
        v: See `q`.
        cu_seqlens: `[N + 1]` int32, contiguous; rows from its largest entry on are
            padding.
        scales: `[3]` fp32 on the device, for q, k and v.
        head_dim_padded: Dp, a multiple of 8 from D on.
        cos: As `quantize_blocks` takes it; so is sin.
        sin: See `cos`.
        interleaved: As `quantize_blocks` takes it.
        counts: As `quantize_blocks` takes it. A block is 128 rows of the batch here,
            whatever its sequences; one of padding alone is not counted.

    Returns:
        q `[T, H, Dp]`, k and v `[T, H_kv, Dp]`, e4m3 and contiguous. Columns from D on,
        and rows of padding, are zeros. Columns of q and k are in the order of
        `QuantizedQKV`, those of v as they were.

    Raises:
        ValueError: An argument breaks a demand above.
    """
    cos, sin = contiguous_columns(cos), contiguous_columns(sin)
    launch = _plan(
        *(q, k, v, cu_seqlens, scales, head_dim_padded, cos, sin, interleaved, counts)
    )
    q_out, k_out, v_out = (
        torch.empty(
            (x.shape[0], x.shape[1], head_dim_padded),
            dtype=torch.float8_e4m3fn,
            device=x.device,
        )
        for x in (q, k, v)
    )
    if q.shape[0]:
        launch(
            q,
            k,
            v,
            q if cos is None else cos,
            q if sin is None else sin,
            scales,
            scales if counts is None else counts,
            cu_seqlens,
            q_out,
            k_out,
            v_out,
        )
    return q_out, k_out, v_out


@cached_by_layout
def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scales: torch.Tensor,
    head_dim_padded: int,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    counts: torch.Tensor | None,
) -> Launch:
    check_inputs(q, k, v, cu_seqlens, cos, sin)
    check_scales(scales)
    if counts is not None:
        check_counts(counts, scales)
    num_tokens, heads, head_dim = q.shape
    if head_dim_padded % 8 != 0 or head_dim_padded < head_dim:
        raise ValueError(
            f"the padded head dim must be a multiple of 8 from {head_dim} on, "
            f"got {head_dim_padded}"
        )
    constants = head_constants(q, k, cos, sin, interleaved, v)
    unit, unit_x = constants["UNIT"], constants["UNIT_X"]
    return Launch(
        _quantize_rows_kernel,
        triton.cdiv(num_tokens, BLOCK) * heads,
        num_tokens,
        cu_seqlens.numel() - 1,
        *(stride // unit_x for stride in head_strides(q, k, v)),
        *(stride // unit for stride in angle_strides(cos, sin)),
        HAS_COUNTS=counts is not None,
        D_PAD=head_dim_padded,
        num_warps=_NUM_WARPS,
        # Two programs share an SM; above D=96 it would cost spills.
        maxnreg=128 if head_dim <= 96 else None,
        **constants,
    )

# SPDX-License-Identifier: Apache-2.0
"""Dynamic scales of q, k and v from the largest absolute values of the last 16 passes.

One launch takes the maxima of turned q and k and of v, a second enters them into the
history and derives the scales. All that lasts is on the device, the history's position
too, so a pass may be captured in a CUDA graph. Rows after the last sequence have no
part in it, nor has NaN or Inf, which would stay for 16 passes. The order of its terms
does not change a maximum: the bits, those of `kernels/absmax_ref.py`, never vary.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout, nothing
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
    load_columns_in_order,
    load_pairs,
    turn_pairs,
)
from vllm_flashinfer_vit.kernels._triton import last_row
from vllm_flashinfer_vit.kernels.formats import BLOCK, E4M3_MAX, HISTORY, DeviceScales

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
    do_not_specialize_on_alignment=["cu_seqlens_ptr", "amax_ptr"],
)
def _absmax_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    cu_seqlens_ptr,
    amax_ptr,
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
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raise amax to the maxima of BLOCK rows of one head.

    Strides of q, k and v count UNIT_Xs, those of cos and sin UNITs.
    Grid: (cdiv(num_tokens, BLOCK) * H,)
    """
    pid = tl.program_id(0)
    start = (pid // H).to(tl.int64) * BLOCK
    pid_h = (pid % H).to(tl.int64)
    end = last_row(cu_seqlens_ptr, num_seqs, num_tokens)
    if start >= end:
        return
    rows = tl.minimum(end - start, BLOCK).to(tl.int32)
    items = head_items(D, UNIT, LO, HI)
    cos_base = cos_ptr + start * stride_ct * UNIT
    sin_base = sin_ptr + start * stride_st * UNIT
    q_base = q_ptr + (start * stride_qt + pid_h * stride_qh) * UNIT_X
    q = load_pairs(
        q_base, stride_qt, rows, items, D, TURNED, UNIT, UNIT_X, INTERLEAVED, HI
    )
    angles = load_angles(
        cos_base, sin_base, stride_ct, stride_st, rows, items, TURNED, UNIT, HI
    )
    q = turn_pairs(q, angles, items, D, TURNED, UNIT, HI)
    _raise(amax_ptr, absmax_pairs(q, UNIT, HI > 0))
    if pid_h < H_KV:
        k_base = k_ptr + (start * stride_kt + pid_h * stride_kh) * UNIT_X
        k = load_pairs(
            k_base, stride_kt, rows, items, D, TURNED, UNIT, UNIT_X, INTERLEAVED, HI
        )
        v_base = v_ptr + (start * stride_vt + pid_h * stride_vh) * UNIT_X
        v_lo, v_hi = load_columns_in_order(
            v_base, stride_vt, rows, items, UNIT, UNIT_X, HI
        )
        k = turn_pairs(k, angles, items, D, TURNED, UNIT, HI)
        _raise(amax_ptr + 1, absmax_pairs(k, UNIT, HI > 0))
        _raise(amax_ptr + 2, absmax_tiles(v_lo, v_hi, 2 * UNIT, HI > 0))


@triton.jit
def _raise(amax_ptr, amax):
    # Most programs find a larger one there: an atomic operation of each would queue.
    if amax > tl.load(amax_ptr, volatile=True):
        # Floats of one sign are ordered like their bits.
        as_int = amax_ptr.to(tl.pointer_type(tl.int32))
        tl.atomic_max(as_int, amax.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(
    do_not_specialize_on_alignment=[
        "amax_ptr",
        "history_ptr",
        "position_ptr",
        "scales_ptr",
    ],
)
def _update_kernel(
    amax_ptr,
    history_ptr,
    position_ptr,
    scales_ptr,
    HISTORY: tl.constexpr,
):
    """Move amax into the history and derive the scales. Grid: (1,)"""
    position = tl.load(position_ptr)
    offs_i = tl.arange(0, 4)
    offs_p = tl.arange(0, HISTORY)
    mask = offs_i < 3
    amax = tl.load(amax_ptr + offs_i, mask=mask, other=0.0)
    past_ptr = history_ptr + offs_p[:, None] * 3 + offs_i[None, :]
    past = tl.load(past_ptr, mask=mask[None, :], other=0.0)
    past = tl.where((offs_p == position)[:, None], amax[None, :], past)
    tl.store(past_ptr, past, mask=mask[None, :])
    scales = block_scale(tl.max(past, axis=0), _E4M3_MAX)
    tl.store(scales_ptr + offs_i, scales, mask=mask)
    tl.store(amax_ptr + offs_i, tl.zeros([4], tl.float32), mask=mask)
    tl.store(position_ptr, (position + 1) % HISTORY)


_UPDATE = Launch(_update_kernel, 1, HISTORY=HISTORY, num_warps=1)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    amax: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
) -> Callable[[torch.Tensor], None]:
    """Prepare to find the largest finite absolute values of turned q and k, and of v.

    Args:
        q: Like k and v as `quantize_blocks` takes it. Calls read what they hold by
            then.
        k: See `q`.
        v: See `q`.
        cu_seqlens: `[N + 1]` int32, contiguous; rows from its largest entry on are
            padding and are not read.
        amax: What that of each call is like: `[3]` fp32, contiguous, not negative.
        cos: As `quantize_blocks` takes it; a copy that it needs is made now.
        sin: Like cos.
        interleaved: As `quantize_blocks` takes it.

    Returns:
        The call, which takes the `amax` that it raises to these values, in place.

    Raises:
        ValueError: A tensor breaks a demand above.
    """
    cos, sin = contiguous_columns(cos), contiguous_columns(sin)
    launch = _plan(q, k, v, cu_seqlens, amax, cos, sin, interleaved)
    if not q.shape[0]:
        return nothing
    # Not settled: of layers that share nothing, that would take more than it saves.
    return functools.partial(
        launch,
        q,
        k,
        v,
        q if cos is None else cos,
        q if sin is None else sin,
        cu_seqlens,
    )


def update(state: DeviceScales) -> None:
    """End a pass: move `state.amax` into the history, and derive the scales.

    A scale is the largest value of the last 16 passes, this one included, over 448; 1
    while all were 0.

    Args:
        state: Changed in place.
    """
    tensors = state.amax, state.history, state.position, state.scales
    _UPDATE(*tensors)


@cached_by_layout
def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    amax: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> Launch:
    check_inputs(q, k, v, cu_seqlens, cos, sin)
    check_scales(amax)
    constants = head_constants(q, k, cos, sin, interleaved, v)
    unit, unit_x = constants["UNIT"], constants["UNIT_X"]
    return Launch(
        _absmax_kernel,
        triton.cdiv(q.shape[0], BLOCK) * q.shape[1],
        q.shape[0],
        cu_seqlens.numel() - 1,
        *(stride // unit_x for stride in head_strides(q, k, v)),
        *(stride // unit for stride in angle_strides(cos, sin)),
        num_warps=_NUM_WARPS,
        # Two programs share an SM; above D=96 it would cost spills.
        maxnreg=128 if q.shape[2] <= 96 else None,
        **constants,
    )

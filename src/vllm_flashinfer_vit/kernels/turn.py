# SPDX-License-Identifier: Apache-2.0
"""q and k normalised and turned where they lie, since no attention kernel normalises.

That is an RMSNorm of each head in front of rotary, of v, too, where v has one. Rotary
may be axial. A program does all of it for all heads of a token in one read and one
write.

Numerics: fp32 throughout, rounded once.
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._launch import (
    Launch,
    Slot,
    cached_by_layout,
)
from vllm_flashinfer_vit.kernels.turn_ref import check_turn_inputs

_VALUES_PER_WARP = 32 * 8
_MAX_WARPS = 8


@triton.jit
def _turn_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ct,
    stride_st,
    eps,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    H_PAD: tl.constexpr,
    H_KV_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_V: tl.constexpr,
):
    """Turn all heads of one token's q and k. Grid: (tokens,)"""
    token = tl.program_id(0).to(tl.int64)
    offs_p = tl.arange(0, HALF_PAD)
    mask_p = offs_p < HALF
    cos = tl.load(cos_ptr + token * stride_ct + offs_p, mask=mask_p, other=1.0)
    sin = tl.load(sin_ptr + token * stride_st + offs_p, mask=mask_p, other=0.0)
    cos = cos.to(tl.float32)[None]
    sin = sin.to(tl.float32)[None]
    _turn_heads(
        q_ptr + token * stride_qt,
        stride_qh,
        q_weight_ptr,
        cos,
        sin,
        eps,
        H,
        H_PAD,
        HALF,
        HALF_PAD,
        SPAN,
    )
    _turn_heads(
        k_ptr + token * stride_kt,
        stride_kh,
        k_weight_ptr,
        cos,
        sin,
        eps,
        H_KV,
        H_KV_PAD,
        HALF,
        HALF_PAD,
        SPAN,
    )
    if HAS_V:
        _normalise_heads(
            v_ptr + token * stride_vt, stride_vh, eps, H_KV, H_KV_PAD, HALF, HALF_PAD
        )


@triton.jit
def _turn_heads(
    row_ptr,
    stride_h,
    weight_ptr,
    cos,
    sin,
    eps,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    SPAN: tl.constexpr,
):
    offs_h = tl.arange(0, H_PAD)
    heads = row_ptr + (offs_h.to(tl.int64) * stride_h)[:, None]
    is_head = (offs_h < H)[:, None]
    offs_p = tl.arange(0, HALF_PAD)
    mask_p = offs_p < HALF
    mask = is_head & mask_p[None]
    # Where a pair begins. Without arithmetic where there is none to do: loads are wide.
    offs_1 = offs_p
    if SPAN < HALF:
        offs_1 = offs_p // SPAN * (2 * SPAN) + offs_p % SPAN
    x1 = tl.load(heads + offs_1[None], mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(heads + SPAN + offs_1[None], mask=mask, other=0.0).to(tl.float32)
    mean_square = tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * HALF)
    root = tl.rsqrt(mean_square + eps)[:, None]
    w1 = tl.load(weight_ptr + offs_1, mask=mask_p, other=0.0)
    w2 = tl.load(weight_ptr + SPAN + offs_1, mask=mask_p, other=0.0)
    x1 = x1 * root * w1.to(tl.float32)[None]
    x2 = x2 * root * w2.to(tl.float32)[None]
    y1 = (x1 * cos - x2 * sin).to(row_ptr.dtype.element_ty)
    y2 = (x2 * cos + x1 * sin).to(row_ptr.dtype.element_ty)
    tl.store(heads + offs_1[None], y1, mask=mask)
    tl.store(heads + SPAN + offs_1[None], y2, mask=mask)


@triton.jit
def _normalise_heads(
    row_ptr,
    stride_h,
    eps,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    offs_h = tl.arange(0, H_PAD)
    offs_d = tl.arange(0, 2 * HALF_PAD)
    at = row_ptr + (offs_h.to(tl.int64) * stride_h)[:, None] + offs_d[None]
    mask = (offs_h < H)[:, None] & (offs_d < 2 * HALF)[None]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(x * x, axis=1) / (2 * HALF) + eps)[:, None]
    tl.store(at, (x * root).to(row_ptr.dtype.element_ty), mask=mask)


def turn(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: Sequence[torch.Tensor],
    eps: float,
    span: int | None = None,
    v: torch.Tensor | None = None,
) -> None:
    """Normalise each head of q and k, and turn it, in place.

    Args:
        q: `[T, H, D]` fp32, fp16 or bf16, D-stride 1, any other strides; overwritten.
        k: `[T, H_kv, D]` like q; overwritten.
        cos: `[T, D / 2]`, any floating dtype, last stride 1.
        sin: Like cos.
        weights: Of the RMSNorms of q and of k, `[D]` each, any floating dtype,
            contiguous.
        eps: Added to the mean square.
        span: The distance of a pair's elements, D / 2 for None. Each 2 `span` elements
            are turned on their own, so that D / 4 turns the halves of a head by the
            halves of cos and sin, as axial rotary embedding does.
        v: `[T, H_kv, D]` like k, or None. Each head of it is normalised, without a
            weight, and not turned; overwritten.

    Raises:
        ValueError: A tensor breaks a demand above.
    """
    launch = _launch(q, k, v, cos, sin, eps, span, *weights)
    if len(q):
        launch(q, k, k if v is None else v, cos, sin, *weights)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: Sequence[torch.Tensor],
    eps: float,
) -> Callable[..., None]:
    """Settle `turn` for q, k, cos and sin that stay where they are.

    Args:
        q: As for `turn`, T above 0; calls turn what it holds by then.
        k: See `q`.
        cos: See `q`.
        sin: See `q`.
        weights: As for `turn`, like those to come.
        eps: As for `turn`.

    Returns:
        A call, for the current stream, of the two weights.

    Raises:
        ValueError: As `turn`.
    """
    launch = _launch(q, k, None, cos, sin, eps, None, *weights)
    return launch.settle(q, k, k, cos, sin, *(Slot(weight) for weight in weights))


@cached_by_layout
def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    span: int | None,
    *weights: torch.Tensor,
) -> Launch:
    check_turn_inputs(q, k, cos, sin, weights, span, v)
    values = k if v is None else v
    rows = q, k, values, cos, sin, *weights
    dtypes = q.dtype, k.dtype, values.dtype
    if len(set(dtypes)) > 1 or any(tensor.stride(-1) != 1 for tensor in rows):
        raise ValueError(
            "q, k and v must share one dtype, and every last stride must be 1, got "
            f"{dtypes} and {[tensor.stride() for tensor in rows]}"
        )
    (tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
    half = head_dim // 2
    heads_pad, half_pad = map(triton.next_power_of_2, (heads, half))
    return Launch(
        _turn_kernel,
        tokens,
        *q.stride()[:2],
        *k.stride()[:2],
        *values.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        eps,
        H=heads,
        H_KV=kv_heads,
        H_PAD=heads_pad,
        H_KV_PAD=triton.next_power_of_2(kv_heads),
        HALF=half,
        HALF_PAD=half_pad,
        SPAN=span or half,
        HAS_V=v is not None,
        num_warps=max(1, min(_MAX_WARPS, 2 * heads_pad * half_pad // _VALUES_PER_WARP)),
    )

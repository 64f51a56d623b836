# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of q and k in one launch, straight from the projection's views.

It replaces the copy of q and k out of the projection (a `cat` in Qwen2-VL) and the
rotary kernel after it: q and k are read once and written once. All (head, pair) items
of all tokens are one flat range cut into blocks, so no lane idles for head dims whose
half is no power of two (36 for D=72, 40 for D=80).

Numerics: fp32 arithmetic without fused multiply-add, one rounding at the end; bit for
bit what `kernels/rope_ref.py` returns.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout, nothing
from vllm_flashinfer_vit.kernels._triton import stride_unit
from vllm_flashinfer_vit.kernels.formats import check_rope_inputs

_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "stride_qt",
        "stride_qh",
        "stride_kt",
        "stride_kh",
        "stride_ct",
        "stride_st",
    ]
)
def _rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    num_tokens,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_ct,
    stride_st,
    UNIT: tl.constexpr,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D_UNITS: tl.constexpr,
    HALF_UNITS: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
):
    """Rotate BLOCK_UNITS runs of UNIT pairs of q, and the same pairs of k.

    Strides count UNITs. Grid: (cdiv(num_tokens * H * D_UNITS / 2, BLOCK_UNITS),)
    """
    HEAD: tl.constexpr = D_UNITS // 2  # runs of a head; HALF_UNITS of them are turned
    ROW: tl.constexpr = H * HEAD
    first = tl.program_id(0).to(tl.int64) * BLOCK_UNITS
    item = (first % ROW).to(tl.int32) + tl.arange(0, BLOCK_UNITS)
    offs_t = first // ROW + item // ROW
    offs_h = ((item % ROW) // HEAD).to(tl.int64)
    run = item % HEAD
    mask = (offs_t < num_tokens)[:, None]
    mask_k = mask
    if H_KV < H:
        mask_k = mask & (offs_h < H_KV)[:, None]

    col1 = run
    col2 = run + HALF_UNITS
    mask_c = mask
    if HALF_UNITS < HEAD:
        is_turned = run < HALF_UNITS
        col1 = tl.where(is_turned, run, run + HALF_UNITS)
        col2 = tl.where(is_turned, run + HALF_UNITS, run + HEAD)
        is_turned = is_turned[:, None]
        mask_c = mask & is_turned

    # The last dimension is contiguous by construction: one wide load per run.
    offs_u = tl.arange(0, UNIT)[None]
    offs_c = (offs_t * stride_ct + run)[:, None] * UNIT + offs_u
    offs_s = (offs_t * stride_st + run)[:, None] * UNIT + offs_u
    cos = tl.load(cos_ptr + offs_c, mask=mask_c, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + offs_s, mask=mask_c, other=0.0).to(tl.float32)

    q_row = offs_t * stride_qt + offs_h * stride_qh
    k_row = offs_t * stride_kt + offs_h * stride_kh
    q1 = tl.load(q_ptr + ((q_row + col1)[:, None] * UNIT + offs_u), mask=mask)
    q2 = tl.load(q_ptr + ((q_row + col2)[:, None] * UNIT + offs_u), mask=mask)
    k1 = tl.load(k_ptr + ((k_row + col1)[:, None] * UNIT + offs_u), mask=mask_k)
    k2 = tl.load(k_ptr + ((k_row + col2)[:, None] * UNIT + offs_u), mask=mask_k)
    q1_out, q2_out = rotate(q1, q2, cos, sin)
    k1_out, k2_out = rotate(k1, k2, cos, sin)
    if HALF_UNITS < HEAD:
        # Copied as they are: Inf times a sine of 0 would be NaN.
        q1_out = tl.where(is_turned, q1_out, q1)
        q2_out = tl.where(is_turned, q2_out, q2)
        k1_out = tl.where(is_turned, k1_out, k1)
        k2_out = tl.where(is_turned, k2_out, k2)

    q_row = offs_t * (H * D_UNITS) + offs_h * D_UNITS
    k_row = offs_t * (H_KV * D_UNITS) + offs_h * D_UNITS
    tl.store(q_out_ptr + ((q_row + col1)[:, None] * UNIT + offs_u), q1_out, mask=mask)
    tl.store(q_out_ptr + ((q_row + col2)[:, None] * UNIT + offs_u), q2_out, mask=mask)
    tl.store(k_out_ptr + ((k_row + col1)[:, None] * UNIT + offs_u), k1_out, mask=mask_k)
    tl.store(k_out_ptr + ((k_row + col2)[:, None] * UNIT + offs_u), k2_out, mask=mask_k)


@triton.jit
def rotate(x1, x2, cos, sin):
    """Turn the pairs (x1, x2) in fp32; the result has x1's dtype."""
    x1_fp32 = x1.to(tl.float32)
    x2_fp32 = x2.to(tl.float32)
    y1 = x1_fp32 * cos - x2_fp32 * sin
    y2 = x2_fp32 * cos + x1_fp32 * sin
    return y1.to(x1.dtype), y2.to(x2.dtype)


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k: element d of the first half pairs with d of the second half.

    Args:
        q: `[T, H, D]` fp32, fp16 or bf16, D even, D-stride 1, any other strides.
        k: `[T, H_kv, D]` in q's dtype, H_kv <= H, D-stride 1.
        cos: `[T, R / 2]` with even R <= D, any floating dtype. Elements from R on are
            copied. Its last stride should be 1, otherwise it is copied first.
        sin: Like cos.

    Returns:
        Rotated q `[T, H, D]` and k `[T, H_kv, D]`, contiguous; every row is written.

    Raises:
        ValueError: A tensor breaks a demand above.
    """
    launch, turned = prepare(q, k, cos, sin)
    launch()
    return turned


def prepare(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[Callable[[], object], tuple[torch.Tensor, torch.Tensor]]:
    """Settle `rope` for what q and k will hold.

    Args:
        q: As for `rope`, like the other arguments.
        k: See `q`.
        cos: See `q`; a copy that it needs is made now.
        sin: Like cos.

    Returns:
        The call, for the current stream; and q and k as every call writes them.

    Raises:
        ValueError: As `rope`.
    """
    if cos.stride()[-1] != 1:
        cos = cos.contiguous()
    if sin.stride()[-1] != 1:
        sin = sin.contiguous()
    launch = _launch(q, k, cos, sin)
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    turned = q_out, k_out
    if q.numel() == 0:
        return nothing, turned
    return launch.settle(q, k, cos, sin, q_out, k_out), turned


@cached_by_layout
def _launch(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Launch:
    _check_inputs(q, k, cos, sin)
    num_tokens, heads, head_dim = q.shape
    half = cos.shape[1]
    strides = (*q.stride()[:2], *k.stride()[:2], cos.stride(0), sin.stride(0))
    unit = stride_unit(head_dim // 2, half, *strides)
    block_units = _BLOCK // unit
    runs = num_tokens * heads * (head_dim // 2 // unit)
    return Launch(
        _rope_kernel,
        triton.cdiv(runs, block_units),
        num_tokens,
        *(stride // unit for stride in strides),
        UNIT=unit,
        H=heads,
        H_KV=k.shape[1],
        D_UNITS=head_dim // unit,
        HALF_UNITS=half // unit,
        BLOCK_UNITS=block_units,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )


def _check_inputs(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    check_rope_inputs(q, k, cos, sin)
    if k.shape[1] > q.shape[1] or k.dtype != q.dtype or q.shape[2] % 2 != 0:
        raise ValueError(
            "k needs q's dtype and at most its heads, and an even head dim, got "
            f"q {tuple(q.shape)} {q.dtype} and k {tuple(k.shape)} {k.dtype}"
        )
    if q.stride(2) != 1 or k.stride(2) != 1:
        raise ValueError(
            f"q and k need D-stride 1, got strides {q.stride()} and {k.stride()}"
        )

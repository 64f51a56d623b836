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
from vllm_flashinfer_vit.kernels._triton import load_interleaved, load_runs, pair_units
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
    UNIT_X: tl.constexpr,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D_UNITS: tl.constexpr,
    HALF_UNITS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
):
    """Rotate BLOCK_UNITS runs of UNIT pairs of q, and the same pairs of k.

    Strides of q and k count UNIT_Xs, those of cos and sin UNITs.
    Grid: (cdiv(num_tokens * H * D_UNITS / 2, BLOCK_UNITS),)
    """
    HEAD: tl.constexpr = D_UNITS // 2  # runs of a head; HALF_UNITS of them are turned
    ROW: tl.constexpr = H * HEAD
    first = tl.program_id(0).to(tl.int64) * BLOCK_UNITS
    item = (first % ROW).to(tl.int32) + tl.arange(0, BLOCK_UNITS)
    offs_t = first // ROW + item // ROW
    offs_h = ((item % ROW) // HEAD).to(tl.int64)
    run = item % HEAD
    mask = offs_t < num_tokens
    mask_k = mask
    if H_KV < H:
        mask_k = mask & (offs_h < H_KV)

    col1 = run
    col2 = run + HALF_UNITS
    mask_c = mask
    if HALF_UNITS < HEAD:
        is_turned = run < HALF_UNITS
        col1 = tl.where(is_turned, run, run + HALF_UNITS)
        col2 = tl.where(is_turned, run + HALF_UNITS, run + HEAD)
        mask_c = mask & is_turned
        is_turned = is_turned[:, None]

    # The last dimension is contiguous by construction: one wide load per run.
    cos = load_runs(cos_ptr, offs_t * stride_ct + run, mask_c, UNIT, UNIT)
    sin = load_runs(sin_ptr, offs_t * stride_st + run, mask_c, UNIT, UNIT)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)

    q_row = offs_t * stride_qt + offs_h * stride_qh
    k_row = offs_t * stride_kt + offs_h * stride_kh
    if INTERLEAVED:
        q1, q2 = load_interleaved(q_ptr, q_row, run, mask, UNIT, UNIT_X)
        k1, k2 = load_interleaved(k_ptr, k_row, run, mask_k, UNIT, UNIT_X)
    else:
        q1 = load_runs(q_ptr, q_row + col1, mask, UNIT, UNIT)
        q2 = load_runs(q_ptr, q_row + col2, mask, UNIT, UNIT)
        k1 = load_runs(k_ptr, k_row + col1, mask_k, UNIT, UNIT)
        k2 = load_runs(k_ptr, k_row + col2, mask_k, UNIT, UNIT)
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
    _store_runs(q_out_ptr, q_row + col1, mask, UNIT, q1_out)
    _store_runs(q_out_ptr, q_row + col2, mask, UNIT, q2_out)
    _store_runs(k_out_ptr, k_row + col1, mask_k, UNIT, k1_out)
    _store_runs(k_out_ptr, k_row + col2, mask_k, UNIT, k2_out)


@triton.jit
def _store_runs(base, at, mask, UNIT: tl.constexpr, value):
    offs = at[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    tl.store(base + offs, value, mask=mask[:, None])


@triton.jit
def rotate(x1, x2, cos, sin):
    """Turn the pairs (x1, x2) in fp32; the result has x1's dtype."""
    x1_fp32 = x1.to(tl.float32)
    x2_fp32 = x2.to(tl.float32)
    y1 = x1_fp32 * cos - x2_fp32 * sin
    y2 = x2_fp32 * cos + x1_fp32 * sin
    return y1.to(x1.dtype), y2.to(x2.dtype)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k: element d of the first half pairs with d of the second half.

    Args:
        q: `[T, H, D]` fp32, fp16 or bf16, D even, D-stride 1, any other strides.
        k: `[T, H_kv, D]` in q's dtype, H_kv <= H, D-stride 1.
        cos: `[T, R / 2]` with even R <= D, any floating dtype. Elements from R on are
            copied. Its last stride should be 1, otherwise it is copied first.
        sin: Like cos.
        interleaved: Whether elements 2 d and 2 d + 1 are a pair instead.

    Returns:
        Rotated q `[T, H, D]` and k `[T, H_kv, D]`, contiguous; every row is written.
        Interleaved pairs are halves in them, the first elements and then the second
        ones, of what is turned and of the rest; scores do not see it.

    Raises:
        ValueError: A tensor breaks a demand above.
    """
    launch, turned = prepare(q, k, cos, sin, interleaved)
    launch()
    return turned


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
) -> tuple[Callable[[], object], tuple[torch.Tensor, torch.Tensor]]:
    """Settle `rope` for what q and k will hold.

    Args:
        q: As for `rope`, like the other arguments.
        k: See `q`.
        cos: See `q`; a copy that it needs is made now.
        sin: Like cos.
        interleaved: See `q`.

    Returns:
        The call, for the current stream; and q and k as every call writes them.

    Raises:
        ValueError: As `rope`.
    """
    if cos.stride()[-1] != 1:
        cos = cos.contiguous()
    if sin.stride()[-1] != 1:
        sin = sin.contiguous()
    launch = _launch(q, k, cos, sin, interleaved)
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    turned = q_out, k_out
    if q.numel() == 0:
        return nothing, turned
    return launch.settle(q, k, cos, sin, q_out, k_out), turned


@cached_by_layout
def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> Launch:
    _check_inputs(q, k, cos, sin)
    num_tokens, heads, head_dim = q.shape
    half = cos.shape[1]
    strides = (*q.stride()[:2], *k.stride()[:2])
    angle_strides = cos.stride(0), sin.stride(0)
    halves = head_dim // 2, half
    unit, unit_x = pair_units(interleaved, halves, strides, angle_strides)
    block_units = _BLOCK // unit
    runs = num_tokens * heads * (head_dim // 2 // unit)
    return Launch(
        _rope_kernel,
        triton.cdiv(runs, block_units),
        num_tokens,
        *(stride // unit_x for stride in strides),
        *(stride // unit for stride in angle_strides),
        UNIT=unit,
        UNIT_X=unit_x,
        H=heads,
        H_KV=k.shape[1],
        D_UNITS=head_dim // unit,
        HALF_UNITS=half // unit,
        INTERLEAVED=interleaved,
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

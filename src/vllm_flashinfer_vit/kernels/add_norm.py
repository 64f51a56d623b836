# SPDX-License-Identifier: Apache-2.0
"""Residual sums and the norm after them, in one pass over the rows.

It replaces additions and a norm of their own. The sum after a block's attention is not
written, only its norm; after the MLP all three terms are added at once, so that the
residual stream is rounded once in a block, not twice, for the same reads and writes.

Numerics: fp32 throughout. A sum that is kept is rounded once; its norm is of the sum
before it is rounded. In e4m3 the norm is rounded once, too, by scales as vLLM's kernels
have them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._launch import Launch, Slot, cached_by_layout
from vllm_flashinfer_vit.kernels._row_scales import quantize, row_scale
from vllm_flashinfer_vit.kernels._rows import MAX_WIDTH, VALUES, warps_of
from vllm_flashinfer_vit.kernels.formats import (
    MIN_ROW_SCALE,
    Bound,
    check_bound,
    check_number_of_terms,
    check_row_scales,
    check_sum_norm_inputs,
)

_MIN_ROW_SCALE = tl.constexpr(MIN_ROW_SCALE)
# Of a thread, where a row has one scale: 32768 rows of 1280 with a bound take an H200
# 64 us with two warps, 79 us with four. In 16 bits both take the same.
_SCALED_VALUES = 32


@triton.jit
def _sum_norm_kernel(
    x_ptr,
    first_ptr,
    second_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    norm_ptr,
    scales_ptr,
    scale1_ptr,
    scale2_ptr,
    factors_ptr,
    next_scales_ptr,
    eps,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP_SUM: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_LAYER_SCALES: tl.constexpr,
    HAS_BOUND: tl.constexpr,
):
    """Add and normalize one row of C values. Grid: (rows,)"""
    row = tl.program_id(0).to(tl.int64) * C
    offs_c = tl.arange(0, C_PAD)
    mask_c = offs_c < C
    total = tl.load(x_ptr + row + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    first = tl.load(first_ptr + row + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    if HAS_LAYER_SCALES:
        first *= tl.load(scale1_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    total += first
    if HAS_SECOND:
        second = tl.load(second_ptr + row + offs_c, mask=mask_c, other=0.0)
        second = second.to(tl.float32)
        if HAS_LAYER_SCALES:
            scale2 = tl.load(scale2_ptr + offs_c, mask=mask_c, other=0.0)
            second *= scale2.to(tl.float32)
        total += second
    weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    if KEEP_SUM:
        tl.store(sum_ptr + row + offs_c, total.to(x_ptr.dtype.element_ty), mask=mask_c)
    centred = total
    if HAS_BIAS:
        centred = tl.where(mask_c, total - tl.sum(total, axis=0) / C, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / C + eps) * weight
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0)
        normed += bias.to(tl.float32)
    if HAS_BOUND:
        norm = tl.sqrt(tl.sum(normed * normed, axis=0))
        bound = norm * tl.load(factors_ptr) + tl.load(factors_ptr + 1)
        bound = tl.maximum(bound, _MIN_ROW_SCALE)
        tl.store(next_scales_ptr + tl.program_id(0).to(tl.int64), bound)
    if SCALES == "none":
        found = normed.to(x_ptr.dtype.element_ty)
    else:
        scale = row_scale(tl.max(tl.abs(normed), axis=0), scales_ptr, SCALES)
        found = quantize(normed, scale, scales_ptr, 0, C_PAD, C, SCALES)
    tl.store(norm_ptr + row + offs_c, found, mask=mask_c)


def sum_norm(
    terms: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    keep_sum: bool,
    scales: torch.Tensor | None = None,
    layer_scales: Sequence[torch.Tensor] = (),
    bound: Bound | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Add branches to the residual stream, and normalize the sum.

    Args:
        terms: The stream and one or two branches, `[..., C]` fp32, fp16 or bf16 of one
            shape and dtype, contiguous, C up to `MAX_WIDTH`.
        weight: `[C]`, any floating dtype, contiguous.
        bias: Like weight for a LayerNorm, None for an RMSNorm.
        eps: Added to the variance, or to the mean square.
        keep_sum: Whether the sum is wanted.
        scales: For a norm in e4m3, `x ~ rows * scales`: fp32, one for all rows, which
            is read, or `[T, 1]` or, in contiguous columns, `[T, num_groups(C)]`, which
            is written.
        layer_scales: `[C]` for each branch, which is multiplied by it, any floating
            dtype, contiguous; or none.
        bound: Scales of the rows that an activation makes of the norm, which are
            written by the norm before it is rounded; or None.

    Returns:
        The sum or None, and its norm, like the terms or in e4m3; every row is written.

    Raises:
        ValueError: A tensor breaks a demand above.
    """
    check_number_of_terms(terms)
    x, first, second = (*terms, terms[1])[:3]
    dtype = x.dtype if scales is None else torch.float8_e4m3fn
    normed = torch.empty_like(x, dtype=dtype)
    count = len(terms)
    launch = _launch(
        x,
        first,
        second,
        count,
        weight,
        bias,
        eps,
        keep_sum,
        normed,
        scales,
        None if bound is None else bound.factors,
        None if bound is None else bound.scales,
        *layer_scales,
    )
    total = torch.empty_like(x) if keep_sum else None
    if x.numel() > 0:
        unused = normed
        launch(
            x,
            first,
            second,
            weight,
            weight if bias is None else bias,
            unused if total is None else total,
            normed,
            unused if scales is None else scales,
            *_both(layer_scales, unused),
            *((unused, unused) if bound is None else bound),
        )
    return total, normed


def prepare(
    x: torch.Tensor,
    branches: tuple[torch.Tensor, ...],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    normed: torch.Tensor,
    scales: torch.Tensor | None = None,
    layer_scales: Sequence[torch.Tensor] = (),
    bound: Bound | None = None,
) -> Callable[..., None]:
    """Settle `sum_norm` for streams that look like this one.

    Args:
        x: A stream, `[T, ..., C]`, T above 0.
        branches: What is added to it, one tensor or two like those to come, each of T
            rows of C values. The sum with two is kept.
        weight: As for `sum_norm`, like the other arguments.
        bias: See `weight`.
        eps: See `weight`.
        normed: `[T, C]`, what each call writes the norm to. It may be the last branch;
            with `scales` it is in e4m3.
        scales: As for `sum_norm`, like those to come.
        layer_scales: As for `sum_norm`, like those to come.
        bound: As for `sum_norm`. Calls write to its scales.

    Returns:
        A call, for the current stream, of the stream, both branches (one twice),
        weight, bias, what to write the sum to, and scales, layer scales and the bound's
        factors, if they were given here. Without a bias or a sum any tensor may stand
        for it. All are contiguous, and start at a multiple of 16 bytes.

    Raises:
        ValueError: As `sum_norm`.
    """
    count = 1 + len(branches)
    terms = (x, *branches, branches[-1])[:3]
    like = [term.view(normed.shape) for term in terms]
    factors, next_scales = (None, None) if bound is None else bound
    launch = _launch(
        *like,
        count,
        weight,
        bias,
        eps,
        count == 3,
        normed,
        scales,
        factors,
        next_scales,
        *layer_scales,
    )
    given = *terms, weight, weight if bias is None else bias, x
    last = normed if scales is None else Slot(scales)
    scaled = _both([Slot(scale) for scale in layer_scales], normed)
    bounds: tuple[Any, Any] = (normed, normed)
    if bound is not None:
        bounds = Slot(bound.factors), bound.scales
    return launch.settle(*map(Slot, given), normed, last, *scaled, *bounds)


def _both(layer_scales: Sequence[Any], unused: torch.Tensor) -> tuple[Any, Any]:
    """Return what the kernel gets for two layer scales, of which it may read fewer."""
    return (*layer_scales, unused, unused)[:2]


@cached_by_layout
def _launch(
    x: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    num_terms: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    keep_sum: bool,
    normed: torch.Tensor,
    scales: torch.Tensor | None,
    factors: torch.Tensor | None,
    next_scales: torch.Tensor | None,
    *layer_scales: torch.Tensor,
) -> Launch:
    terms = (x, first, second)[:num_terms]
    check_sum_norm_inputs(terms, weight, bias, layer_scales)
    given = *terms, weight, weight if bias is None else bias, *layer_scales
    if not all(tensor.is_contiguous() for tensor in given):
        raise ValueError("terms, weight, bias and layer scales must be contiguous")
    width = x.shape[-1]
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(f"rows must have 1 to {MAX_WIDTH} values, got {width}")
    width_pad = triton.next_power_of_2(width)
    form = "none"
    if scales is not None:
        form = check_row_scales(normed, scales)
    elif normed.dtype != x.dtype:
        raise ValueError(f"the norm must be {x.dtype} like x, got {normed.dtype}")
    if factors is not None and next_scales is not None:
        check_bound(Bound(factors, next_scales), x.numel() // width)
    # Scales of groups would spill registers.
    is_scaled = form in ("one", "own")
    return Launch(
        _sum_norm_kernel,
        x.numel() // width,
        eps,
        C=width,
        C_PAD=width_pad,
        HAS_SECOND=num_terms == 3,
        HAS_BIAS=bias is not None,
        KEEP_SUM=keep_sum,
        SCALES=form,
        HAS_LAYER_SCALES=bool(layer_scales),
        HAS_BOUND=factors is not None,
        num_warps=warps_of(width_pad, _SCALED_VALUES if is_scaled else VALUES),
    )

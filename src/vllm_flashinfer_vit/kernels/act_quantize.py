# SPDX-License-Identifier: Apache-2.0
"""An MLP's activation, and the quantising of its rows for a GEMM in FP8, in one pass.

It adds the first layer's bias, too, and writes the zeros that the second layer's
padding meets: vLLM runs activation, padding and quantising as three kernels. Without an
activation it only quantises rows, such as attention's output.

Numerics: fp32 throughout, rounded once, to e4m3.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._launch import Launch, Slot, cached_by_layout
from vllm_flashinfer_vit.kernels._row_scales import quantize, row_scale
from vllm_flashinfer_vit.kernels._rows import MAX_WIDTH, VALUES, warps_of
from vllm_flashinfer_vit.kernels._sigmoid import (
    LOG2_E,
    gelu_tanh,
    over_one_plus_exp2,
)
from vllm_flashinfer_vit.kernels.formats import GROUP, Activation, check_row_scales

# Parts of a row, each of a power of two: 4304 columns fill 4096 and 256, where one part
# would hold 8192, and the arithmetic of those that count for nothing would take longer
# than the row's bytes.
_PARTS = 3
# Of a thread, where nothing is computed: 32768 rows of 3420 take an H200 82 us with one
# warp, 99 us with four.
_PLAIN_VALUES = 64
_SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def _activated(
    row_ptr,
    bias_ptr,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Return a part of a row's activation in fp32, 0 beyond the row's end."""
    offs = START + tl.arange(0, SIZE)
    mask = offs < WIDTH
    x = tl.load(row_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "swiglu":
        up = tl.load(row_ptr + WIDTH + offs, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            up += tl.load(bias_ptr + WIDTH + offs, mask=mask, other=0.0).to(tl.float32)
        y = x * over_one_plus_exp2(x * -LOG2_E) * up
    elif ACTIVATION == "quick_gelu":
        y = x * over_one_plus_exp2(x * (-1.702 * LOG2_E))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif ACTIVATION == "none":
        y = x
    else:
        tl.static_assert(ACTIVATION == "tanh_gelu")
        y = gelu_tanh(x)
    return y


@triton.jit
def _act_quantize_kernel(
    values_ptr,
    bias_ptr,
    rows_ptr,
    scales_ptr,
    stride_v,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    SIZE_A: tl.constexpr,
    SIZE_B: tl.constexpr,
    SIZE_C: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Apply the activation to one row, in parts, and quantise it. Grid: (rows,)"""
    row = tl.program_id(0).to(tl.int64)
    at = values_ptr + row * stride_v
    B: tl.constexpr = SIZE_A
    C: tl.constexpr = SIZE_A + SIZE_B
    a = _activated(at, bias_ptr, 0, SIZE_A, WIDTH, ACTIVATION, HAS_BIAS)
    largest = tl.max(tl.abs(a), axis=0)
    if SIZE_B > 0:
        b = _activated(at, bias_ptr, B, SIZE_B, WIDTH, ACTIVATION, HAS_BIAS)
        largest = tl.maximum(largest, tl.max(tl.abs(b), axis=0))
    if SIZE_C > 0:
        c = _activated(at, bias_ptr, C, SIZE_C, WIDTH, ACTIVATION, HAS_BIAS)
        largest = tl.maximum(largest, tl.max(tl.abs(c), axis=0))
    scale = row_scale(largest, scales_ptr, SCALES)
    to = rows_ptr + row * ROW
    offs_a = tl.arange(0, SIZE_A)
    a = quantize(a, scale, scales_ptr, 0, SIZE_A, ROW, SCALES)
    tl.store(to + offs_a, a, mask=offs_a < ROW)
    if SIZE_B > 0:
        offs_b = B + tl.arange(0, SIZE_B)
        b = quantize(b, scale, scales_ptr, B, SIZE_B, ROW, SCALES)
        tl.store(to + offs_b, b, mask=offs_b < ROW)
    if SIZE_C > 0:
        offs_c = C + tl.arange(0, SIZE_C)
        c = quantize(c, scale, scales_ptr, C, SIZE_C, ROW, SCALES)
        tl.store(to + offs_c, c, mask=offs_c < ROW)


def act_quantize(
    values: torch.Tensor,
    width: int,
    bias: torch.Tensor | None,
    activation: Activation | None,
    rows: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Add a bias, apply an activation, quantise: `act(values + bias) ~ rows * scales`.

    Args:
        values: `[T, W]` fp32, fp16 or bf16, rows of any stride: `width` columns, twice
            as many of [gate; up] for `swiglu`; what is after them is not read.
        width: Columns that the activation returns, up to `MAX_WIDTH`.
        bias: As many as columns that are read, contiguous, or None.
        activation: What is computed; None for the values as they are.
        rows: `[T, Wp]` e4m3, contiguous, Wp from `width` on; written, with zeros from
            column `width` on.
        scales: fp32: one for all rows, which is read, or `[T, 1]` or, in contiguous
            columns, `[T, num_groups(Wp)]`, which is written.

    Raises:
        ValueError: A tensor breaks a demand above.
    """
    launch = _launch(values, width, bias, activation, rows, scales)
    if len(values):
        launch(values, values if bias is None else bias, rows, scales)


def prepare(
    values: torch.Tensor,
    width: int,
    bias: torch.Tensor | None,
    activation: Activation | None,
    rows: torch.Tensor,
    scales: torch.Tensor,
) -> Callable[[torch.Tensor | None, torch.Tensor], None]:
    """Settle `act_quantize` for values and rows that stay where they are.

    Args:
        values: As for `act_quantize`, T above 0. Calls read what it holds by then.
        width: As for `act_quantize`, like the other arguments.
        bias: See `width`.
        activation: See `width`.
        rows: See `width`.
        scales: See `width`.

    Returns:
        A call, for the current stream, of a bias and scales like these, which start at
        a multiple of 16 bytes.

    Raises:
        ValueError: As `act_quantize`.
    """
    launch = _launch(values, width, bias, activation, rows, scales)
    given = Slot(values if bias is None else bias)
    settled = launch.settle(values, given, rows, Slot(scales))
    return functools.partial(_run, settled, values)


def _run(
    settled: Callable[..., None],
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor,
) -> None:
    # Of a bias that is not there nothing is read.
    settled(values if bias is None else bias, scales)


@cached_by_layout
def _launch(
    values: torch.Tensor,
    width: int,
    bias: torch.Tensor | None,
    activation: Activation | None,
    rows: torch.Tensor,
    scales: torch.Tensor,
) -> Launch:
    read = 2 * width if activation == "swiglu" else width
    if values.dim() != 2 or values.shape[1] < read or values.stride(1) != 1:
        raise ValueError(
            f"values must be [T, {read} or more] with contiguous columns, got "
            f"{tuple(values.shape)} with strides {values.stride()}"
        )
    if bias is not None and (tuple(bias.shape) != (read,) or not bias.is_contiguous()):
        raise ValueError(
            f"the bias must be [{read}] and contiguous, got {tuple(bias.shape)} with "
            f"strides {bias.stride()}"
        )
    if (
        rows.dim() != 2
        or len(rows) != len(values)
        or not rows.is_contiguous()
        or not 0 < width <= rows.shape[1] <= MAX_WIDTH
    ):
        raise ValueError(
            f"rows must be [{len(values)}, {width} to {MAX_WIDTH}], contiguous and not "
            f"empty, got {tuple(rows.shape)} with strides {rows.stride()}"
        )
    form = check_row_scales(rows, scales)
    # No group is in two parts.
    unit = GROUP if form == "groups" else 1
    sizes = [*(unit * part for part in parts_of(-(-rows.shape[1] // unit))), 0, 0]
    return Launch(
        _act_quantize_kernel,
        len(values),
        values.stride(0),
        WIDTH=width,
        ROW=rows.shape[1],
        SIZE_A=sizes[0],
        SIZE_B=sizes[1],
        SIZE_C=sizes[2],
        ACTIVATION=activation or "none",
        HAS_BIAS=bias is not None,
        SCALES=form,
        num_warps=warps_of(sizes[0], VALUES if activation else _PLAIN_VALUES),
    )


def parts_of(columns: int, most: int = _PARTS) -> list[int]:
    """Return the parts that hold a row, powers of two: few, and little more than it."""
    whole = triton.next_power_of_2(columns)
    if most > 1:
        parts = [whole // 2, *parts_of(columns - whole // 2, most - 1)]
        if sum(parts) < whole:
            return parts
    return [whole]

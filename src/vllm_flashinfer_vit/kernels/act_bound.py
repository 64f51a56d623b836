# SPDX-License-Identifier: Apache-2.0
"""What bounds the outputs of first layers in e4m3, for all blocks of a tower at once.

It reads each weight once, in each pass: whoever loads weights anew, in place or
elsewhere, need tell nobody. See `blocks.act_bound` for what it is for.

Numerics: fp32 throughout; maxima, so that the order of programs does not matter.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout
from vllm_flashinfer_vit.kernels.formats import E4M3_MAX, ROUNDED

# Rows of a weight that a program reads, and columns at once: 16 bytes a thread.
_ROWS = 16
_COLUMNS = 128
_NUM_WARPS = 4

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_ROUNDED = tl.constexpr(ROUNDED)


@triton.jit(do_not_specialize=["N"])
def _factors_kernel(
    table_ptr,
    factors_ptr,
    N,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Bound the outputs of ROWS rows of one layer. Grid: (layers * cdiv(N, ROWS),)

    BIAS is the dtype of the biases, or None; without HAS_SCALES a weight has one.
    """
    parts = tl.cdiv(N, ROWS)
    layer = tl.program_id(0) // parts
    entry = table_ptr + layer * 4
    place = tl.load(entry + 3)
    weight_ptr = tl.load(entry).to(tl.pointer_type(tl.uint8))
    scale_ptr = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    rows = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    is_row = rows < N
    at = weight_ptr + rows.to(tl.int64)[:, None] * K
    total = tl.zeros([ROWS], tl.float32)
    for first in tl.static_range(0, K, COLUMNS):
        offs = first + tl.arange(0, COLUMNS)
        mask = is_row[:, None] & (offs < K)[None, :]
        # Rows begin at whole loads, of which an address in a table says nothing.
        ptrs = tl.multiple_of(at + offs[None, :], (1, 16))
        codes = tl.load(ptrs, mask=mask, other=0)
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        total += tl.sum(values * values, axis=1)
    scale = tl.load(scale_ptr + (rows if HAS_SCALES else rows * 0), mask=is_row)
    slope = tl.max(tl.where(is_row, tl.sqrt(total) * scale, 0.0), axis=0)
    tl.atomic_max(factors_ptr + place * 4, slope * (_ROUNDED / _E4M3_MAX))
    if BIAS is not None:
        bias_ptr = tl.load(entry + 2).to(tl.pointer_type(BIAS))
        bias = tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(bias), axis=0)
        tl.atomic_max(factors_ptr + place * 4 + 1, largest / _E4M3_MAX)


def prepare(
    table: torch.Tensor,
    factors: torch.Tensor,
    outputs: int,
    inputs: int,
    bias: torch.dtype | None,
    has_scales: bool,
) -> Callable[[], None]:
    """Settle the factors of layers that are alike; see `Bound`.

    Args:
        table: `[layers, 4]` int64, contiguous: where a layer's weight `[outputs,
            inputs]` in e4m3, the scales of its outputs in fp32 and its bias are, all of
            them contiguous, and which row of `factors` is its own. Read by each call.
        factors: `[..., 4]` fp32, contiguous, of which two are used. Rows must be 0
            before a call.
        outputs: Without padding.
        inputs: With padding.
        bias: The biases' dtype, of 16 bits, or None without biases.
        has_scales: Whether each output has a scale, not each weight one.

    Returns:
        A call, for the current stream, that writes the layers' rows of `factors`.
    """
    launch = _launch(table, factors, outputs, inputs, bias, has_scales)
    return launch.settle(table, factors)


@cached_by_layout
def _launch(
    table: torch.Tensor,
    factors: torch.Tensor,
    outputs: int,
    inputs: int,
    bias: torch.dtype | None,
    has_scales: bool,
) -> Launch:
    names = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, None: None}
    return Launch(
        _factors_kernel,
        len(table) * triton.cdiv(outputs, _ROWS),
        outputs,
        K=inputs,
        BIAS=names[bias],
        HAS_SCALES=has_scales,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_NUM_WARPS,
    )

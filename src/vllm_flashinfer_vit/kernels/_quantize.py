# SPDX-License-Identifier: Apache-2.0
"""What the kernels share that read heads of q, k and v to quantise them.

A head of BLOCK rows is cut into runs of UNIT pairs: the two elements that the rotary
embedding turns together, and for the columns that it leaves, those half of them apart,
or side by side where all pairs are. They are stored side by side, so that a run is
contiguous there.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._pairs import (
    finite,
    larger,
    pairs_to_e4m3,
    rotate_finite,
    to_e4m3,
)
from vllm_flashinfer_vit.kernels._triton import (
    check_qkv,
    load_interleaved,
    load_runs,
    pair_units,
    split_width,
)
from vllm_flashinfer_vit.kernels.formats import BLOCK, FP32_TINY, check_rope_inputs

# Offsets within a block of 128 rows are int32.
_MAX_STRIDE = 1 << 24

# Of a program of 16 warps.
_MAX_THREADS = tl.constexpr(512)
_FP32_TINY = tl.constexpr(FP32_TINY)


@triton.jit
def head_items(D: tl.constexpr, UNIT: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr):
    """Cut a head of BLOCK rows into runs of UNIT pairs: LO and HI runs, in two tiles.

    One range over rows and runs leaves no lane idle where a half is no power of two (36
    for D=72). Returns the rows and the runs of both tiles.
    """
    HEAD: tl.constexpr = D // 2 // UNIT
    item = tl.arange(0, LO)
    if HI > 0:
        item_hi = LO + tl.arange(0, HI)
        return item // HEAD, item % HEAD, item_hi // HEAD, item_hi % HEAD
    else:
        return item // HEAD, item % HEAD, item // HEAD, item % HEAD


@triton.jit
def load_pairs(
    base,
    stride_t,
    rows,
    items,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_X: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HI: tl.constexpr,
):
    """Load the first `rows` rows of a head: both elements of all pairs, others 0."""
    row, run, row_hi, run_hi = items
    HEAD: tl.constexpr = D // 2 // UNIT
    x1, x2 = _load_pairs(
        base, stride_t, rows, row, run, HEAD, TURNED, UNIT, UNIT_X, INTERLEAVED
    )
    if HI > 0:
        x1_hi, x2_hi = _load_pairs(
            base,
            stride_t,
            rows,
            row_hi,
            run_hi,
            HEAD,
            TURNED,
            UNIT,
            UNIT_X,
            INTERLEAVED,
        )
        return x1, x2, x1_hi, x2_hi
    else:
        return x1, x2, x1, x2


@triton.jit
def _load_pairs(
    base,
    stride_t,
    rows,
    row,
    run,
    HEAD: tl.constexpr,
    TURNED: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_X: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    if INTERLEAVED:
        return load_interleaved(base, row * stride_t, run, row < rows, UNIT, UNIT_X)
    at1 = row * stride_t + run
    at2 = at1
    # The second element mostly lies a constant after the first: one address for both.
    APART: tl.constexpr = HEAD * UNIT if TURNED == 0 or TURNED == HEAD else 0
    if APART == 0:
        at1 += tl.where(run < TURNED, 0, TURNED)
        at2 += tl.where(run < TURNED, TURNED, HEAD)
    x1 = load_runs(base, at1, row < rows, UNIT, UNIT)
    x2 = load_runs(base + APART, at2, row < rows, UNIT, UNIT)
    return x1, x2


@triton.jit
def load_angles(
    cos_base,
    sin_base,
    stride_ct,
    stride_st,
    rows,
    items,
    TURNED: tl.constexpr,
    UNIT: tl.constexpr,
    HI: tl.constexpr,
):
    """Load the angles of what `load_pairs` loads, as cos, sin, cos_hi, sin_hi."""
    row, run, row_hi, run_hi = items
    mask = (row < rows) & (run < TURNED)
    cos = load_runs(cos_base, row * stride_ct + run, mask, UNIT, UNIT)
    sin = load_runs(sin_base, row * stride_st + run, mask, UNIT, UNIT)
    if HI > 0:
        mask = (row_hi < rows) & (run_hi < TURNED)
        cos_hi = load_runs(cos_base, row_hi * stride_ct + run_hi, mask, UNIT, UNIT)
        sin_hi = load_runs(sin_base, row_hi * stride_st + run_hi, mask, UNIT, UNIT)
        return cos, sin, cos_hi, sin_hi
    else:
        return cos, sin, cos, sin


@triton.jit
def load_columns_in_order(
    base,
    stride_t,
    rows,
    items,
    UNIT: tl.constexpr,
    UNIT_X: tl.constexpr,
    HI: tl.constexpr,
):
    """Load runs of 2 * UNIT columns of the rows; returns both tiles by `finite`."""
    row, run, row_hi, run_hi = items
    STEP: tl.constexpr = 2 * UNIT // UNIT_X
    at = row * stride_t + run * STEP
    lo = finite(load_runs(base, at, row < rows, UNIT_X, 2 * UNIT))
    if HI > 0:
        at = row_hi * stride_t + run_hi * STEP
        return lo, finite(load_runs(base, at, row_hi < rows, UNIT_X, 2 * UNIT))
    else:
        return lo, lo


@triton.jit
def turn_pairs(
    pairs,
    angles,
    items,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    UNIT: tl.constexpr,
    HI: tl.constexpr,
):
    """Turn what `load_pairs` loaded; returns all four tiles as `finite` does."""
    x1, x2, x1_hi, x2_hi = pairs
    cos, sin, cos_hi, sin_hi = angles
    _, run, _, run_hi = items
    y1, y2 = _turn(x1, x2, cos, sin, run, D // 2 // UNIT, TURNED)
    if HI > 0:
        y1_hi, y2_hi = _turn(
            x1_hi, x2_hi, cos_hi, sin_hi, run_hi, D // 2 // UNIT, TURNED
        )
        return y1, y2, y1_hi, y2_hi
    else:
        return y1, y2, y1, y2


@triton.jit
def _turn(x1, x2, cos, sin, run, HEAD: tl.constexpr, TURNED: tl.constexpr):
    if TURNED == HEAD:
        y1, y2 = rotate_finite(x1, x2, cos, sin)
    else:
        y1, y2 = finite(x1), finite(x2)
        if TURNED > 0:
            # Left as they are: Inf times a sine of 0 would be NaN.
            is_turned = (run < TURNED)[:, None]
            turned1, turned2 = rotate_finite(x1, x2, cos, sin)
            y1, y2 = tl.where(is_turned, turned1, y1), tl.where(is_turned, turned2, y2)
    return y1, y2


@triton.jit
def absmax_pairs(pairs, UNIT: tl.constexpr, HAS_HI: tl.constexpr):
    """Return the largest absolute value of what `turn_pairs` returned, NaN for none."""
    x1, x2, x1_hi, x2_hi = pairs
    lo = larger(x1, x2)
    if HAS_HI:
        return absmax_tiles(lo, larger(x1_hi, x2_hi), UNIT, HAS_HI)
    else:
        return absmax_tiles(lo, lo, UNIT, HAS_HI)


@triton.jit
def absmax_tiles(lo, hi, RUN: tl.constexpr, HAS_HI: tl.constexpr):
    """Return the largest absolute value of what `finite` returned, NaN if all are NaN.

    Of both tiles each thread takes what it holds first, in runs of RUN, so that threads
    exchange their values only once.
    """
    ROWS: tl.constexpr = min(_MAX_THREADS, lo.numel, hi.numel)
    top = _absmax_rows(lo, RUN, ROWS)
    if HAS_HI:
        top = tl.max(tl.join(top, _absmax_rows(hi, RUN, ROWS)), axis=1)
    return tl.max(top, axis=0)


@triton.jit
def _absmax_rows(x, RUN: tl.constexpr, ROWS: tl.constexpr):
    """Return ROWS maxima of absolute values, in fp32."""
    COLS: tl.constexpr = min(RUN, x.numel // ROWS)
    # Of packed values Triton would unpack all before the maximum.
    x = tl.abs(tl.reshape(x, [x.numel // COLS, COLS])).to(tl.float32)
    top = tl.max(x, axis=1)
    return tl.max(tl.reshape(top, [x.numel // COLS // ROWS, ROWS]), axis=0)


@triton.jit
def block_scale(amax, MAX: tl.constexpr):
    """Return the scale that takes amax to MAX, a normal number, 1 for NaN and 0."""
    scale = tl.maximum(tl.div_rn(amax, MAX), _FP32_TINY)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def store_pairs(
    base,
    stride_t,
    rows,
    items,
    pairs,
    inverse,
    LIMIT: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HI: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store `rows` rows of a head in e4m3, pairs interleaved, zeros from column D on.

    `stride_t` is even; values are limited to LIMIT, or for None to what e4m3 can hold.
    """
    row, run, row_hi, run_hi = items
    x1, x2, x1_hi, x2_hi = pairs
    lo = pairs_to_e4m3(x1, x2, inverse, LIMIT)
    BYTES: tl.constexpr = lo.dtype.primitive_bitwidth // 8
    base_lo = base.to(tl.pointer_type(lo.dtype))
    _store_runs(base_lo, stride_t // BYTES, rows, row, run, lo)
    if HI > 0:
        hi = pairs_to_e4m3(x1_hi, x2_hi, inverse, LIMIT)
        _store_runs(base_lo, stride_t // BYTES, rows, row_hi, run_hi, hi)
    _store_padding(base, stride_t, rows, D, D_PAD, BLOCK)


@triton.jit
def store_columns_in_order(
    base,
    stride_t,
    rows,
    items,
    lo,
    hi,
    inverse,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HI: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store what `load_columns_in_order` loaded, like `store_pairs`."""
    row, run, row_hi, run_hi = items
    _store_runs(base, stride_t, rows, row, run, to_e4m3(lo, inverse))
    if HI > 0:
        _store_runs(base, stride_t, rows, row_hi, run_hi, to_e4m3(hi, inverse))
    _store_padding(base, stride_t, rows, D, D_PAD, BLOCK)


@triton.jit
def _store_padding(
    base, stride_t, rows, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr
):
    PAD_RUNS: tl.constexpr = (D_PAD - D) // 8
    if PAD_RUNS > 0:
        item = tl.arange(0, triton.next_power_of_2(BLOCK * PAD_RUNS))
        zeros = tl.zeros([item.shape[0], 8], tl.float8e4nv)
        row = item // PAD_RUNS
        _store_runs(base + D, stride_t, rows, row, item % PAD_RUNS, zeros)


@triton.jit
def _store_runs(base, stride_t, rows, row, run, value):
    WIDTH: tl.constexpr = value.shape[1]
    offs = (row * stride_t + run * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    tl.store(base + offs, value, mask=(row < rows)[:, None])


def head_strides(*tensors: torch.Tensor) -> list[int]:
    """Return T- and H-strides."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def angle_strides(cos: torch.Tensor | None, sin: torch.Tensor | None) -> list[int]:
    """Return the T-strides of the rotary tables, zeros without them."""
    return [0 if x is None else x.stride(0) for x in (cos, sin)]


def head_constants(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    *others: torch.Tensor,
) -> dict[str, Any]:
    """Return the constants that a kernel of heads needs, and its options."""
    half = q.shape[2] // 2
    turned = 0 if cos is None else cos.shape[1]
    interleaved = interleaved and turned > 0
    unit, unit_x = pair_units(
        interleaved,
        (half, turned),
        head_strides(q, k, *others),
        angle_strides(cos, sin),
    )
    lo, hi = split_width(BLOCK * (half // unit))
    return {
        "UNIT": unit,
        "UNIT_X": unit_x,
        "H": q.shape[1],
        "H_KV": k.shape[1],
        "D": q.shape[2],
        "TURNED": turned // unit,
        "INTERLEAVED": interleaved,
        "LO": lo,
        "HI": hi,
        "BLOCK": BLOCK,
        # The reference multiplies and adds, with a rounding after each.
        "enable_fp_fusion": False,
    }


def contiguous_columns(angles: torch.Tensor | None) -> torch.Tensor | None:
    """Return a rotary table with a last stride of 1, or None for None."""
    return angles if angles is None or angles.stride(1) == 1 else angles.contiguous()


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the tensors are as `quantize_blocks` says."""
    check_qkv(q, k, v, cu_seqlens)
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin must be given together or not at all")
    if cos is not None and sin is not None:
        check_rope_inputs(q, k, cos, sin)
    tables = [x for x in (cos, sin) if x is not None]
    if any(x.stride(0) >= _MAX_STRIDE for x in (q, k, v, *tables)):
        found = [x.stride() for x in (q, k, v, *tables)]
        raise ValueError(f"T-strides must be below {_MAX_STRIDE}, got {found}")


def check_scales(scales: torch.Tensor) -> None:
    """Raise ValueError unless there is one fp32 scale for each of q, k and v."""
    if (
        scales.shape != (3,)
        or scales.dtype != torch.float32
        or not scales.is_contiguous()
    ):
        raise ValueError(
            "scales must be [3] fp32 and contiguous, got "
            f"{tuple(scales.shape)} {scales.dtype}"
        )

# SPDX-License-Identifier: Apache-2.0
"""What kernels share that write rows for linear layers in e4m3.

One scale is for all rows, or each row, or each group of a row, has its own. FP8
attention's are in `_quantize`.
"""

import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels.formats import (
    E4M3_MAX,
    GROUP,
    MIN_GROUP_SCALE,
    MIN_ROW_SCALE,
)

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_GROUP = tl.constexpr(GROUP)
_MIN_GROUP_SCALE = tl.constexpr(MIN_GROUP_SCALE)
_MIN_ROW_SCALE = tl.constexpr(MIN_ROW_SCALE)


@triton.jit
def row_scale(largest, scales_ptr, SCALES: tl.constexpr):
    """Return the scale of a program's row.

    Args:
        largest: The row's largest absolute value, fp32; not read where one is given.
        scales_ptr: fp32, one (`SCALES` is "one"), or one for each program ("own"),
            which is written. For "groups" it is left to `quantize`.
        SCALES: See `scales_ptr`.
    """
    if SCALES == "own":
        scale = tl.maximum(tl.div_rn(largest, _E4M3_MAX), _MIN_ROW_SCALE)
        tl.store(scales_ptr + tl.program_id(0).to(tl.int64), scale)
    elif SCALES == "groups":
        scale = largest
    else:
        scale = tl.load(scales_ptr)
    return scale


@triton.jit
def quantize(
    values,
    scale,
    scales_ptr,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    ROW: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Return fp32 values of a row in e4m3, by what `row_scale` returned.

    NaN stays NaN: a tower's output shows it, and not a plausible number.

    Args:
        values: `[SIZE]`, the program's row from column START on, 0 beyond its end.
        scale: What `row_scale` returned.
        scales_ptr: For "groups": fp32, `[groups, programs]`, written.
        START: For "groups" a multiple of `GROUP`, like SIZE.
        SIZE: See `values`.
        ROW: Columns of the whole row.
        SCALES: See `row_scale`.
    """
    if SCALES == "groups":
        groups = tl.reshape(values, (SIZE // _GROUP, _GROUP))
        largest = tl.max(tl.abs(groups), axis=1)
        scale = tl.maximum(tl.div_rn(largest, _E4M3_MAX), _MIN_GROUP_SCALE)
        offs = START // _GROUP + tl.arange(0, SIZE // _GROUP)
        at = offs.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        tl.store(scales_ptr + at, scale, mask=offs * _GROUP < ROW)
        scaled = tl.reshape(groups * tl.div_rn(1.0, scale)[:, None], (SIZE,))
    else:
        scaled = values * tl.div_rn(1.0, scale)
    if SCALES == "one":
        # By a scale of its own no value of a row is off by more than it rounds.
        scaled = tl.clamp(scaled, -_E4M3_MAX, _E4M3_MAX, tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv)

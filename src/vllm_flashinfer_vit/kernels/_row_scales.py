# SPDX-License-Identifier: Apache-2.0
"""What kernels share that write rows for linear layers in e4m3.

One scale is for all rows, or each has its own. FP8 attention's are in `_quantize`.
"""

import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels.formats import E4M3_MAX, MIN_ROW_SCALE

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_MIN_ROW_SCALE = tl.constexpr(MIN_ROW_SCALE)


@triton.jit
def row_scale(largest, scales_ptr, SCALES: tl.constexpr):
    """Return the scale of a program's row.

    Args:
        largest: The row's largest absolute value, fp32; not read where one is given.
        scales_ptr: fp32, one (`SCALES` is "one"), or one for each program ("own"),
            which is written.
        SCALES: See `scales_ptr`.
    """
    if SCALES == "own":
        scale = tl.maximum(tl.div_rn(largest, _E4M3_MAX), _MIN_ROW_SCALE)
        tl.store(scales_ptr + tl.program_id(0).to(tl.int64), scale)
    else:
        scale = tl.load(scales_ptr)
    return scale


@triton.jit
def quantize(values, scale, SCALES: tl.constexpr):
    """Return fp32 values of a row in e4m3, by what `row_scale` returned.

    NaN stays NaN: a tower's output shows it, and not a plausible number.
    """
    scaled = values * tl.div_rn(1.0, scale)
    if SCALES == "one":
        # By a scale of its own no value of a row is off by more than it rounds.
        scaled = tl.clamp(scaled, -_E4M3_MAX, _E4M3_MAX, tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv)

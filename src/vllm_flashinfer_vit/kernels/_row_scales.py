# SPDX-License-Identifier: Apache-2.0
"""What kernels share that write rows in e4m3, by one scale for all or each its own."""

import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels.formats import E4M3_MAX, MIN_ROW_SCALE

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_MIN_ROW_SCALE = tl.constexpr(MIN_ROW_SCALE)


@triton.jit
def quantize_row(values, scales_ptr, SCALES: tl.constexpr):
    """Return a program's row in e4m3.

    Args:
        values: fp32, 0 beyond the row's end.
        scales_ptr: fp32, one (`SCALES` is "one"), or one for each program ("own"),
            which is written.
        SCALES: See `scales_ptr`.
    """
    if SCALES == "own":
        absmax = tl.max(tl.abs(values), axis=0)
        scale = tl.maximum(tl.div_rn(absmax, _E4M3_MAX), _MIN_ROW_SCALE)
        tl.store(scales_ptr + tl.program_id(0).to(tl.int64), scale)
    else:
        scale = tl.load(scales_ptr)
    scaled = values * tl.div_rn(1.0, scale)
    # NaN stays NaN: a tower's output shows it, and not a plausible number.
    clamped = tl.clamp(scaled, -_E4M3_MAX, _E4M3_MAX, tl.PropagateNan.ALL)
    return clamped.to(tl.float8e4nv)

# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels share."""

import math

# 16-bit elements of the widest load, 16 bytes.
_MAX_UNIT = 8


def stride_unit(*sizes: int) -> int:
    """Return the largest power of two up to 8 that divides every stride and offset.

    Triton knows of an integer argument at most that 16 divides it. With a head stride
    of 72 it would load single elements. A kernel that takes its strides in units, and
    multiplies by the constant unit, loads whole units and needs no variant per stride.
    """
    return math.gcd(_MAX_UNIT, *sizes)

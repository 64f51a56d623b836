# SPDX-License-Identifier: Apache-2.0
"""What kernels share whose programs hold one row each, in registers."""

# The widest row.
MAX_WIDTH = 16384
# 16 values a thread are two loads of 16 bytes from each input.
_VALUES_PER_WARP = 32 * 16
_MAX_WARPS = 16


def warps_of(width: int) -> int:
    """Return the warps of a program that holds so many values, a power of two."""
    return max(1, min(_MAX_WARPS, width // _VALUES_PER_WARP))

# SPDX-License-Identifier: Apache-2.0
"""What kernels share whose programs hold one row each, in registers."""

# The widest row.
MAX_WIDTH = 16384
# Of a thread: two loads of 16 bytes from each input.
VALUES = 16
_THREADS = 32
_MAX_WARPS = 16


def warps_of(width: int, values: int = VALUES) -> int:
    """Return the warps of a program that holds so many values, a power of two.

    Args:
        width: The program's values, a power of two.
        values: A thread's, likewise. More of them are fewer warps, which wait less for
            each other where a row has several sums and maxima.
    """
    return max(1, min(_MAX_WARPS, width // (_THREADS * values)))

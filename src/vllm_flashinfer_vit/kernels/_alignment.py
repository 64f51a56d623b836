# SPDX-License-Identifier: Apache-2.0
"""What kernels that load 16 bytes at a time, 8 values of 16 bits, can read."""

import math

import torch

_BYTES = 16
UNIT = 8


def is_aligned(x: torch.Tensor) -> bool:
    """Whether x begins at 16 bytes, and all strides but the last are multiples of 8."""
    return x.data_ptr() % _BYTES == 0 and math.gcd(UNIT, *x.stride()[:-1]) == UNIT


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a contiguous copy of it if it is not aligned."""
    if is_aligned(x):
        return x
    # contiguous() would keep the odd stride of a dimension of size 1.
    return x.clone(memory_format=torch.contiguous_format)

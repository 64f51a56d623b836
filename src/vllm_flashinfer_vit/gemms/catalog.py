# SPDX-License-Identifier: Apache-2.0
"""GEMMs of rows in FP8, by name, and what kinds of scales they take.

`scaled_mm.py` launches them; nothing here needs torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

CUTLASS = "cutlass"
CUBLASLT = "cublaslt"
# What each is, for people, by the names in tables of choices.
GEMMS: Mapping[str, str] = MappingProxyType({CUTLASS: "CUTLASS", CUBLASLT: "cuBLASLt"})
# Microseconds that a call takes the host, on an H100 with vLLM 0.33.0.
HOST_US: Mapping[str, float] = MappingProxyType({CUTLASS: 20.0, CUBLASLT: 14.0})

Scales = Literal["tensor", "tokens", "rows"]
SCALES: tuple[Scales, ...] = ("tensor", "tokens", "rows")


def scales_of(is_static: bool, num_weight_scales: int) -> Scales | None:
    """Return the kind of a layer's scales.

    Args:
        is_static: Whether its rows have one given scale, not each its own.
        num_weight_scales: How many scales its weight has.

    Returns:
        `tensor` for one scale of all rows and one of the weight, `tokens` for one of
        each row and one of the weight, `rows` for one of each row and of each output.
        None for one of all rows and one of each output, which only CUTLASS takes: for
        cuBLASLt the first would have to be repeated in memory, where it would be stale
        once the layer's own is loaded anew.
    """
    if num_weight_scales == 1:
        return "tensor" if is_static else "tokens"
    return None if is_static else "rows"

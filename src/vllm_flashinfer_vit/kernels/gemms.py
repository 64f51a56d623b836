# SPDX-License-Identifier: Apache-2.0
"""GEMMs of rows in FP8, by name, and what kinds of scales they take.

`scaled_mm.py` launches them; nothing here needs torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

CUTLASS = "cutlass"
TORCH = "torch"
# What each is, for people, by the names in tables of choices.
GEMMS: Mapping[str, str] = MappingProxyType(
    {CUTLASS: "CUTLASS", TORCH: "torch._scaled_mm"}
)

Scales = Literal["tensor", "rows"]
SCALES: tuple[Scales, ...] = ("tensor", "rows")


def scales_of(is_static: bool, num_weight_scales: int) -> Scales | None:
    """Return the kind of a layer's scales.

    Args:
        is_static: Whether its rows have one given scale, not each its own.
        num_weight_scales: How many scales its weight has.

    Returns:
        `tensor` for one scale of all rows and one of the weight, `rows` for one of each
        row and of each output. None for others, which only CUTLASS takes: PyTorch's
        GEMM wants both alike, and a scale that is repeated in memory would be stale
        once the layer's own is loaded anew.
    """
    if is_static == (num_weight_scales == 1):
        return "tensor" if is_static else "rows"
    return None

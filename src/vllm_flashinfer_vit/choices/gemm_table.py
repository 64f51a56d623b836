# SPDX-License-Identifier: Apache-2.0
"""Tables of choices: the part on GEMMs of linear layers in FP8."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple, Self, cast

from pydantic import AfterValidator, ConfigDict, Field

from vllm_flashinfer_vit.gemms.catalog import GEMMS, SCALES, Scales
from vllm_flashinfer_vit.machine.json_files import Strict, one_of


class GemmLayer(NamedTuple):
    """What layers in FP8 have alike whose GEMMs take as long.

    Attributes:
        dtype: Name of the dtype of the output, `bfloat16`.
        inputs: The weight's rows, K, with padding.
        outputs: The weight's columns, N, with padding.
        scales: Kind of scales, see `gemms.catalog.scales_of`.
    """

    dtype: str
    inputs: int
    outputs: int
    scales: Scales

    @property
    def size(self) -> str:
        """Inputs x outputs: `1152x3456`."""
        return f"{self.inputs}x{self.outputs}"

    @property
    def key(self) -> str:
        """Its name in tables: `bfloat16/1152x3456/tensor`."""
        return f"{self.dtype}/{self.size}/{self.scales}"

    @classmethod
    def of_key(cls, key: str) -> Self:
        """Return the layers of a key that a table was read with."""
        dtype, sizes, scales = key.split("/")
        inputs, outputs = map(int, sizes.split("x"))
        return cls(dtype, inputs, outputs, cast(Scales, scales))


class GemmClass(NamedTuple):
    """A range of numbers of rows, and the GEMM that serves it.

    Attributes:
        max_rows: Most rows of the class; None for any number.
        gemm: One of `gemms.catalog.GEMMS`.
    """

    max_rows: int | None
    gemm: str


class GemmMeasurement(NamedTuple):
    """What a layer takes for some rows, by GEMM.

    Attributes:
        layer: `GemmLayer.key`.
        rows: T.
        us: Median time in microseconds, by GEMM.
    """

    layer: str
    rows: int
    us: Mapping[str, float]


_Name = Annotated[str, one_of(GEMMS)]
# Microseconds, of which classes may be derived again: by ratios and logarithms.
Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Row(Strict):
    max_rows: int | None
    gemm: _Name


def check_bounds(bounds: Sequence[int | None], field: str, unit: str) -> None:
    """Check the largest sizes of classes that follow each other.

    Args:
        bounds: The sizes; None for any.
        field: What a file calls one.
        unit: What it counts.

    Raises:
        ValueError: They do not ascend to a last one that is None.
    """
    most: int | None = 0
    for bound in bounds:
        if most is None:
            raise ValueError(f"it has a class after the one for any number of {unit}")
        if bound is not None and bound <= most:
            raise ValueError(
                f"it has a class up to {bound} {unit} after {most}; the numbers must "
                "ascend"
            )
        most = bound
    if most is not None:
        raise ValueError(f"it lacks the last class, whose {field} is null")


def _ascending(rows: list[_Row]) -> list[_Row]:
    check_bounds([row.max_rows for row in rows], "max_rows", "rows")
    return rows


_LAYER = re.compile(
    rf"[a-z0-9_]+/[1-9][0-9]{{0,8}}x[1-9][0-9]{{0,8}}/({'|'.join(SCALES)})"
)


def _layer(name: str) -> str:
    if not _LAYER.fullmatch(name):
        raise ValueError(f"{name!r} is no layer such as bfloat16/1152x3456/tensor")
    return name


_Rows = Annotated[list[_Row], AfterValidator(_ascending)]


def _layers(gemms: dict[str, _Rows]) -> dict[str, _Rows]:
    for name in gemms:
        _layer(name)
    return gemms


GemmRows = Annotated[dict[str, _Rows], AfterValidator(_layers)]


class GemmMeasurementRow(Strict):
    """A `GemmMeasurement` as a file has it."""

    model_config = ConfigDict(extra="forbid")

    layer: Annotated[str, AfterValidator(_layer)]
    rows: int
    us: dict[_Name, Time]

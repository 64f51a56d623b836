# SPDX-License-Identifier: Apache-2.0
"""Which GEMM serves how many rows of a linear layer in FP8: the look-up.

Choices come from the same files as attention's, see `lookup`. They are for layers of
exactly the measured sizes; all others have vLLM's own.
"""

from pathlib import Path
from typing import NamedTuple

from vllm_flashinfer_vit.choices.gemm_table import GemmClass
from vllm_flashinfer_vit.choices.lookup import tables_for
from vllm_flashinfer_vit.kernels.gemms import CUTLASS, GEMMS

# What vLLM itself runs, for any number of rows.
STOCK = (GemmClass(None, CUTLASS),)


class GemmChoice(NamedTuple):
    """The GEMMs of a layer.

    Attributes:
        classes: By number of rows, ascending; the last is unbounded.
        reason: Why these, with the measurement's origin.
    """

    classes: tuple[GemmClass, ...]
    reason: str


def measured_gemms(
    gpu_name: str | None,
    capability: tuple[int, int] | None,
    tuned_dir: Path | None = None,
    vllm: str | None = None,
) -> dict[str, GemmChoice]:
    """Return what is known of a GPU's GEMMs, by `GemmLayer.key`; the best file counts.

    Args:
        gpu_name: As for `lookup.choices_for`, like the other arguments.
        capability: See `gpu_name`.
        tuned_dir: See `gpu_name`.
        vllm: See `gpu_name`.

    Raises:
        TableError: A file of measurements cannot be used.
    """
    found: dict[str, GemmChoice] = {}
    if gpu_name is None or capability is None:
        return found
    for table, origin in tables_for(gpu_name, capability, tuned_dir, vllm):
        for name, classes in table.gemms.items():
            found.setdefault(name, GemmChoice(classes, origin))
    return found


def in_words(classes: tuple[GemmClass, ...]) -> str:
    """Say which serves how many rows: `torch._scaled_mm up to 512 rows, CUTLASS`."""
    return ", ".join(
        GEMMS[gemm] + ("" if max_rows is None else f" up to {max_rows} rows")
        for max_rows, gemm in classes
    )

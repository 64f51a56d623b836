# SPDX-License-Identifier: Apache-2.0
"""Which GEMM serves how many rows of a linear layer in FP8: the look-up.

Choices come from the same files as attention's, see `lookup`. They are for layers of
exactly the measured sizes, on the measured GPU and PyTorch; all others have vLLM's own.
"""

from pathlib import Path
from typing import NamedTuple

from vllm_flashinfer_vit.choices.gemm_table import GemmClass
from vllm_flashinfer_vit.choices.lookup import tables_for
from vllm_flashinfer_vit.gemms.catalog import CUTLASS, GEMMS
from vllm_flashinfer_vit.machine.stack import Stack
from vllm_flashinfer_vit.machine.versions import public

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
    stack: Stack, tuned_dir: Path | None = None
) -> dict[str, GemmChoice]:
    """Return what is known of a machine's GEMMs, by `GemmLayer.key`.

    The best file counts for each, of those of exactly its GPU and its PyTorch, which
    brings cuBLASLt: others do not tell whether PyTorch's GEMM is faster than vLLM's.

    Args:
        stack: What the machine has.
        tuned_dir: Folder of the user's measurements, or None to ignore them.

    Raises:
        TableError: A file of measurements cannot be used.
    """
    found: dict[str, GemmChoice] = {}
    if not stack.gpus or stack.torch is None:
        return found
    gpu = stack.gpus[0]
    for table, origin in tables_for(gpu.name, gpu.capability, tuned_dir, stack.vllm):
        torch = str(table.made_by.get("torch"))
        if table.made_by["gpu"] != gpu.name or public(torch) != public(stack.torch):
            continue
        for name, classes in table.gemms.items():
            found.setdefault(name, GemmChoice(classes, origin))
    return found


def in_words(classes: tuple[GemmClass, ...]) -> str:
    """Say which serves how many rows: `cuBLASLt up to 512 rows, CUTLASS`."""
    return ", ".join(
        GEMMS[gemm] + ("" if max_rows is None else f" up to {max_rows} rows")
        for max_rows, gemm in classes
    )

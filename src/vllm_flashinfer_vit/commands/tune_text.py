# SPDX-License-Identifier: Apache-2.0
"""What `tune` prints: the choices that it measured, for people and as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.gemm_table import GemmClass, GemmLayer
from vllm_flashinfer_vit.choices.gemms import STOCK, in_words
from vllm_flashinfer_vit.choices.lookup import Choice
from vllm_flashinfer_vit.commands.doctor_text import plain_table
from vllm_flashinfer_vit.commands.tune import Report


def to_json(report: Report) -> dict[str, Any]:
    """Return the document that `tune --json` prints: the file's path and classes."""
    document = tuned.to_json(report.table)
    del document["measurements"], document["gemm_measurements"]
    return {"path": str(report.path), **document}


def render(report: Report, console: Console) -> None:
    """Print the classes, what was left out, and where the table is.

    Args:
        report: A written table.
        console: Where to print.
    """
    text = plain_table("dtype", "head dim", "longest sequence", "kernel")
    for name, rows in report.table.classes.items():
        dtype, _, head_dim = name.partition("/")
        for row in rows:
            length = "any" if row.max_len is None else f"up to {row.max_len}"
            served_by = Choice(row.kernel, row.max_len, "", row.many).served_by
            text.add_row(dtype, head_dim, length, served_by)
            dtype = head_dim = ""
    if text.row_count:
        console.print(text)
    if report.table.gemms:
        console.print(_gemm_table(report.table.gemms))
    for line in _folded(report.table.left_out):
        console.print(f"left out: {line}", markup=False, soft_wrap=True)
    if report.table.left_out:
        console.print("`vllm-flashinfer-vit doctor` says what serves instead.")
    gpu = report.table.made_by["gpu"]
    console.print(
        f"The choices for {gpu} are in {report.path}", markup=False, soft_wrap=True
    )


def _folded(left_out: Sequence[str]) -> list[str]:
    """Return what was left out, what many have for the same reason in one line."""
    names_by_reason: dict[str, list[str]] = {}
    for line in left_out:
        name, colon, reason = line.partition(": ")
        name, reason = (name, reason) if colon else ("", line)
        names_by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in names_by_reason.items():
        # Those of attention are few: a dtype and a head dim.
        layers = [name for name in names if name.count("/") == 2]
        if len(layers) > 1:
            names = [name for name in names if name not in layers]
            names.append(f"{len(layers)} layers in FP8")
        lines.append(": ".join(filter(None, (", ".join(names), reason))))
    return lines


def _gemm_table(gemms: Mapping[str, tuple[GemmClass, ...]]) -> Table:
    """Return a line for each layer whose GEMM is not vLLM's own throughout."""
    table = plain_table("layer in FP8", "dtype", "scales", "GEMM")
    for name, classes in gemms.items():
        layer = GemmLayer.of_key(name)
        if classes != STOCK:
            table.add_row(layer.size, layer.dtype, layer.scales, in_words(classes))
    if STOCK in gemms.values():
        table.add_row(
            "all others" if table.row_count else "all", "", "", in_words(STOCK)
        )
    return table

# SPDX-License-Identifier: Apache-2.0
"""What tests of pages read: rows of results, and text without line ends."""

from pathlib import Path

from _benchmarks import BENCHMARKS

import chosen_rows

ROOT = BENCHMARKS.parent
RESULTS = BENCHMARKS / "results" / "h200"
H100_RESULTS = RESULTS.with_name("h100-80gb-hbm3")


def rows(
    name: str, vllm: str = "0.25.1", folder: Path = RESULTS
) -> list[chosen_rows.Row]:
    """Return the rows of a file of results that are of one vLLM."""
    found = chosen_rows.read(folder / f"{name}.csv")
    return [row for row in found if row["vllm"] == vllm]


def text_of(name: str) -> str:
    """Return a page of docs, or README.md, with single spaces alone."""
    folder = ROOT if name == "README.md" else ROOT / "docs"
    return " ".join((folder / name).read_text().split())

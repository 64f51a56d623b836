# SPDX-License-Identifier: Apache-2.0
"""What tests of servers' pages read: lines of their table, and what they gain."""

from pathlib import Path

from _pages import rows

import engine_tables
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES

# As the page has them: with four API servers, by shared memory, with one, with patches
# left out.
ORDER = [
    "`--api-server-count 4`",
    "`--api-server-count 4 --mm-tensor-ipc torch_shm`",
    "",
    f"`{ENV_DISABLE_PATCHES}=image-frames,image-text --api-server-count 4`",
]
# Of an H100, before images were prepared quicker; stock ran without graphs, too.
OLDER = "serve_smaller_pages"
# Of an H100, as the page's three tables have them.
GRAPHS = [
    f"{p}:graph"
    for p in ("stock-flash_attn", "stock-flash_attn4", "plugin-fp8", "plugin")
]
DEFAULT = ["stock-flash_attn:eager", "plugin:eager"]
QUANTIZED = [
    *("stock-flash_attn-q8:graph", "stock-flash_attn-q8:eager"),
    "plugin-fp8-q8:graph",
]


def server_lines(
    results: Path, name: str = "serve", setups: list[str] | None = None
) -> list[dict[str, str]]:
    """Return the lines of the table of servers, by its head."""
    found = [
        row
        for row in rows(name, "0.33.0", results)
        if setups is None or f"{row['provider']}:{row['mode']}" in setups
    ]
    lines = engine_tables.serve_table(found).splitlines()
    del lines[1]
    head, *rest = ([cell.strip() for cell in line.split("|")] for line in lines)
    lines_of = [dict(zip(head, cells, strict=True)) for cells in rest]
    assert all(float(r["best over stock's best"]) > 1 for r in lines_of)
    return lines_of


def gains(lines: list[dict[str, str]], at_once: str) -> list[float]:
    """Return the gains with so many requests at once."""
    return [
        float(r["best over stock's best"]) for r in lines if r["at once"] == at_once
    ]


def percents(ratios: list[float]) -> str:
    return " to ".join(f"{100 * f(ratios) - 100:.0f}" for f in (min, max))


def times(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"

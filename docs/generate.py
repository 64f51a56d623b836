# SPDX-License-Identifier: Apache-2.0
"""Writes the generated tables of README and docs into their pages.

A generated table stands between two comments, the first of which is its command:

    <!-- python benchmarks/table.py best benchmarks/results/h200/encoder.csv -->
    <!-- python docs/generate.py kernels -->
    ...
    <!-- end -->

    python docs/generate.py             # write all pages
    python docs/generate.py --check     # exit with 1 if a page is out of date
    python docs/generate.py kernels     # print one table
"""

import argparse
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import model_tables  # noqa: E402
import version_table  # noqa: E402

import chosen_rows  # noqa: E402
import table as results  # noqa: E402
from table_text import table_head, table_line  # noqa: E402

_BLOCK = re.compile(r"(<!-- python (\S+) (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def kernels() -> str:
    """Write a line for each kernel of the catalog."""
    from vllm_flashinfer_vit.kernels.catalog import KERNELS

    lines = table_head(["kernel", "what it is", "head dims", "sequences"])
    for name, kernel in sorted(KERNELS.items(), key=lambda item: item[1].is_fp8):
        dims = kernel.needs.head_dims
        shown = f"{dims[0]} to {dims[1]}" if dims else "any"
        cells = f"`{name}`", kernel.summary, shown, kernel.sequences
        lines.append(table_line(cells))
    return "\n".join(lines)


def classes() -> str:
    """Write which kernel serves which lengths on measured GPUs, newest vLLM first."""
    heads = "GPU", "vLLM", "dtype", "head dim", "kernel by longest sequence"
    lines = table_head(heads)
    for table in _bundled_tables():
        gpu = table.made_by["gpu"].removeprefix("NVIDIA ")
        vllm = table.made_by["vllm"]
        for name, parts in table.classes.items():
            dtype, _, head_dim = name.partition("/")
            texts = []
            for part in parts:
                upto = "longer" if part.max_len is None else f"up to {part.max_len}"
                many = f" (many sequences: `{part.many}`)" if part.many else ""
                texts.append(f"{upto} `{part.kernel}`{many}")
            cells = gpu, vllm, dtype, head_dim, "; ".join(texts)
            lines.append(table_line(cells))
    return "\n".join(lines)


def _bundled_tables() -> list[Any]:
    """Return the package's tables: by GPU, the one with the most of them first."""
    from vllm_flashinfer_vit.choices.table import BUNDLED, read_bundled

    files = sorted(BUNDLED.glob("*/*.json"))
    gpus = (json.loads(path.read_text())["made_by"]["gpu"] for path in files)
    return [
        table
        for gpu, _ in Counter(gpus).most_common()
        for table in read_bundled(gpu, None)
    ]


def gemms() -> str:
    """Write which GEMM serves layers in FP8, those with the same on one line."""
    from vllm_flashinfer_vit.choices.gemm_table import GemmLayer
    from vllm_flashinfer_vit.choices.gemms import in_words

    rows: dict[tuple[str, ...], list[str]] = {}
    for table in _bundled_tables():
        gpu = table.made_by["gpu"].removeprefix("NVIDIA ")
        for name, classes in table.gemms.items():
            layer = GemmLayer.of_key(name)
            made_by = gpu, table.made_by["vllm"]
            key = *made_by, layer.dtype, layer.scales, in_words(classes)
            rows.setdefault(key, []).append(layer.size)
    if not rows:
        return "Not measured yet."
    lines = table_head(["GPU", "vLLM", "dtype", "scales", "inputs x outputs", "GEMM"])
    for (*start, text), sizes in rows.items():
        lines.append(table_line([*start, ", ".join(sizes), text]))
    return "\n".join(lines)


def settings() -> str:
    """Write a line for each environment variable."""
    from vllm_flashinfer_vit.settings import VARIABLES

    lines = table_head(["variable", "values", "default", "what it does"])
    for one in VARIABLES:
        cells = f"`{one.name}`", one.values, one.default, one.summary
        lines.append(table_line(cells))
    return "\n".join(lines)


def patches() -> str:
    """Write a line for each reason, with the patches that have it, as `doctor` does."""
    from vllm_flashinfer_vit.plugin import all_patches

    by_reason: dict[tuple[str, str], list[str]] = {}
    for patch in all_patches():
        target = patch.target.partition(":")[2]
        same = by_reason.setdefault((patch.why, patch.remove_when), [])
        same.append(f"{patch.name}: `{target}`")
    lines = table_head(["patches: targets", "why", "remove when"])
    for reason, named in by_reason.items():
        lines.append(table_line(["<br>".join(named), *reason]))
    return "\n".join(lines)


def optimisations() -> str:
    """Write a line for each optimisation of blocks, as `doctor` lists them."""
    from vllm_flashinfer_vit.blocks.spec import OPTIMISATIONS

    return "\n".join(
        [*table_head(["name", "what it does"]), *map(table_line, OPTIMISATIONS.items())]
    )


def counters() -> str:
    """Write a line for each counter, as /metrics has them."""
    from vllm_flashinfer_vit.engine.metrics import SERIES

    lines = table_head(["counter", "labels", "what it counts"])
    for one in SERIES:
        labels = ", ".join(one.labels) or "-"
        lines.append(table_line([f"`{one.exported}`", labels, one.summary]))
    return "\n".join(lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "kernels": kernels,
    "classes": classes,
    "gemms": gemms,
    "settings": settings,
    "patches": patches,
    "optimisations": optimisations,
    "compatibility": version_table.compatibility,
    "counters": counters,
    "packed": model_tables.packed,
    "dense": model_tables.dense,
    "transformers": model_tables.transformers,
    "outside": model_tables.outside,
}


def rendered(script: str, arguments: str) -> str:
    """Return what one of the two scripts prints, or that there are no rows for it.

    Raises:
        ValueError: It is another script, or a table that is not known.
    """
    words = shlex.split(arguments)
    if script == "benchmarks/table.py":
        kind, source, *options = words
        try:
            return results.render([kind, str(ROOT / source), *options])
        except chosen_rows.NoRowsError:
            return "Not measured yet."
    if script == "docs/generate.py" and words and words[0] in TABLES:
        return TABLES[words[0]]()
    raise ValueError(f"no generated table: python {script} {arguments}")


def filled(page: str) -> str:
    """Return a page's text with every generated table as of now."""

    def fill(match: re.Match[str]) -> str:
        head, script, arguments, _, end = match.groups()
        return f"{head}\n{rendered(script, arguments)}\n\n{end}"

    return _BLOCK.sub(fill, page)


def pages() -> list[Path]:
    """Return the pages that may hold generated tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    """Write or check the pages, or print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", choices=TABLES, help="print it")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    # vLLM logs to where tables are printed, and on a machine without a GPU it warns.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.table:
        print(TABLES[args.table]())
        return
    stale = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if filled(text) == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not args.check:
            path.write_text(filled(text), encoding="utf-8")
    if stale:
        print(f"{'out of date' if args.check else 'wrote'}: {', '.join(stale)}")
    if stale and args.check:
        raise SystemExit("run python docs/generate.py")


if __name__ == "__main__":
    main()

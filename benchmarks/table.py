# SPDX-License-Identifier: Apache-2.0
"""Prints a result file as the Markdown tables of README and docs.

    python benchmarks/table.py encoder benchmarks/results/h200/encoder.csv --mode graph
    python benchmarks/table.py attention benchmarks/results/h200/attention.csv \
        --bench qkv_attention --head-dim 80
"""

import argparse
import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

Row = Mapping[str, str]
BASELINE = "stock-flash_attn"
PLUGIN = "plugin"


def newest(rows: Iterable[Row], key: Callable[[Row], tuple[str, ...]]) -> list[Row]:
    """Keep the last row of each key: files are appended to."""
    return list({key(row): row for row in rows}.values())


def table(rows: list[Row], group: str) -> str:
    """Write one Markdown table: a line a case, milliseconds, the plugin's speed-up."""
    rows = newest(rows, lambda row: (row[group], row["case"], row["provider"]))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    times: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        times[row[group], row["case"]][row["provider"]] = float(row["p50_ms"])
    lines = [
        f"| {group} | case | " + " | ".join(providers) + " | speed-up |",
        "|" + "---|" * (len(providers) + 3),
    ]
    ratios: dict[str, list[float]] = defaultdict(list)
    for (name, case), by_provider in times.items():
        ratio = ""
        if {BASELINE, PLUGIN} <= by_provider.keys():
            ratios[name].append(by_provider[BASELINE] / by_provider[PLUGIN])
            ratio = f"{ratios[name][-1]:.2f}"
        cells = (format_ms(by_provider.get(provider)) for provider in providers)
        lines.append(f"| {name} | {case} | {' | '.join(cells)} | {ratio} |")
    for name, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        empty = " | ".join([""] * len(providers))
        lines.append(f"| {name} | geometric mean | {empty} | {mean:.2f} |")
    return "\n".join(lines)


def format_ms(value: float | None) -> str:
    """Three significant digits, or a dash for what did not run."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def main() -> None:
    """Read the arguments and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("encoder", "attention"))
    parser.add_argument("source", type=Path)
    parser.add_argument("--mode", default="graph")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--bench")
    parser.add_argument("--head-dim")
    args = parser.parse_args()
    with args.source.open(newline="") as source:
        rows = list(csv.DictReader(source))
    wanted = {
        "mode": args.mode,
        "dtype": args.dtype,
        "bench": args.bench,
        "head_dim": args.head_dim,
    }
    rows = [
        row
        for row in rows
        if all(value is None or row[name] == value for name, value in wanted.items())
    ]
    print(table(rows, "model" if args.kind == "encoder" else "head_dim"))


if __name__ == "__main__":
    main()

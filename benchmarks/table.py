# SPDX-License-Identifier: Apache-2.0
"""Prints a result file as the Markdown tables of README and docs.

    python benchmarks/table.py encoder benchmarks/results/h200/encoder.csv --mode graph
    python benchmarks/table.py best benchmarks/results/h200/encoder.csv
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
PLUGIN_FP8 = "plugin-fp8"
_KEYS = ("model", "case", "provider", "mode", "dtype")


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
        empty = " | ".join([""] * len(providers))
        lines.append(f"| {name} | geometric mean | {empty} | {_mean(values)} |")
    return "\n".join(lines)


def best_table(rows: list[Row]) -> str:
    """Write stock's best time of all backends and modes, and the plugin's over it."""
    rows = newest(rows, lambda row: tuple(row[name] for name in _KEYS))
    challengers = [
        p for p in (PLUGIN, PLUGIN_FP8) if any(r["provider"] == p for r in rows)
    ]
    heads = " | ".join(f"{provider} | speed-up" for provider in challengers)
    lines = [
        f"| model | case | stock | which | {heads} |",
        "|" + "---|" * (4 + 2 * len(challengers)),
    ]
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for model, case in dict.fromkeys((row["model"], row["case"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["case"]) == (model, case)]
        stock = _fastest(row for row in mine if row["provider"].startswith("stock-"))
        if stock is None:
            continue
        backend = stock["provider"].removeprefix("stock-")
        cells = [format_ms(float(stock["p50_ms"])), f"{backend} {stock['mode']}"]
        for provider in challengers:
            best = _fastest(row for row in mine if row["provider"] == provider)
            if best is None:
                cells += [format_ms(None), ""]
                continue
            ratio = float(stock["p50_ms"]) / float(best["p50_ms"])
            ratios[model, provider].append(ratio)
            cells += [format_ms(float(best["p50_ms"])), f"{ratio:.2f}"]
        lines.append(f"| {model} | {case} | {' | '.join(cells)} |")
    for model in dict.fromkeys(model for model, _ in ratios):
        means = (_mean(ratios[model, provider]) for provider in challengers)
        cells = " | ".join(f" | {mean}" for mean in means)
        lines.append(f"| {model} | geometric mean | | | {cells} |")
    return "\n".join(lines)


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min(rows, key=lambda row: float(row["p50_ms"]), default=None)


def _mean(values: list[float]) -> str:
    """The geometric mean with two digits, empty without values."""
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.2f}" if values else ""


def format_ms(value: float | None) -> str:
    """Three significant digits, or a dash for what did not run."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def main() -> None:
    """Read the arguments and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("encoder", "best", "attention"))
    parser.add_argument("source", type=Path)
    parser.add_argument("--mode", default="graph")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--commit", help="default: the newest row of each")
    parser.add_argument("--bench")
    parser.add_argument("--head-dim")
    args = parser.parse_args()
    with args.source.open(newline="") as source:
        rows = list(csv.DictReader(source))
    wanted = {
        "mode": None if args.kind == "best" else args.mode,
        "dtype": args.dtype,
        "commit": args.commit,
        "bench": args.bench,
        "head_dim": args.head_dim,
    }
    rows = [
        row
        for row in rows
        if all(value is None or row[name] == value for name, value in wanted.items())
    ]
    if args.kind == "best":
        print(best_table(rows))
    else:
        print(table(rows, "model" if args.kind == "encoder" else "head_dim"))


if __name__ == "__main__":
    main()

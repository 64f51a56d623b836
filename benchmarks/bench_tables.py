# SPDX-License-Identifier: Apache-2.0
"""Tables of the benchmarks of the op, of towers, of the host and of the quantisers."""

import statistics
from collections import defaultdict
from collections.abc import Iterable

from chosen_rows import (
    BASELINE,
    KEYS,
    PLUGIN,
    PLUGIN_FP8,
    Best,
    Row,
    mean,
    newest,
    speed_up,
    what_is_timed,
)
from table_text import short_name, table_head, table_line, time_cell, written

# Shown as they are, and given a speed-up of their own.
CHALLENGERS = (PLUGIN, PLUGIN_FP8, "plugin-hopper_fp8", "plugin-triton_fp8")


def case_table(rows: list[Row], group: str) -> str:
    """Write a line a case: milliseconds, and how many times as fast as stock."""
    rows = newest(rows, lambda row: (row[group], row["case"], row["provider"]))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    found: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        found[row[group], row["case"]][row["provider"]] = row
    challengers = [p for p in CHALLENGERS if p in providers]
    heads = [group, "case", *providers, *(f"{p}: speed-up" for p in challengers)]
    lines = table_head(heads)
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    compared: dict[str, set[str]] = defaultdict(set)
    for (name, case), by_provider in found.items():
        cells = [time_cell(by_provider.get(provider)) for provider in providers]
        for provider in challengers:
            ratio = speed_up(by_provider.get(BASELINE), by_provider.get(provider))
            cells.append("" if ratio is None else f"{ratio:.2f}")
            if ratio is not None:
                ratios[name][provider].append(ratio)
                compared[name].add(case)
        lines.append(table_line([name, case, *cells]))
    for name, by_challenger in ratios.items():
        count = len(compared[name])
        means = [mean(by_challenger[provider], count) for provider in challengers]
        lines.append(
            table_line([name, "geometric mean", *[""] * len(providers), *means])
        )
    return written(lines)


def modes_table(rows: Iterable[Row]) -> str:
    """Write a line a contender and mode, fastest first: times over stock FLASH_ATTN's.

    Those are of FLASH_ATTN without fused ops and compiler, in a graph if the contender
    is in one, and of the cases that both ran in one run.

    Raises:
        NoRowsError: No contender and FLASH_ATTN ran a case in common.
    """
    rows = [row for row in rows if what_is_timed(row["mode"]) != "host"]
    rows = newest(rows, lambda row: tuple(row[name] for name in KEYS))
    base = {
        (row["model"], row["case"], row["mode"]): row
        for row in rows
        if row["provider"] == BASELINE
    }
    ratios: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        timed = what_is_timed(row["mode"])
        ratio = speed_up(row, base.get((row["model"], row["case"], timed)))
        if ratio is not None:
            key = (short_name(row["model"]), timed, row["provider"], row["mode"])
            ratios[key].append(ratio)

    def fastest_first(key: tuple[str, ...]) -> tuple[str, str, float]:
        return key[0], key[1], statistics.geometric_mean(ratios[key])

    lines = table_head(["model", "contender", "mode", "cases", f"time over {BASELINE}"])
    for key in sorted(ratios, key=fastest_first):
        model, _, provider, mode = key
        count = len(ratios[key])
        cells = [model, provider, mode, str(count), mean(ratios[key], count)]
        lines.append(table_line(cells))
    return written(lines)


def best_table(
    rows: Iterable[Row], own_mode: str = "graph", quantized: bool = False
) -> str:
    """Write a line a case of `Best`; it names what of stock's the case lacks.

    Raises:
        NoRowsError: There is no case that stock and this package ran in such modes.
    """
    best = Best(rows, own_mode, quantized)
    heads = ["model", "case", "stock", "which"]
    for provider in best.challengers:
        heads += [provider, "speed-up"]
    lines = table_head(heads)
    for model in best.models:
        for case in best.cases(model):
            stock = best.stock(model, case)
            assert stock is not None
            cells = [model, case, time_cell(stock), best.which(model, case)]
            for provider in best.challengers:
                row = best.of(provider, model, case)
                ratio = speed_up(stock, row)
                cells += [time_cell(row), "" if ratio is None else f"{ratio:.2f}"]
            lines.append(table_line(cells))
    for model in best.models:
        if best.cases(model):
            cells = [model, "geometric mean", "", ""]
            for provider in best.challengers:
                cells += ["", best.mean(provider, model)]
            lines.append(table_line(cells))
    return written(lines)


def error_table(rows: Iterable[Row]) -> str:
    """Write the least and the largest error against fp32 by model and contender."""
    rows = newest(rows, lambda row: tuple(row[name] for name in KEYS))
    providers = [BASELINE, PLUGIN, PLUGIN_FP8]
    lines = table_head(["model", *providers])
    for model in sorted({row["model"] for row in rows}):
        cells = [short_name(model)]
        for provider in providers:
            errors = [
                float(row["rel_err"]) * 100
                for row in rows
                if (row["model"], row["provider"]) == (model, provider)
            ]
            ends = f"{min(errors):.2f} to {max(errors):.2f} %" if errors else "-"
            cells.append(ends)
        lines.append(table_line(cells))
    return written(lines)


def host_table(rows: Iterable[Row]) -> str:
    """Write the host's time in microseconds, of one bench and mode."""
    rows = newest(rows, lambda row: (row["model"], row["case"], row["provider"]))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    times: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    for row in rows:
        time_us = f"{float(row['p50_ms']) * 1e3:.0f}"
        key = (short_name(row["model"]), row["case"], row["commit"])
        times[key][row["provider"]] = time_us
    lines = table_head(["model", "case", "commit", *providers])
    for key, by_provider in times.items():
        lines.append(table_line([*key, *(by_provider.get(p, "-") for p in providers)]))
    return written(lines)


def quantize_table(rows: Iterable[Row]) -> str:
    """Write TB/s of bytes read and written once, by head dim and case."""
    rows = newest(rows, lambda row: (row["head_dim"], row["case"], row["provider"]))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    found: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        found[row["head_dim"], row["case"]][row["provider"]] = row
    lines = table_head(["head_dim", "case", *providers, "blocks over copy"])
    for key, by_provider in found.items():
        mine = [by_provider.get(provider) for provider in providers]
        cells = [
            "-" if row is None else f"{float(row['tb_per_s']):.2f}" for row in mine
        ]
        blocks, copy = by_provider.get("plugin-blocks"), by_provider.get("copy")
        # Over the copy's: more bytes a second are more.
        ratio = speed_up(blocks, copy, "tb_per_s")
        share = "-" if ratio is None else f"{100 * ratio:.0f} %"
        lines.append(table_line([*key, *cells, share]))
    return written(lines)

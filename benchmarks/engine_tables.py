# SPDX-License-Identifier: Apache-2.0
"""Tables of real engines and servers, and README's summary of them."""

import re
from collections import defaultdict
from collections.abc import Iterable

from chosen_rows import (
    BASELINE,
    PLUGIN,
    PLUGIN_FP8,
    SERVER_KEYS,
    Best,
    NoRowsError,
    Row,
    mean,
    of_servers,
    run_of,
    setups_of,
    speed_up,
)
from table_text import short_name, table_head, table_line, time_cell, written

# Contenders get through other numbers of them; a time is that of all N together.
MIXTURES = re.compile(r"first (\d+) random mixtures")
GRAPH_CASES = (
    "image 16x16",
    "image 32x32",
    "image 64x64",
    "8 x (32x32)",
    "20 x (20x20)",
)
# Those of the table of encoder graphs: provider and configuration.
ENGINES = ((BASELINE, "automatic"), (PLUGIN, "automatic"), (PLUGIN, "fp8"))


def summary_table(encoder: list[Row], eager: list[Row], graphs: list[Row]) -> str:
    """Write one line a model: geometric means, and requests of real engines.

    The models are those of both files of towers.

    Args:
        encoder: Towers in graphs.
        eager: Towers in eager mode.
        graphs: Real engines.

    Raises:
        NoRowsError: No tower ran in a graph.
    """
    best, best_eager = Best(encoder), Best(eager, "eager")
    mixtures = shared_mixtures(graphs)
    count = _count(mixtures)
    same = [row for row in best.rows if row["mode"] == "graph"]
    lines = table_head(
        [
            "speed-up in bf16, and with FP8 attention",
            "in eager mode, over the best of stock's modes",
            "in graphs, over the best of stock's backends and modes",
            "in graphs, over stock FLASH_ATTN in the same mode",
            f"in a real engine, over stock FLASH_ATTN, {count} random requests",
        ]
    )
    for model in sorted(set(best.models) & set(best_eager.models)):
        bf16, fp8 = (
            mean(
                [
                    ratio
                    for case in best.cases(model)
                    if (ratio := _same_mode(same, provider, model, case)) is not None
                ],
                len(best.cases(model)),
            )
            for provider in (PLUGIN, PLUGIN_FP8)
        )
        engine = (
            speed_up(
                _request(graphs, model, BASELINE, "automatic", mixtures),
                _request(graphs, model, PLUGIN, config, mixtures),
                "total_ms",
            )
            for config in ("automatic", "fp8")
        )
        engine_cells = ["-" if x is None else f"{x:.2f}" for x in engine]
        lines.append(
            table_line(
                [
                    short_name(model),
                    _both_means(best_eager, model),
                    _both_means(best, model),
                    f"{bf16}, {fp8}",
                    ", ".join(engine_cells),
                ]
            )
        )
    return written(lines)


def _both_means(best: Best, model: str) -> str:
    return f"{best.mean(PLUGIN, model)}, {best.mean(PLUGIN_FP8, model)}"


def _same_mode(
    rows: Iterable[Row], provider: str, model: str, case: str
) -> float | None:
    mine = {
        row["provider"]: row
        for row in rows
        if (row["model"], row["case"]) == (model, case)
    }
    return speed_up(mine.get(BASELINE), mine.get(provider))


def _request(
    rows: Iterable[Row], model: str, provider: str, config: str, case: str
) -> Row | None:
    wanted = (config, provider, model, case)
    keys = ("config", "provider", "model", "case")
    mine = [row for row in rows if tuple(row[key] for key in keys) == wanted]
    return mine[-1] if mine else None


def shared_mixtures(graphs: Iterable[Row]) -> str:
    """Return the case of the most random mixtures that all engines of a table timed.

    Raises:
        NoRowsError: They share none.
    """
    timed: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for row in graphs:
        if (row["provider"], row["config"]) in ENGINES:
            cases = timed[row["model"], row["provider"], row["config"]]
            if MIXTURES.fullmatch(row["case"]):
                cases.add(row["case"])
    if not (shared := set.intersection(*timed.values()) if timed else set()):
        raise NoRowsError("the engines timed no equal number of random mixtures")
    return max(shared, key=lambda case: int(_count(case)))


def _count(mixtures: str) -> str:
    found = MIXTURES.fullmatch(mixtures)
    assert found is not None
    return found[1]


def graph_table(rows: list[Row]) -> str:
    """Write the tower's times in real engines, and what random mixtures took.

    The computed patches are of the engine that timed the mixtures.

    Raises:
        NoRowsError: As `shared_mixtures`.
    """
    mixtures = shared_mixtures(rows)
    heads = ["model", "engine", *GRAPH_CASES, mixtures, "speed-up"]
    lines = table_head([*heads, "computed patches over real"])
    for model in dict.fromkeys(row["model"] for row in rows):
        base = _request(rows, model, BASELINE, "automatic", mixtures)
        for provider, config in ENGINES:
            cells = [short_name(model), provider + (", FP8" if config == "fp8" else "")]
            for case in GRAPH_CASES:
                row = _request(rows, model, provider, config, case)
                cells.append(time_cell(row))
            total = _request(rows, model, provider, config, mixtures)
            cells.append("-" if total is None else f"{float(total['total_ms']):.0f}")
            ratio = speed_up(base, total, "total_ms")
            is_stock = provider == BASELINE
            cells.append("" if is_stock or ratio is None else f"{ratio:.2f}")
            same = [row for row in rows if total and run_of(row) == run_of(total)]
            padded = _request(same, model, provider, config, "random mixtures")
            value = padded["padded_over_real"] if padded else ""
            cells.append(f"{float(value):.2f}" if value else "-")
            lines.append(table_line(cells))
    return written(lines)


def memory_table(rows: list[Row]) -> str:
    """Write the most memory that each engine's process held, in MiB."""
    keys = ("config", "provider", "model")
    found = {tuple(row[key] for key in keys): row for row in rows}
    contenders = list(dict.fromkeys(key[:2] for key in found))
    lines = table_head(["model", *(f"{c}: {p}" for c, p in contenders)])
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = (found.get((*contender, model)) for contender in contenders)
        cells = (row["peak_memory_mib"] if row else "-" for row in mine)
        lines.append(table_line([short_name(model), *cells]))
    return written(lines)


def serve_table(rows: Iterable[Row]) -> str:
    """Write a line a workload: what each server did, and the best over stock's best.

    One request at a time: the median time to the first token and its 99th percentile,
    in milliseconds. Several: requests a second. A line has the servers of one run, of
    the commit that measured the workload last; a run without a server of stock's, to
    which nothing is compared, has none.

    Raises:
        NoRowsError: No run has one.
    """
    found: dict[tuple[str, ...], dict[tuple[str, str], Row]] = defaultdict(dict)
    for row in of_servers(rows):
        key = tuple(row[name] for name in (*SERVER_KEYS, "command"))
        found[key][row["provider"], row["mode"]] = row
    found = {
        key: by_setup
        for key, by_setup in found.items()
        if any(provider.startswith("stock-") for provider, _ in by_setup)
    }
    setups = setups_of(row for by_setup in found.values() for row in by_setup.values())
    heads = (" ".join(setup) for setup in setups)
    first = ("model", "workload", "at once", "more arguments")
    lines = table_head([*first, *heads, "best over stock's best"])
    for key, by_setup in found.items():
        model, workload, at_once, tokens, more, _ = key
        if tokens != "1":
            workload += f", {tokens} tokens of answer"
        column, is_time = ("ttft_p50_ms", True) if at_once == "1" else ("req_s", False)
        cells = []
        for setup in setups:
            row = by_setup.get(setup)
            text = "-" if row is None else row[column]
            if row is not None and is_time:
                text += f" ({row['ttft_p99_ms']})"
            cells.append(text)
        best = _best_over_stock(by_setup.values(), column, is_time)
        more = f"`{more}`" if more else ""
        lines.append(
            table_line([short_name(model), workload, at_once, more, *cells, best])
        )
    return written(lines)


def _best_over_stock(rows: Iterable[Row], column: str, is_time: bool) -> str:
    """Return how many times as good the best is; the rows are of one run."""
    values: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        values[row["provider"].startswith("stock-")].append(float(row[column]))
    if not all(values.values()):
        return ""
    if is_time:
        return f"{min(values[True]) / min(values[False]):.2f}"
    return f"{max(values[False]) / max(values[True]):.2f}"

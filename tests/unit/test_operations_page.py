# SPDX-License-Identifier: Apache-2.0
"""What the page for operators says of cost agrees with the rows."""

from collections.abc import Iterator

from _pages import H100_RESULTS, RESULTS, rows, text_of

import chosen_rows

PLUGIN, STOCK = chosen_rows.PLUGIN, chosen_rows.BASELINE
FOLDERS = (RESULTS, H100_RESULTS)


def pairs(name: str, *keys: str) -> Iterator[tuple[chosen_rows.Row, chosen_rows.Row]]:
    """Yield stock's engines, each with this package's of the same keys."""
    for folder in FOLDERS:
        found = {
            (row["provider"], *(row[key] for key in keys)): row
            for row in rows(name, "0.33.0", folder)
            if row["start_s"]
        }
        for (provider, *which), row in found.items():
            ours = found.get((PLUGIN, *which))
            if provider == STOCK and ours is not None:
                yield row, ours


def said() -> str:
    return text_of("operations.md").partition("## What it costs")[2]


def mib(row: chosen_rows.Row) -> int:
    return int(row["peak_memory_mib"])


def later_s(stock: chosen_rows.Row, ours: chosen_rows.Row) -> float:
    return float(ours["start_s"]) - float(stock["start_s"])


def test_the_memory_of_engines() -> None:
    eager = [
        (stock, ours)
        for stock, ours in pairs("engine", "config", "model")
        if ours["config"] == "eager"
    ]
    more = [mib(ours) - mib(stock) for stock, ours in eager]
    span = f"between {-min(more)} MiB less and {max(more)} MiB more than stock's"
    assert f"engines of {len(eager)} models held {span}" in said()
    graphs = {
        (folder, row["model"]): row
        for folder in FOLDERS
        for row in rows("engine", "0.33.0", folder)
        if row["config"] == "graphs"
    }
    by_graphs = [
        mib(row) - mib(ours)
        for _, ours in eager
        for (_, model), row in graphs.items()
        if model == ours["model"] and row["gpu"] == ours["gpu"]
    ]
    assert len(by_graphs) == 7 and "Seven of them held with graphs" in said()
    span = f"between {-min(by_graphs)} MiB less and {max(by_graphs)} MiB more"
    assert f"{span} than without" in said()
    ours = graphs[RESULTS, "google/gemma-4-31B-it"]
    assert f"Gemma 4's, {mib(ours)} in place of {mib(ours) - max(by_graphs)}" in said()


def test_the_time_at_the_start() -> None:
    quick = [
        (float(stock["start_s"]), later_s(stock, ours))
        for stock, ours in pairs("engine", "config", "model")
        if float(stock["start_s"]) < 20
    ]
    stocks, later = zip(*quick, strict=True)
    up = f"up in {min(stocks):.0f} to {max(stocks):.0f} s"
    assert f"{up}, this package took {min(later):.0f} to {max(later):.0f} s" in said()
    graphs = [
        (float(stock["start_s"]), later_s(stock, ours))
        for stock, ours in pairs("graphs", "commit", "config", "model")
        if ours["config"] == "automatic"
    ]
    stocks, later = zip(*graphs, strict=True)
    span = f"between {-min(later):.0f} s sooner and {max(later):.0f} s later"
    assert f"started {span} than stock's" in said()
    assert f"took {min(stocks):.0f} to {max(stocks):.0f} s" in said()
    ours, stock = (
        float(row["start_s"])
        for provider in (PLUGIN, STOCK)
        for row in rows("graphs", "0.33.0", H100_RESULTS)
        if (row["provider"], row["config"], row["commit"])
        == (provider, "automatic", "0faf412")
        and row["case"] == "random mixtures"
        and "Qwen3-VL" in row["model"]
    )
    assert f"H100s that were all busy) it was {ours:.0f} s and {stock:.0f}." in said()

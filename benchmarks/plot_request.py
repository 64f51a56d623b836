# SPDX-License-Identifier: Apache-2.0
"""Draws the parts of requests' lives, from the rows of bench_request.py alone.

    python benchmarks/plot_request.py benchmarks/results/h200/request.csv \\
        docs/figures/request_trace.svg --vllm 0.33.0 --bench trace
"""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from bench_request import BENCHES, WHOLE
from chosen_rows import Row, of_last_run
from figures import CLASS_COLOURS, draw_by_options, draw_part, say_where

NAMES = (
    "One request at a time, one token of answer. Medians of each part; the number at a "
    "bar's end is the median of the whole."
)
# A stage of both kinds of rows has one colour.
COLOURS = dict(
    zip(
        dict.fromkeys(stage for stages in BENCHES.values() for stage in stages),
        CLASS_COLOURS,
        strict=True,
    )
)


def draw_request(rows: Sequence[Row]) -> Any:
    """Draw a panel for each model and workload, a bar for each engine.

    Args:
        rows: Of one bench, one version of vLLM and one set of further arguments.
    """
    panels = list(dict.fromkeys((row["model"], row["workload"]) for row in rows))
    figure, all_axes = plt.subplots(
        len(panels),
        1,
        figsize=(9, 1.4 * len(panels) + 1),
        squeeze=False,
        layout="constrained",
    )
    for axes, panel in zip(all_axes[:, 0], panels, strict=True):
        mine = [row for row in rows if (row["model"], row["workload"]) == panel]
        _bars(axes, mine)
        axes.set_title(", ".join(panel), loc="left")
    all_axes[-1, 0].set_xlabel("ms (lower is better)")
    stages = BENCHES[rows[0]["bench"]]
    handles = [Patch(color=COLOURS[name], label=name) for name in stages]
    figure.legend(
        handles=handles, loc="outside upper right", ncols=min(6, len(handles))
    )
    say_where(figure, NAMES, rows)
    return figure


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    wholes = {_setup(row): row for row in rows if row["stage"] == WHOLE}
    longest = max(float(row["p50_ms"]) for row in wholes.values())
    for setup, whole in wholes.items():
        begin = 0.0
        for stage in BENCHES[whole["bench"]]:
            found = (r for r in rows if _setup(r) == setup and r["stage"] == stage)
            # Where parts overlap, nothing is left for the rest.
            length = max(0.0, float(next(found)["p50_ms"]))
            draw_part(axes, setup, begin, length, COLOURS[stage], 0.04 * longest)
            begin += length
        end = begin + 0.01 * longest
        text = f"{float(whole['p50_ms']):.3g}"
        axes.text(end, setup, text, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x")


def _setup(row: Row) -> str:
    return f"{row['provider']}, {row['mode']}"


def last_of_stages(rows: Sequence[Row]) -> list[Row]:
    """Return the last run of each workload: a row a part of each engine's requests."""
    return of_last_run(rows, ("model", "workload"), ("provider", "mode", "stage"))


def main() -> None:
    """Draw the figure."""
    options = {"bench": "request", "engine_args": ""}
    draw_by_options(__doc__, options, last_of_stages, draw_request)


if __name__ == "__main__":
    main()

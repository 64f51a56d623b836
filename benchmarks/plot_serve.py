# SPDX-License-Identifier: Apache-2.0
"""Draws what servers did, from the rows of bench_serve.py and nothing else.

    python benchmarks/plot_serve.py benchmarks/results/h200/serve.csv \\
        docs/figures/serve.svg --vllm 0.33.0 --serve-args "--api-server-count 4"
"""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from chosen_rows import Row, of_servers, setups_of
from figures import GREY, colour_of, draw_by_options, say_where

# Column, label, and whether a row is of one request at a time; else it is of as many at
# once as servers were ever asked.
PANELS = (
    ("ttft_p50_ms", "one request at a time: time to the first token, ms", True),
    ("req_s", "{} requests at once: requests a second", False),
)
NAMES = (
    "Hatched: without encoder CUDA graphs. Thin lines: the 99th percentile. Requests "
    "have one image, thumbnails 20 of 400 patches, a mixture\nis of these and others; "
    "a photograph has 4096 patches, a page 15376. {} asked for; language models have\n"
    "dummy weights. Each line is a run: compare within it."
)
# Of a server whose encoder runs without graphs.
HATCH = "//"


def draw_serve(rows: Sequence[Row]) -> Any:
    """Draw a row of panels a run, a group of bars a workload, a bar a server.

    Args:
        rows: Of one version of vLLM, one set of further arguments, and answers of one
            length.
    """
    runs = list(dict.fromkeys((row["model"], row["command"]) for row in rows))
    setups = setups_of(rows)
    workloads = sorted({row["workload"] for row in rows})
    most = max((row["concurrency"] for row in rows), key=int)
    figure, all_axes = plt.subplots(
        len(runs),
        len(PANELS),
        figsize=(9, 2.1 * len(runs) + 1.4),
        squeeze=False,
        layout="constrained",
    )
    for line, run in enumerate(runs):
        mine = [row for row in rows if (row["model"], row["command"]) == run]
        for axes, (column, label, is_alone) in zip(all_axes[line], PANELS, strict=True):
            at_once = "1" if is_alone else most
            shown = [row for row in mine if row["concurrency"] == at_once]
            _bars(axes, shown, column, setups_of(mine), workloads)
            axes.set_title(label.format(most), loc="left")
        all_axes[line, 0].set_ylabel(run[0].rpartition("/")[2])
    handles = [
        Patch(
            facecolor=colour_of(provider),
            hatch=HATCH if mode == "eager" else None,
            edgecolor="white",
            label=f"{provider}, {mode}",
        )
        for provider, mode in setups
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=4)
    tokens = rows[0]["answer_tokens"]
    asked = "One token is" if tokens == "1" else f"{tokens} tokens are"
    say_where(figure, NAMES.format(asked), rows)
    return figure


def _bars(
    axes: Any,
    rows: Sequence[Row],
    column: str,
    setups: Sequence[tuple[str, str]],
    workloads: Sequence[str],
) -> None:
    width = 0.8 / len(setups)
    for row in rows:
        index = setups.index((row["provider"], row["mode"]))
        where = workloads.index(row["workload"]) - 0.4 + width * (index + 0.5)
        value = float(row[column])
        axes.bar(
            where,
            value,
            width,
            color=colour_of(row["provider"]),
            hatch=HATCH if row["mode"] == "eager" else None,
            edgecolor="white",
        )
        top = float(row["ttft_p99_ms"]) if column == "ttft_p50_ms" else value
        axes.plot([where, where], [value, top], color=GREY, linewidth=0.8)
        axes.text(where, top, f"{value:.3g}", ha="center", va="bottom", fontsize=6)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_xlim(-0.5, len(workloads) - 0.5)
    axes.grid(axis="y")


def main() -> None:
    """Draw the figure."""
    draw_by_options(
        __doc__, {"serve_args": "", "answer_tokens": "1"}, of_servers, draw_serve
    )


if __name__ == "__main__":
    main()

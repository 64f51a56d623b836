# SPDX-License-Identifier: Apache-2.0
"""Draws the memory of soaked servers, from the rows of soak.py and nothing else.

    python benchmarks/plot_soak.py benchmarks/results/h200/soak_memory.csv \\
        docs/figures/soak.svg --vllm 0.33.0
"""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt

from chosen_rows import Row, newest
from figures import colour_of, draw_by_options, say_where

# Column and label.
PANELS = (("rss_mib", "host memory, GiB"), ("device_mib", "device memory, GiB"))
NAMES = (
    "Host memory: resident, of a server and all that it started. Requests are those of "
    "both servers together."
)
# Of the servers of a run, which have one colour.
LINES = ("-", "--", ":", "-.")


def draw_soak(rows: Sequence[Row]) -> Any:
    """Draw a column of panels a model, and in each a line a server.

    Args:
        rows: Of one version of vLLM and one set of further arguments.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, all_axes = plt.subplots(
        len(PANELS),
        len(models),
        figsize=(9, 2.2 * len(PANELS) + 1),
        squeeze=False,
        layout="constrained",
    )
    for column, model in enumerate(models):
        mine = [row for row in rows if row["model"] == model]
        for axes, (name, label) in zip(all_axes[:, column], PANELS, strict=True):
            for row, line in zip(mine, LINES, strict=False):
                axes.plot(
                    [int(done) for done in row["done"].split()],
                    [int(mib) / 1024 for mib in row[name].split()],
                    line,
                    color=colour_of(row["provider"]),
                    label=f"{row['provider']}, server {row['server']}",
                )
            axes.set_title(model, loc="left")
            axes.set_xlabel("requests")
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
            axes.grid(axis="y")
    handles, labels = all_axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
    say_where(figure, NAMES, rows)
    return figure


def last_of_servers(rows: Sequence[Row]) -> list[Row]:
    """Return each server's last row."""
    return newest(rows, lambda row: (row["model"], row["server"]))


def main() -> None:
    """Draw the figure."""
    draw_by_options(__doc__, {"serve_args": ""}, last_of_servers, draw_soak)


if __name__ == "__main__":
    main()

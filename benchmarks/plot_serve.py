# SPDX-License-Identifier: Apache-2.0
"""Draws what servers did, from the rows of bench_serve.py and nothing else.

    python benchmarks/plot_serve.py benchmarks/results/h200/serve.csv \\
        docs/figures/serve.svg --vllm 0.33.0 --serve-args "--api-server-count 4"
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from chosen_rows import Row, of_one_vllm, of_servers, read, setups_of
from plot import GREY, STYLE, colour_of, say_where, write_svg

# Column, label, and whether a row is of one request at a time.
PANELS = (
    ("ttft_p50_ms", "one request at a time: time to the first token, ms", True),
    ("req_s", "many requests at once: requests a second", False),
)
NAMES = (
    "Hatched: without encoder CUDA graphs. Thin lines: the 99th percentile. Requests "
    "have one image, thumbnails 20 of 400 patches;\na photograph has 4096 patches, a "
    "page 15376. One token is asked for; language models have dummy weights."
)
# Of a server whose encoder runs without graphs.
HATCH = "//"


def draw_serve(rows: Sequence[Row]) -> Any:
    """Draw a row of panels a model, a group of bars a workload, a bar a server.

    Args:
        rows: Of one version of vLLM and one set of further arguments.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    setups = setups_of(rows)
    workloads = sorted({row["workload"] for row in rows})
    figure, all_axes = plt.subplots(
        len(models),
        len(PANELS),
        figsize=(9, 2.1 * len(models) + 1.2),
        squeeze=False,
        layout="constrained",
    )
    for line, model in enumerate(models):
        mine = [row for row in rows if row["model"] == model]
        for axes, panel in zip(all_axes[line], PANELS, strict=True):
            _bars(axes, mine, panel, workloads)
            axes.set_title(panel[1], loc="left")
        all_axes[line, 0].set_ylabel(model.rpartition("/")[2])
    handles = [
        Patch(
            facecolor=colour_of(provider),
            hatch=HATCH if mode == "eager" else None,
            edgecolor="white",
            label=f"{provider}, {mode}",
        )
        for provider, mode in setups
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    say_where(figure, NAMES, rows)
    return figure


def _bars(
    axes: Any,
    rows: Sequence[Row],
    panel: tuple[str, str, bool],
    workloads: Sequence[str],
) -> None:
    column, _, is_alone = panel
    mine = [row for row in rows if (row["concurrency"] == "1") == is_alone]
    setups = setups_of(rows)
    width = 0.8 / len(setups)
    for row in mine:
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
        top = float(row["ttft_p99_ms"]) if is_alone else value
        axes.plot([where, where], [value, top], color=GREY, linewidth=0.8)
        axes.text(where, top, f"{value:.3g}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_xlim(-0.5, len(workloads) - 0.5)
    axes.grid(axis="y")


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--vllm", help="rows of this version; needed if there are more")
    parser.add_argument("--serve-args", default="", help="of servers with these")
    args = parser.parse_args()
    rows = of_one_vllm(read(args.source), args.vllm, args.source)
    rows = [row for row in rows if row["serve_args"] == args.serve_args]
    if not rows:
        raise SystemExit(f"{args.source} has no rows with {args.serve_args!r}")
    with plt.rc_context(STYLE):
        write_svg(draw_serve(of_servers(rows)), args.target)
    print(f"drew {args.target}")


if __name__ == "__main__":
    main()

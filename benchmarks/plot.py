# SPDX-License-Identifier: Apache-2.0
"""Draws the benchmarks' figures, from CSV files and nothing else.

    python benchmarks/plot.py encoder benchmarks/results/h200/encoder.csv \\
        docs/figures/encoder_graph.svg --modes graph \\
        --providers stock-flash_attn plugin plugin-fp8
    python benchmarks/plot.py attention benchmarks/results/h200/attention.csv \\
        docs/figures/attention.svg --benches qkv_attention --modes graph \\
        --providers stock-flash_attn plugin plugin-hopper_fp8
    python benchmarks/plot.py host benchmarks/results/h200/host.csv \\
        docs/figures/host.svg --providers stock-flash_attn plugin plugin-fp8

Bars beside each other are of one run: of the one that measured one of them last.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from chosen_rows import Row, check_names, of_last_run, of_one_vllm, read
from figures import (
    CLASS_COLOURS,
    GREY,
    STYLE,
    colour_of,
    draw_part,
    say_where,
    write_svg,
)

# Under every figure whose cases have such names.
CASE_NAMES = (
    "NxL: N images of L patches each; video16x1024: 16 frames of 1024 patches; "
    "mixed: six images of 256 to 8160 patches;\n"
    "win64xN: N windows of 64 patches. Bars: medians; whiskers: 20th and 80th "
    "percentile."
)
MODE_NAMES = {"graph": "CUDA graph replay", "eager": "eager mode"}
# The case of the towers in the figure of the host's time, and of the steps beside them.
HOST_CASE = "1x256"
HOST_NAMES = (
    "One image of 256 patches. A tower's time, until the call returns, is divided by "
    "its blocks, and includes\npatch embedding, metadata and merger; steps are those "
    "of one block alone. Bars: medians; whiskers: 20th and 80th percentile."
)
HOST_MODES = {"host": "", "fused_host": ", fused ops", "compiled_host": ", compiled"}
BENCH_NAMES = {
    "attention": "attention alone",
    "qkv_attention": "from the QKV projection, with rotary embedding",
}


def _groups(
    rows: Iterable[Row], *keys: str
) -> Iterable[tuple[tuple[str, ...], list[Row]]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups.items()


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


@dataclass(frozen=True)
class Span:
    """A bar: its case's label, and its percentiles from the least to the greatest."""

    case: str
    provider: str
    low: float
    middle: float
    high: float


def _bars(axes: Any, spans: Sequence[Span], providers: Sequence[str]) -> None:
    """Draw a group of bars per case, with the 20th to 80th percentile as whiskers."""
    cases = sorted(_unique(span.case for span in spans), key=_case_order)
    width = 0.8 / len(providers)
    for index, provider in enumerate(providers):
        mine = [span for span in spans if span.provider == provider]
        axes.bar(
            [cases.index(span.case) - 0.4 + width * (index + 0.5) for span in mine],
            [span.middle for span in mine],
            width,
            yerr=[
                [span.middle - span.low for span in mine],
                [span.high - span.middle for span in mine],
            ],
            error_kw={"ecolor": GREY, "elinewidth": 0.8},
            color=colour_of(provider),
            label=provider,
        )
    labels = [case.replace("video", "video\n", 1) for case in cases]
    axes.set_xticks(range(len(cases)), labels)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="y")


def _case_order(label: str) -> tuple[int, ...]:
    """One image first, then several, video, mixed and windows, by their lengths."""
    case = label.partition("\n")[0]
    kinds = ("1x", "", "video", "mixed", "win")
    kind = next(k for k in ("1x", "video", "mixed", "win", "") if case.startswith(k))
    return kinds.index(kind), *map(int, reversed(re.findall(r"\d+", case)))


def _relative_times(rows: Sequence[Row], first: str) -> list[Span]:
    """Return times as multiples of a contender's; cases differ 1000-fold.

    Raises:
        ValueError: A case's last run has no row of that contender.
    """
    spans = []
    for case in _unique(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        units = [float(row["p50_ms"]) for row in mine if row["provider"] == first]
        if not units:
            raise ValueError(
                f"{mine[0]['model']}, {case}: its last run, of commit "
                f"{mine[0]['commit']}, has no row of {first}, which is 1 in the figure"
            )
        unit = units[0]
        label = f"{case}\n{unit:.3g} ms"
        for row in mine:
            low, middle, high = (float(row[f"p{p}_ms"]) / unit for p in (20, 50, 80))
            spans.append(Span(label, row["provider"], low, middle, high))
    return spans


def _speeds(rows: Sequence[Row]) -> list[Span]:
    spans = []
    for row in rows:
        fast, middle, slow = (float(row[f"p{p}_ms"]) for p in (20, 50, 80))
        top = float(row["tflops"])
        # In this order, equal times are equal speeds.
        ends = top * (middle / slow), top, top * (middle / fast)
        spans.append(Span(row["case"], row["provider"], *ends))
    return spans


def _draw(
    rows: Sequence[Row],
    panels: Sequence[tuple[str, list[Row]]],
    spans_of: Callable[[Sequence[Row]], list[Span]],
    label: str,
) -> Any:
    providers = _unique(row["provider"] for row in rows)
    figure, all_axes = plt.subplots(
        len(panels),
        1,
        figsize=(9, 2.6 * len(panels) + 0.8),
        squeeze=False,
        layout="constrained",
    )
    for axes, (title, part) in zip(all_axes[:, 0], panels, strict=True):
        _bars(axes, spans_of(part), providers)
        axes.set_title(title, loc="left")
        axes.set_ylabel(label)
    # Not those of a panel: bars that it lacks have no colour in its legend.
    handles = [
        Patch(color=colour_of(provider), label=provider) for provider in providers
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    say_where(figure, CASE_NAMES, rows)
    return figure


def draw_encoder(rows: Sequence[Row]) -> Any:
    """Draw times of towers: a panel per model and mode, a group of bars per case.

    Raises:
        ValueError: As `_relative_times`.
    """
    first = rows[0]["provider"]
    rows = of_last_run(rows, ("model", "mode", "dtype", "case"), ("provider",))
    panels = [
        (
            (
                f"{model}, {MODE_NAMES.get(mode, mode)}, {dtype}; under each case: "
                f"the time of {first}"
            ),
            part,
        )
        for (model, mode, dtype), part in sorted(
            _groups(rows, "model", "mode", "dtype"), key=lambda group: group[0]
        )
    ]
    spans_of = partial(_relative_times, first=first)
    return _draw(rows, panels, spans_of, f"time, {first} = 1\n(lower is better)")


def draw_attention(rows: Sequence[Row]) -> Any:
    """Draw TFLOP/s of the op: a panel per bench, head dim, dtype and mode."""
    compared = ("bench", "model", "head_dim", "dtype", "mode", "case")
    rows = of_last_run(rows, compared, ("provider",))
    panels = [
        (
            (
                f"{BENCH_NAMES.get(bench, bench)}, head dim {head_dim}, {dtype}, "
                f"{MODE_NAMES.get(mode, mode)}"
            ),
            part,
        )
        for (bench, head_dim, dtype, mode), part in _groups(
            rows, "bench", "head_dim", "dtype", "mode"
        )
    ]
    return _draw(rows, panels, _speeds, "TFLOP/s (higher is better)")


def draw_host(rows: Sequence[Row]) -> Any:
    """Draw the host's time for a block, of towers and by step: a panel per model.

    Raises:
        ValueError: Rows of towers or of steps are missing, or there are more steps than
            colours.
    """
    is_tower = {"bench": "tower_host", "case": HOST_CASE}.items()
    towers = [row for row in rows if is_tower <= row.items()]
    towers = of_last_run(towers, ("model", "dtype"), ("provider", "mode"))
    steps = [row for row in rows if row["bench"] == "step_host"]
    steps = of_last_run(steps, ("model", "dtype"), ("provider", "mode", "case"))
    if not towers or not steps:
        raise ValueError(
            f"the figure needs rows of tower_host at {HOST_CASE} and of step_host; "
            "measure both with bench_host.py"
        )
    names = _unique(row["case"] for row in steps)
    if len(names) > len(CLASS_COLOURS):
        raise ValueError(f"{len(names)} steps, but {len(CLASS_COLOURS)} colours")
    colours = dict(zip(names, CLASS_COLOURS, strict=False))
    panels = list(_groups([*towers, *steps], "model"))
    figure, all_axes = plt.subplots(
        len(panels),
        1,
        figsize=(9, 1.8 * len(panels) + 1),
        squeeze=False,
        layout="constrained",
    )
    for axes, ((model,), part) in zip(all_axes[:, 0], panels, strict=True):
        _host_bars(axes, part, colours)
        axes.set_title(model, loc="left")
        axes.set_xlabel("host time for a block, µs (lower is better)")
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=5)
    say_where(figure, HOST_NAMES, [*towers, *steps])
    return figure


def _host_bars(axes: Any, rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    """Draw a bar of each tower in its contender's colour, then one of the steps."""
    longest = max(_us(row, 50) for row in rows)
    # Of each bar.
    totals: dict[str, float] = {}
    ends: dict[str, float] = {}
    for row in rows:
        low, middle, high = (_us(row, percent) for percent in (20, 50, 80))
        if row["bench"] == "tower_host":
            name = row["provider"] + HOST_MODES[row["mode"]]
            spread = [[middle - low], [high - middle]]
            colour = colour_of(row["provider"])
            axes.barh(name, middle, xerr=spread, color=colour, ecolor=GREY)
            totals[name], ends[name] = middle, high
            continue
        name, colour = "plugin's steps", colours[row["case"]]
        begin = totals.get(name, 0.0)
        draw_part(axes, name, begin, middle, colour, 0.04 * longest)
        totals[name] = ends[name] = begin + middle
    for name, total in totals.items():
        where = ends[name] + 0.01 * longest
        axes.text(where, name, f"{total:.3g}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x")


def _us(row: Row, percent: int) -> float:
    return float(row[f"p{percent}_ms"]) * 1e3


DRAWINGS = {"encoder": draw_encoder, "attention": draw_attention, "host": draw_host}


def draw(
    kind: str,
    source: Path,
    target: Path,
    shown: Mapping[str, Sequence[str] | None] = {},
    vllm: str | None = None,
) -> None:
    """Draw one figure.

    Args:
        kind: A key of `DRAWINGS`.
        source: Results file.
        target: SVG file to write.
        shown: By a column of the file, what is shown of it; None for all.
        vllm: Of which version; needed if there are more.

    Raises:
        SystemExit: As `read`, `of_one_vllm` and `check_names`.
        ValueError: The results file has no rows of these.
    """
    wanted = {column: values for column, values in shown.items() if values}
    rows = of_one_vllm(read(source), vllm, source)
    check_names(rows, wanted, source)
    rows = [
        row
        for row in rows
        if all(row[column] in values for column, values in wanted.items())
    ]
    if not rows:
        names = ", ".join(itertools.chain(*wanted.values()))
        raise ValueError(f"{source} has no rows of {names}")
    with plt.rc_context(STYLE):
        write_svg(DRAWINGS[kind](rows), target)


def main() -> None:
    """Draw one figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=DRAWINGS)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--modes", nargs="+", help="modes to show; default all")
    parser.add_argument("--providers", nargs="+", help="default all")
    parser.add_argument("--benches", nargs="+", help="default all")
    parser.add_argument("--models", nargs="+", help="default all")
    parser.add_argument("--vllm", help="rows of this version; needed if there are more")
    args = parser.parse_args()
    shown = {
        "mode": args.modes,
        "provider": args.providers,
        "bench": args.benches,
        "model": args.models,
    }
    draw(args.kind, args.source, args.target, shown, args.vllm)
    print(f"drew {args.target}")


if __name__ == "__main__":
    main()

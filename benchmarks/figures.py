# SPDX-License-Identifier: Apache-2.0
"""What the scripts share that draw figures from rows: colours, style, and the file.

Colours are Okabe and Ito's, which people with any colour vision tell apart, and a
contender has the same one in every figure; text and lines are a grey that shows on
white and on black, and the background is transparent.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from chosen_rows import Row, of_one_vllm, read

GREY = "#767676"
COLOURS = {
    "stock-flash_attn": "#999999",
    "stock-flash_attn4": "#BBBBBB",
    "stock-flashinfer": "#DDDDDD",
    "stock-torch_sdpa": "#666666",
    "plugin": "#0072B2",
    "plugin-fp8": "#D55E00",
    "stock-flash_attn-q8": "#8A8A8A",
    "stock-flash_attn4-q8": "#ABABAB",
    "stock-flashinfer-q8": "#CCCCCC",
    "plugin-q8": "#1B5E20",
    "plugin-fp8-q8": "#880E4F",
    "plugin-hopper_bf16": "#8C564B",
    "plugin-hopper_fp8": "#E69F00",
    "plugin-triton_fp8": "#CC79A7",
    "plugin-triton": "#56B4E9",
    "plugin-flash_attn": "#009E73",
    "plugin-flash_attn_4": "#004D3B",
    "plugin-cudnn": "#F0E442",
    "plugin-cudnn_fp8": "#8B7D00",
    "plugin-triton_window": "#7B3294",
    "plugin-reference": "#000000",
    "plugin-reference_fp8": "#444444",
}
# Tol's muted colours, none of which is a contender's: of kernels' classes and the like.
CLASS_COLOURS = (
    "#882255",
    "#DDCC77",
    "#332288",
    "#88CCEE",
    "#44AA99",
    "#CC6677",
    "#999933",
    "#117733",
    "#AA4499",
)
STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",
    # Element names that do not change from run to run.
    "svg.hashsalt": "vllm-flashinfer-vit",
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "savefig.transparent": True,
}


def colour_of(provider: str) -> str:
    """Return a contender's colour.

    Raises:
        ValueError: It has none.
    """
    if provider not in COLOURS:
        raise ValueError(f"{provider!r} has no colour: give it one in COLOURS")
    return COLOURS[provider]


def text_colour(background: str) -> str:
    """Return black or white, whichever is easier to read on a colour `#RRGGBB`."""
    channels = (int(background[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    luminance = sum(
        w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
    )
    # Where the contrast with white equals the one with black, by WCAG 2.
    return "black" if luminance > 0.179 else "white"


def draw_part(
    axes: Any, bar: str, begin: float, length: float, colour: str, room: float
) -> None:
    """Draw a part of a horizontal bar, and its length in it where there is room.

    Args:
        axes: Where.
        bar: The bar's name.
        begin: Where the part before it ends.
        length: Of the part.
        colour: Of the part, `#RRGGBB`.
        room: What a number takes.
    """
    axes.barh(bar, length, left=begin, color=colour)
    if length > room:
        axes.text(
            begin + length / 2,
            bar,
            f"{length:.3g}",
            ha="center",
            va="center",
            color=text_colour(colour),
            fontsize=7,
        )


def say_where(figure: Any, names: str, rows: Sequence[Row]) -> None:
    """Write under a figure what its names mean, and what measured its rows."""
    where = dict.fromkeys(
        f"{row['gpu']}, vLLM {row['vllm']}, torch {row['torch']}, FlashInfer "
        f"{row['flashinfer']}, QuACK {row['quack']}, cuDNN {row['cudnn']}, "
        f"commit {row['commit']}"
        for row in rows
    )
    figure.supxlabel("\n".join([names, *where]), fontsize=7)


def write_svg(figure: Any, target: Path) -> None:
    """Write a figure; the same rows give the same file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, format="svg", metadata={"Date": None})
    plt.close(figure)


def draw_by_options(
    doc: str | None,
    options: Mapping[str, str],
    last_of: Callable[[Sequence[Row]], Sequence[Row]],
    drawing: Callable[[Sequence[Row]], Any],
) -> None:
    """Be the main function of a script that draws rows of one kind.

    Args:
        doc: What the script says of itself.
        options: Columns that are options, too, and the value that is drawn by default.
        last_of: Leaves out what was measured again.
        drawing: Makes the figure.

    Raises:
        SystemExit: There are no such rows.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--vllm", help="rows of this version; needed if there are more")
    for column, value in options.items():
        text = "rows with this; default: %(default)r"
        parser.add_argument(f"--{column.replace('_', '-')}", default=value, help=text)
    args = parser.parse_args()
    rows = of_one_vllm(read(args.source), args.vllm, args.source)
    wanted = {column: getattr(args, column) for column in options}
    rows = [row for row in rows if all(row[name] == wanted[name] for name in wanted)]
    if not rows:
        raise SystemExit(f"{args.source} has no rows with {wanted}")
    with plt.rc_context(STYLE):
        write_svg(drawing(last_of(rows)), args.target)
    print(f"drew {args.target}")

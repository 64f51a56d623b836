# SPDX-License-Identifier: Apache-2.0
"""Render `images/page.png`: an A4 page at 150 dpi with text, formulas and a table."""

import io
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

A4_INCHES = (8.27, 11.69)
DPI = 150

TITLE = "Attention in a vision encoder, in one page"
PATCHES = (
    "An image is cut into square patches, 14 or 16 pixels wide. Every patch becomes\n"
    "one row of a matrix of T rows, and several images are simply stacked. Prefix\n"
    "sums say where each sequence starts: with images of 1024, 400 and 256 patches\n"
    "the array is [0, 1024, 1424, 1680]. A patch attends to its own image only."
)
COMPUTED = (
    "For each head, with queries Q, keys K and values V of head dim D, row by row:"
)
SOFTMAX = (
    r"$O = \mathrm{softmax}\left(\frac{Q K^{\top}}{\sqrt{D}}\right) V,"
    r"\qquad \mathrm{softmax}(s)_j = \frac{e^{\,s_j - m}}{\sum_k e^{\,s_k - m}},"
    r"\quad m = \max_k s_k$"
)
COSTS = (
    "A sequence of n patches takes four operations per score and element of the\n"
    "head dim, two for Q K and two for P V: twice the patches, four times the cost."
)
FLOPS = r"$F = 4\,H D \sum_{i=1}^{N} n_i^{\,2}$"
WINDOWS = (
    "Most layers of some models look at windows of 8 x 8 patches. Then every n is\n"
    "at most 64, the sum grows in step with the area of the image, and moving data\n"
    "costs more than arithmetic. Windows at the right and lower edge are smaller;\n"
    "their lengths differ, but the prefix sums describe them just as well."
)
SECTIONS = [
    ("1  Patches and sequences", PATCHES, None),
    ("2  What is computed", COMPUTED, SOFTMAX),
    ("3  What it costs", COSTS, FLOPS),
    ("4  Windows", WINDOWS, None),
]
LAST_HEADING = "6  Padding"
LAST = (
    "A captured graph replays one shape. Rows behind the last patch are written as\n"
    "zeros, and an offset that falls back to zero stands for an empty sequence."
)
TABLE_HEAD = ["image", "pixels", "patches of 14", "windows", "patches of 16"]
TABLE = [
    ["icon", "256 x 256", "324", "9", "256"],
    ["photograph", "720 x 1280", "4,784", "84", "3,520"],
    ["full screen", "1080 x 1920", "10,764", "180", "8,160"],
    ["A4 at 200 dpi", "1654 x 2339", "19,824", "315", "15,184"],
    ["4K frame", "2160 x 3840", "42,196", "700", "32,640"],
]


def main() -> None:
    figure = Figure(figsize=A4_INCHES, dpi=DPI, facecolor="white")
    figure.text(0.10, 0.94, TITLE, size=19, weight="bold", family="serif")
    y = 0.905
    for heading, body, formula in SECTIONS:
        figure.text(0.10, y, heading, size=13, weight="bold", family="serif")
        y -= 0.012
        figure.text(0.10, y, body, size=11, family="serif", va="top", linespacing=1.35)
        y -= 0.0195 * (body.count("\n") + 1) + 0.012
        if formula:
            figure.text(0.5, y - 0.018, formula, size=13, ha="center", va="center")
            y -= 0.052
        y -= 0.022
    heading = "5  Sizes met in practice"
    figure.text(0.10, y, heading, size=13, weight="bold", family="serif")
    axes = figure.add_axes((0.10, y - 0.20, 0.80, 0.19))
    axes.axis("off")
    table = axes.table(TABLE, colLabels=TABLE_HEAD, loc="center", cellLoc="center")
    table.auto_set_font_size(False)
    table.set_fontsize(10)
    table.scale(1, 1.6)
    y -= 0.235
    figure.text(0.10, y, LAST_HEADING, size=13, weight="bold", family="serif")
    figure.text(
        0.10, y - 0.012, LAST, size=11, family="serif", va="top", linespacing=1.35
    )
    figure.text(0.5, 0.04, "1", size=10, ha="center", family="serif")
    path = Path(__file__).parent / "images" / "page.png"
    rendered = io.BytesIO()
    figure.savefig(rendered)
    Image.open(rendered).convert("L").save(path, optimize=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The plot of `calibrate`: each layer's largest absolute values, as SVG."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_flashinfer_vit.commands.images import JobError
from vllm_flashinfer_vit.fp8.scale_files import QKV


def import_figure(path: Path) -> Any:
    """Return matplotlib's class of figures, for a plot that is drawn hours later.

    Args:
        path: The file of the plot.

    Raises:
        JobError: The file is to be of another format, or there is no matplotlib.
    """
    if path.suffix.lower() != ".svg":
        raise JobError(f"{path} cannot be the plot, which is SVG: end its name in .svg")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise JobError(
            f"a plot needs matplotlib, which is not installed ({error}); "
            'pip install "matplotlib>=3.8", as the extra `plot` does, or leave --plot '
            "out"
        ) from error
    return Figure


def draw(figure_class: Any, title: str, amax: Sequence[QKV]) -> bytes:
    """Draw the plot.

    Args:
        figure_class: From `import_figure`.
        title: Stands above it.
        amax: Largest absolute values by layer.

    Returns:
        The file's content.
    """
    figure = figure_class(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for part in QKV._fields:
        values = [getattr(layer, part) for layer in amax]
        axes.plot(values, marker="o", markersize=3, label=part)
    axes.set_yscale("log")
    axes.set_xlabel("attention layer")
    axes.set_ylabel("largest absolute value")
    # Names of folders may hold what no SVG can, and "$", which begins a formula.
    shown = "".join(c if c.isprintable() else "?" for c in title)
    axes.set_title(shown, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="svg")
    return content.getvalue()

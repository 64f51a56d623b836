# SPDX-License-Identifier: Apache-2.0
"""Make a file of FP8 scales from images, and say how good they are.

The images go through the real tower in its own dtype twice: once for the largest
absolute values of each layer's rotated q and k, and of v; once to attend in FP8 with
the resulting scales beside the layer's own attention, on the same inputs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.commands.job import (
    Inputs,
    JobError,
    check_output,
    device_name,
    image_paths,
    image_processor,
    pick_device,
    pick_dtype,
    progress_bar,
    quiet_vllm,
    read_patches,
    resolve_tower,
    versions,
)
from vllm_flashinfer_vit.fp8 import scale_files as scales
from vllm_flashinfer_vit.fp8.scale_files import QKV, ScaleFile
from vllm_flashinfer_vit.kernels.formats import E4M3_MAX
from vllm_flashinfer_vit.settings import FP8_KERNELS, KernelName
from vllm_flashinfer_vit.towers.tower import (
    Tower,
    TowerSpec,
    build_tower,
    check_backend,
)

_BUILD_STEPS = 2


@dataclass(frozen=True)
class Options(Inputs):
    """What to calibrate, and how; see also `Inputs`.

    Attributes:
        output: The file of scales to write.
        margin: Head room over the largest absolute value, as
            `--mm-encoder-fp8-scale-save-margin`.
        merge: A file of scales to widen, or None.
        plot: An SVG file to draw, or None.
    """

    output: Path = Path("fp8_scales.json")
    margin: float = 1.5
    merge: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True)
class LayerReport:
    """One attention layer.

    Attributes:
        name: Its name in vLLM.
        amax: Largest absolute values that the scales are made of.
        scale: What one e4m3 unit stands for.
        clip_rate: Largest part of q's, k's or v's values beyond the scale's range.
        relative_error: Norm of the difference between FP8 attention and the layer's
            own, over the norm of the latter.
    """

    name: str
    amax: QKV
    scale: QKV
    clip_rate: float
    relative_error: float


@dataclass(frozen=True)
class Report:
    """The result of `run`; see `render` and `to_json`."""

    model: str
    depth: int
    full_depth: int
    dtype: str
    device: str
    kernel: str
    images: int
    margin: float
    layers: Sequence[LayerReport]
    notes: Sequence[str]
    versions: Mapping[str, str]
    output: str
    plot: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return asdict(self)


def run(options: Options, console: Console | None = None) -> Report:
    """Calibrate, and write the files.

    Args:
        options: What to do.
        console: Draws the progress bar; None draws none.

    Raises:
        TowerError: An option, image or checkpoint cannot be used.
        NotServedError: This machine cannot run FLASHINFER, or not in FP8.
        ScaleError: The file to merge cannot be used.
    """
    if not (math.isfinite(options.margin) and options.margin > 0):
        raise JobError(f"margin is {options.margin}; it must be positive")
    figure_class = None if options.plot is None else _import_figure()
    check_output(options.output)
    check_output(options.plot)
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    paths = image_paths(options.images)
    old = None if options.merge is None else scales.read(options.merge)
    spec, max_pixels, notes = resolve_tower(options, device)
    with progress_bar(console) as progress, quiet_vllm():
        bar = progress.add_task("build the tower", total=_BUILD_STEPS + 2 * len(paths))
        processor = image_processor(spec, max_pixels)
        check_backend("FLASHINFER", device, dtype)
        tower = build_tower(
            spec, backend="FLASHINFER", dtype=dtype, device=device, seed=options.seed
        )
        head_dims = _head_dims(tower)
        kernel = _fp8_kernel(tower, max(head_dims.values()))
        progress.advance(bar, _BUILD_STEPS)

        def encode_all(what: str) -> None:
            for path, name in paths:
                progress.update(bar, description=f"{what} {name}")
                patches = read_patches(path, name, processor)
                _encode(tower, patches.pixel_values, patches.grid)
                progress.advance(bar)

        amax = {name: torch.zeros(3, device=device) for name in head_dims}
        with _watching(tower, partial(_widen, amax)):
            encode_all("look at")
        new = scales.from_amax(
            {name: (QKV(*x.tolist()), head_dims[name]) for name, x in amax.items()},
            options.margin,
            _made_by(options, spec, len(paths)),
        )
        if old is not None:
            notes += _differences(old, new, options.merge)
            new = scales.merge(old, new)
        check = _Check(new, kernel, device)
        with _watching(tower, check.attend):
            encode_all("attend in FP8 to")
    scales.write(new, options.output)
    layers = [check.report(name, new) for name in head_dims]
    report = Report(
        model=new.made_by["model"],
        depth=spec.depth,
        full_depth=spec.full_depth,
        dtype=str(dtype).removeprefix("torch."),
        device=device_name(device),
        kernel=kernel,
        images=len(paths),
        margin=options.margin,
        layers=layers,
        notes=notes,
        versions=versions(),
        output=str(options.output),
        plot=None if options.plot is None else str(options.plot),
    )
    if figure_class is not None:
        _draw(report, figure_class, options.plot)
    return report


def render(report: Report, console: Console) -> None:
    """Print a report as a table, a row for each layer."""
    table = Table(
        title=f"{report.model}, {report.depth} of {report.full_depth} blocks, "
        f"{report.images} images, {report.kernel} against {report.dtype}, "
        f"{report.device}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("layer", overflow="fold")
    for column in ("q", "k", "v", "clipped", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for layer in report.layers:
        table.add_row(
            layer.name,
            *(f"{x:.4g}" for x in layer.amax),
            f"{layer.clip_rate:.1e}" if layer.clip_rate else "0",
            f"{layer.relative_error:.1e}",
        )
    console.print(table)
    console.print(
        f"q, k, v: largest absolute values; a scale is one over {E4M3_MAX:.0f}, times "
        f"the margin of {report.margin:g}. clipped: the largest part of q, k or v "
        "beyond it. error: of the layer's attention, relative."
    )
    for note in report.notes:
        console.print(note)
    console.print(f"Scales saved to {report.output}.", soft_wrap=True)
    if report.plot is not None:
        console.print(f"Plot saved to {report.plot}.", soft_wrap=True)


def _made_by(options: Options, spec: TowerSpec, images: int) -> dict[str, str]:
    weights = " (random weights)" if options.random_weights else ""
    return {
        "command": f"vllm-flashinfer-vit calibrate --model {options.model} "
        f"--margin {options.margin:g}",
        "version": __version__,
        "vllm": versions()["vllm"],
        "model": f"{spec.model}{weights}",
        "method": f"abs-max of {images} images",
    }


def _head_dims(tower: Tower) -> dict[str, int]:
    return {str(layer.layer_name): int(layer.head_size) for layer in _layers(tower)}


def _layers(tower: Tower) -> list[Any]:
    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

    layers = tower.attention_layers().values()
    return [layer for layer in layers if isinstance(layer, FlashInferViTAttention)]


def _fp8_kernel(tower: Tower, head_dim: int) -> KernelName:
    from vllm_flashinfer_vit.fp8.policy import resolve_fp8

    with tower.running():
        choices = resolve_fp8(head_dim, tower.dtype, None)
    found = [c.kernel for c in choices if c.kernel in FP8_KERNELS]
    # Where FP8 pays at no length, the portable kernel shows what it would cost.
    return found[-1] if found else "triton_fp8"


def _encode(tower: Tower, pixels: torch.Tensor, grid: tuple[int, int, int]) -> None:
    try:
        tower.encode(pixels, [grid])
    except torch.OutOfMemoryError as error:
        raise JobError(
            f"{device_name(tower.device)} has too little memory ({error}); use a "
            "smaller max_pixels"
        ) from error


@contextmanager
def _watching(tower: Tower, watch: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Have `watch(layer, attend, ...)` called where layers call `attend(...)`."""
    layers = _layers(tower)
    for layer in layers:
        layer.attend = partial(watch, layer, layer.attend)
    try:
        yield
    finally:
        for layer in layers:
            del layer.attend


def _rotated(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from vllm_flashinfer_vit.ops.attention import rotate

    if cos is not None and sin is not None:
        q, k = rotate(q, k, cos, sin)
    return q, k, v


def _widen(
    amax: Mapping[str, torch.Tensor], layer: Any, attend: Callable[..., Any], *args: Any
) -> torch.Tensor:
    """Take a layer's largest finite absolute values into account."""
    parts = (x.float().abs() for x in _rotated(*args[:5]))
    rows = [x.nan_to_num(nan=0.0, posinf=0.0).max() for x in parts]
    seen = amax[layer.layer_name]
    torch.maximum(seen, torch.stack(rows), out=seen)
    return attend(*args)


class _Check:
    """Attends in FP8 beside the layers, on their inputs; adds up the differences."""

    def __init__(
        self, file: ScaleFile, kernel: KernelName, device: torch.device
    ) -> None:
        self._plan = f"*:{kernel}"
        self._scales = {
            name: torch.tensor(layer.scale, dtype=torch.float32, device=device)
            for name, layer in file.layers.items()
        }
        # Of q, k, v: values that are clipped, and all; then squares of the error and
        # of the output.
        self._sums = {
            name: torch.zeros(8, dtype=torch.float64, device=device)
            for name in file.layers
        }

    def attend(
        self, layer: Any, attend: Callable[..., Any], *args: Any
    ) -> torch.Tensor:
        """Return what the layer's own attention does, and compare FP8 with it."""
        from vllm_flashinfer_vit.ops import attention as ops

        out = attend(*args)
        scales = self._scales[layer.layer_name]
        sums = []
        for x, limit in zip(_rotated(*args[:5]), scales * E4M3_MAX, strict=True):
            sums += [(x.abs() > limit).sum(), torch.tensor(x.numel())]
        # Without cu_seqlens, the sequences' length is the eighth argument.
        seq_len = args[7] if len(args) > 7 else 0
        fp8_out = ops.fp8_attention(
            *args[:7],
            seq_len,
            layer.scale,
            self._plan,
            "static",
            False,
            None,
            None,
            None,
            scales,
        )
        for x in (fp8_out.double() - out.double(), out.double()):
            sums.append(x.square().sum())
        total = self._sums[layer.layer_name]
        total += torch.stack([x.to(total) for x in sums])
        return out

    def report(self, name: str, file: ScaleFile) -> LayerReport:
        """Say how a layer did."""
        *clipped, error, square = self._sums[name].tolist()
        rates = (a / b for a, b in zip(clipped[::2], clipped[1::2], strict=True) if b)
        return LayerReport(
            name=name,
            amax=file.layers[name].amax,
            scale=file.layers[name].scale,
            clip_rate=max(rates, default=0.0),
            relative_error=math.sqrt(error / square) if square else 0.0,
        )


def _differences(old: ScaleFile, new: ScaleFile, path: Path | None) -> list[str]:
    """Say where what a file can represent is less than what was seen."""
    ratios = {
        f"{part} of {name}": getattr(layer.amax, part)
        / (getattr(old.layers[name].scale, part) * E4M3_MAX)
        for name, layer in new.layers.items()
        if name in old.layers
        for part in QKV._fields
    }
    short = [what for what, ratio in ratios.items() if ratio > 1]
    if old.is_upstream:
        origin = (
            f"{path} was written by vLLM itself: its scales come from signed maxima "
            "of 16 passes, dummy images included, times an unknown margin. What they "
            "can represent is taken for an abs-max."
        )
    else:
        origin = f"{path} is taken into account: {old.made_by['method']}."
    notes = [origin]
    if short:
        worst = max(ratios, key=lambda what: ratios[what])
        notes.append(
            f"Its scales cut off {len(short)} of {len(ratios)} tensors here; the worst "
            f"is {worst}, {ratios[worst]:.2g} times beyond."
        )
    return notes


def _import_figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise JobError(
            f"a plot needs matplotlib, which is not installed ({error}); "
            'pip install "vllm-flashinfer-vit[plot]", or leave --plot out'
        ) from error
    return Figure


def _draw(report: Report, figure_class: Any, path: Path | None) -> None:
    figure = figure_class(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for part in QKV._fields:
        values = [getattr(layer.amax, part) for layer in report.layers]
        axes.plot(values, marker="o", markersize=3, label=part)
    axes.set_yscale("log")
    axes.set_xlabel("attention layer")
    axes.set_ylabel("largest absolute value")
    axes.set_title(f"{report.model}, {report.images} images")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="svg")

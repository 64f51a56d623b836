# SPDX-License-Identifier: Apache-2.0
"""Make a file of FP8 scales from images, and say how good they are.

The images go through the real tower in its own dtype twice: once for the largest
absolute values of each layer's rotated q and k, and of v; once to attend in FP8 with
the resulting scales beside the layer's own attention, on the same inputs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.choices.lookup import PORTABLE_FP8
from vllm_flashinfer_vit.choices.usable import NotServedError
from vllm_flashinfer_vit.commands.calibrate_plot import draw, import_figure
from vllm_flashinfer_vit.commands.images import (
    ImageFile,
    JobError,
    check_any,
    image_processor,
    read_patches,
)
from vllm_flashinfer_vit.commands.job import (
    BUILD_STEPS,
    Inputs,
    Job,
    JobReport,
    build,
    memory_hint,
    prepare,
    progress_bar,
    report_header,
)
from vllm_flashinfer_vit.commands.quiet import quiet_vllm
from vllm_flashinfer_vit.fp8 import scale_files as scales
from vllm_flashinfer_vit.fp8.scale_files import QKV, ScaleError, ScaleFile
from vllm_flashinfer_vit.kernels.catalog import fp8_names
from vllm_flashinfer_vit.kernels.formats import E4M3_MAX, DeviceScales, dtype_name
from vllm_flashinfer_vit.machine import files
from vllm_flashinfer_vit.machine.versions import vllm_version
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.ops.plan import Plan
from vllm_flashinfer_vit.settings import Settings
from vllm_flashinfer_vit.towers.built import Built

Attend = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class Options(Inputs):
    """What to calibrate, and how; see also `Inputs`.

    Attributes:
        output: The file of scales to write.
        margin: Head room over the largest absolute value, as
            `--mm-encoder-fp8-scale-save-margin`.
        merge: A file of scales to widen, or None; may be `output`.
        plot: An SVG file to draw, or None; its name ends in `.svg`.
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
class Report(JobReport):
    """The result of `run`; see also `JobReport`.

    Attributes:
        kernel: The FP8 kernel that the error is of.
        images: How many were seen.
        margin: See `Options`.
        layers: What came out.
        output: The file of scales.
        plot: The file of the plot, or None.
    """

    kernel: str
    images: int
    margin: float
    layers: Sequence[LayerReport]
    output: str
    plot: str | None


def run(options: Options, console: Console | None = None) -> Report:
    """Calibrate, and write the files.

    The output is locked meanwhile: a second run with it ends at once, and an engine
    that saves scales to it does not.

    Args:
        options: What to do.
        console: Draws the progress bar; None draws none.

    Raises:
        TowerError: An option, image or checkpoint cannot be used.
        FileError: A file cannot be written, another process is making it, or the
            output holds something else than scales. The scales are there if it is the
            plot that cannot be written in the end; the message says so.
        NotServedError: This machine cannot run FLASHINFER, or not in FP8.
        ScaleError: The margin or the file to merge cannot be used.
    """
    scales.check_margin(options.margin, "--margin")
    figure = None if options.plot is None else import_figure(options.plot)
    job = prepare(options)
    files.check(options.output, keep=job.reads)
    files.check_replaceable(options.output, "FP8 scales", scales.read)
    if options.plot is not None:
        merge = [] if options.merge is None else [options.merge]
        files.check(options.plot, keep=[*job.reads, options.output, *merge])
    with files.locked(options.output):
        report, new = _calibrate(options, job, console)
        scales.write(new, options.output)
    if figure is not None and options.plot is not None:
        title = f"{report.model}, {report.images} images"
        amax = [layer.amax for layer in report.layers]
        try:
            files.write(options.plot, draw(figure, title, amax))
        except files.FileError as error:
            raise files.FileError(
                f"{error}; the scales were saved to {options.output}"
            ) from error
    return report


def _calibrate(
    options: Options, job: Job, console: Console | None
) -> tuple[Report, ScaleFile]:
    old: tuple[ScaleFile, Path] | None = None
    if options.merge is not None:
        old = scales.read(options.merge), options.merge
        scales.check_model(*old, job.spec.name)
    notes: list[str] = []
    failures: list[str] = []
    with progress_bar(console) as progress, quiet_vllm():
        total = BUILD_STEPS + 2 * len(job.files)
        bar = progress.add_task("build the tower", total=total)
        processor = image_processor(job.spec, job.max_pixels)
        tower = build(
            job.spec,
            backend="FLASHINFER",
            dtype=job.dtype,
            device=job.device,
            seed=options.seed,
            image_processor=processor,
        )
        kwargs = tower.processor_kwargs
        head_dims = _head_dims(tower)
        kernel = _fp8_kernel(tower, max(head_dims.values()))
        if old is not None:
            # Its layers and head dims, before any image is encoded.
            nothing = scales.from_amax(
                {name: (QKV(0, 0, 0), size) for name, size in head_dims.items()},
                options.margin,
                _made_by(options, job, 0),
            )
            _merged(*old, nothing)
            # Engines refuse a file with such layers; a part of a tower lacks some.
            if job.spec.depth == job.spec.full_depth:
                scales.check_no_others(*old, head_dims)
        progress.advance(bar, BUILD_STEPS)

        def encode_all(what: str, images: Sequence[ImageFile]) -> Iterator[ImageFile]:
            for file in images:
                progress.update(bar, description=f"{what} {file.name}")
                patches = read_patches(file, processor, kwargs, failures)
                if patches is not None:
                    with memory_hint(job.device):
                        tower.encode(**patches.inputs)
                    yield file
                progress.advance(bar)

        amax = {name: torch.zeros(3, device=job.device) for name in head_dims}
        seen = []
        with _watching(tower, partial(_widen, amax)):
            for file in encode_all("look at", job.files):
                _check_finite(amax, file, tower.dtype)
                seen.append(file)
        check_any(seen, failures)
        new = scales.from_amax(
            {name: (QKV(*x.tolist()), head_dims[name]) for name, x in amax.items()},
            options.margin,
            _made_by(options, job, len(seen)),
        )
        if old is not None:
            notes += _differences(*old, new)
            new = _merged(*old, new)
        check = _Check(new, kernel, job.device)
        with _watching(tower, check.attend):
            for _ in encode_all("attend in FP8 to", seen):
                pass
    report = Report(
        **report_header(job, options, notes, failures),
        kernel=kernel,
        images=len(seen),
        margin=options.margin,
        layers=[check.report(name, new) for name in head_dims],
        output=str(options.output),
        plot=None if options.plot is None else str(options.plot),
    )
    return report, new


def render(report: Report, console: Console) -> None:
    """Print a report as a table, a row for each layer."""
    table = report.table(f"{report.images} images", report.kernel)
    table.add_column("layer", overflow="fold")
    for column in ("q", "k", "v", "clipped", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for layer in report.layers:
        table.add_row(
            Text(layer.name),
            *(f"{x:.4g}" for x in layer.amax),
            f"{layer.clip_rate:.1e}" if layer.clip_rate else "0",
            f"{layer.relative_error:.1e}",
        )
    console.print(table)
    console.print(
        f"q, k, v: largest absolute values; a scale is one over {E4M3_MAX:.0f}, times "
        f"the margin of {report.margin:g}. clipped: the largest part of q, k or v "
        "beyond it. error: of FP8 attention against the layer's own, relative."
    )
    report.print_rest(console, {"Scales": report.output, "Plot": report.plot})


def _made_by(options: Options, job: Job, images: int) -> dict[str, str]:
    return {
        "command": f"vllm-flashinfer-vit calibrate --model {options.model} "
        f"--margin {options.margin:g}",
        "version": __version__,
        "vllm": vllm_version(),
        "model": job.spec.name,
        "method": f"abs-max of {images} images",
    }


def _head_dims(tower: Built) -> dict[str, int]:
    """Return head dims by the names of the layers that FLASHINFER serves.

    Raises:
        NotServedError: It serves none.
    """
    layers = _layers(tower)
    if not layers:
        raise NotServedError(
            f"FLASHINFER serves no layer of {tower.spec.model} in "
            f"{dtype_name(tower.dtype)} on {tower.device.type}, so there are no "
            "scales; use another --dtype or --device, and see what "
            "`vllm-flashinfer-vit doctor` says"
        )
    return {str(layer.layer_name): int(layer.head_size) for layer in layers}


def _layers(tower: Built) -> list[Any]:
    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

    layers = tower.attention_layers().values()
    return [layer for layer in layers if isinstance(layer, FlashInferViTAttention)]


def _fp8_kernel(tower: Built, head_dim: int) -> str:
    from vllm_flashinfer_vit.fp8.policy import resolve_fp8

    with tower.running():
        choices = resolve_fp8(
            head_dim, tower.dtype, None, Settings.from_env().tuned_dir
        )
    found = [c.kernel for c in choices if c.kernel in fp8_names()]
    # Where FP8 pays at no length, the portable kernel shows what it would cost.
    return found[-1] if found else PORTABLE_FP8


def _check_finite(
    amax: Mapping[str, torch.Tensor], file: ImageFile, dtype: torch.dtype
) -> None:
    """Check what was seen so far.

    Raises:
        JobError: An image had NaN or infinite activations.
    """
    if torch.stack(list(amax.values())).isfinite().all():
        return
    layer = next(name for name, x in amax.items() if not x.isfinite().all())
    raise JobError(
        f"image {file.name}: q, k or v of layer {layer!r} are NaN or infinite in "
        f"{dtype}, so there are no scales; check the weights, or use another dtype"
    )


@contextmanager
def _watching(
    tower: Built, watch: Callable[[Any, Attend, Batch], torch.Tensor]
) -> Iterator[None]:
    """Have `watch(layer, attend, batch)` called where a tower's layers attend."""
    with ExitStack() as stack:
        for layer in _layers(tower):
            stack.enter_context(layer.watched(watch))
        yield


def _rotated(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from vllm_flashinfer_vit.ops.attention import rotate

    if batch.cos is None or batch.sin is None:
        return batch.q, batch.k, batch.v
    turns = batch.q, batch.k, batch.cos, batch.sin, batch.interleaved
    return (*rotate(*turns), batch.v)


def _widen(
    amax: Mapping[str, torch.Tensor], layer: Any, attend: Attend, batch: Batch
) -> torch.Tensor:
    """Take a layer's largest absolute values into account; NaN stays."""
    seen = amax[layer.layer_name]
    largest = [x.float().abs().max() for x in _rotated(batch)]
    torch.maximum(seen, torch.stack(largest), out=seen)
    return attend(batch)


class _Check:
    """Attends in FP8 beside the layers, on their inputs; adds up the differences."""

    def __init__(self, file: ScaleFile, kernel: str, device: torch.device) -> None:
        self._plan = Plan.of(kernel)
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

    def attend(self, layer: Any, attend: Attend, batch: Batch) -> torch.Tensor:
        """Return what the layer's own attention does, and compare FP8 with it."""
        from vllm_flashinfer_vit.ops.attention import Fp8, attention

        out = attend(batch)
        scales = self._scales[layer.layer_name]
        sums = []
        for x, limit in zip(_rotated(batch), scales * E4M3_MAX, strict=True):
            sums += [(x.abs() > limit).sum(), torch.tensor(x.numel())]
        state = DeviceScales.on(scales.device)._replace(scales=scales)
        fp8 = Fp8("static", state=state)
        fp8_out = attention(batch, layer.scale, self._plan, fp8)
        for x in (fp8_out.double() - out.double(), out.double()):
            sums.append(x.square().sum())
        total = self._sums[layer.layer_name]
        total += torch.stack([x.to(total) for x in sums])
        return out

    def report(self, name: str, file: ScaleFile) -> LayerReport:
        """Say how a layer did.

        Raises:
            JobError: FP8 attention is not finite.
        """
        *clipped, error, square = self._sums[name].tolist()
        if not math.isfinite(error):
            raise JobError(
                f"layer {name!r}: FP8 attention with these scales is NaN or infinite; "
                "nothing was saved. Please report it"
            )
        rates = (a / b for a, b in zip(clipped[::2], clipped[1::2], strict=True) if b)
        return LayerReport(
            name=name,
            amax=file.layers[name].amax,
            scale=file.layers[name].scale,
            clip_rate=max(rates, default=0.0),
            relative_error=math.sqrt(error / square) if square else 0.0,
        )


def _merged(old: ScaleFile, path: Path, new: ScaleFile) -> ScaleFile:
    try:
        return scales.merge(old, new)
    except ScaleError as error:
        raise ScaleError(f"{path} cannot be merged: {error}") from None


def _differences(old: ScaleFile, path: Path, new: ScaleFile) -> list[str]:
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
        origin = f"{path} was written by vLLM itself."
    else:
        origin = f"{path} is taken into account: {old.made_by['method']}."
    if old.has_signed_maxima:
        origin += (
            " vLLM's scales come from signed maxima of 16 passes, dummy images "
            "included, times an unknown margin. What they can represent is taken for "
            "an abs-max, which the margin widens once more."
        )
    notes = [origin]
    if short:
        worst = max(ratios, key=lambda what: ratios[what])
        notes.append(
            f"Its scales cut off {len(short)} of {len(ratios)} tensors here; the worst "
            f"is {worst}, {ratios[worst]:.2g} times beyond."
        )
    return notes

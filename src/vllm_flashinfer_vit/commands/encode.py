# SPDX-License-Identifier: Apache-2.0
"""Encode images with a model's real vision tower, and compare backends on them.

Images go through the model's Hugging Face image processor and vLLM's vision tower, as
in an engine; every result is compared with the same tower in fp32.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import save_file

from vllm_flashinfer_vit.commands.job import (
    Inputs,
    JobError,
    Patches,
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
from vllm_flashinfer_vit.towers.tower import (
    Tower,
    TowerSpec,
    build_tower,
    check_backend,
)

REFERENCE_BACKEND = "TORCH_SDPA"
# The other backends stay in the activations' dtype, and can be compared with it.
_FP8_BACKEND = "FLASHINFER"


GPU_RUNS = 5

# A tower takes about as long to build as these many images take to encode.
_BUILD_STEPS = 2


@dataclass(frozen=True)
class Options(Inputs):
    """What to encode, and how; see also `Inputs`.

    Attributes:
        backends: Names for `--mm-encoder-attn-backend`, compared side by side.
        attn_dtype: As `--mm-encoder-attn-dtype`, None or `fp8`, for FLASHINFER.
        fp8_scale_path: As `--mm-encoder-fp8-scale-path`.
        output: File for the embeddings, or None.
    """

    backends: Sequence[str] = ("FLASHINFER",)
    attn_dtype: str | None = None
    fp8_scale_path: Path | None = None
    output: Path | None = None


@dataclass(frozen=True)
class Measurement:
    """One image on one backend.

    Attributes:
        kernels: Kernel names by layer class, see `Tower.kernels`.
        milliseconds: Median over `GPU_RUNS` runs on a GPU, one run on the CPU.
        relative_error: Norm of the difference to the fp32 reference, over its norm.
    """

    kernels: Mapping[str, str]
    milliseconds: float
    relative_error: float


@dataclass(frozen=True)
class ImageReport:
    """One image.

    Attributes:
        name: The path as given, or below the folder that was given.
        width: Pixels in the file.
        height: Pixels in the file.
        grid: Frames, rows and columns of patches after resizing.
        patches: Rows that the tower attends over.
        tokens: Embeddings that the language model would receive.
        results: Measurements by backend.
    """

    name: str
    width: int
    height: int
    grid: tuple[int, int, int]
    patches: int
    tokens: int
    results: Mapping[str, Measurement]


@dataclass(frozen=True)
class Report:
    """The result of `run`; see `render` and `to_json`."""

    model: str
    depth: int
    full_depth: int
    dtype: str
    device: str
    backends: Sequence[str]
    images: Sequence[ImageReport]
    notes: Sequence[str]
    versions: Mapping[str, str]
    output: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return asdict(self)


def run(options: Options, console: Console | None = None) -> Report:
    """Encode images on each backend and measure them.

    Args:
        options: What to do.
        console: Draws the progress bar; None draws none.

    Raises:
        TowerError: An option, image or checkpoint cannot be used.
        NotServedError: FLASHINFER was asked for, and this machine cannot serve it.
    """
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    backends = _backends(options.backends)
    if options.attn_dtype is not None and _FP8_BACKEND not in backends:
        raise JobError(f"attn_dtype {options.attn_dtype} needs backend {_FP8_BACKEND}")
    check_output(options.output)
    paths = image_paths(options.images)
    spec, max_pixels, notes = resolve_tower(options, device)
    with progress_bar(console) as progress:
        count = len(paths) + (1 + len(backends)) * (len(paths) + _BUILD_STEPS)
        bar = progress.add_task("load the image processor", total=count)

        def step(now: str, advance: int = 0) -> None:
            progress.update(bar, description=now, advance=advance)

        processor = image_processor(spec, max_pixels)
        patches = []
        for path, name in paths:
            step(f"read {name}", 1)
            patches.append(read_patches(path, name, processor))
        step("load vLLM")
        with quiet_vllm():
            for backend in backends:
                check_backend(backend, device, dtype)

            def encode_all(backend: str, dtype: torch.dtype) -> list[_Encoded]:
                step(f"build the tower for {backend}")
                fp8 = backend == _FP8_BACKEND
                tower = build_tower(
                    spec,
                    backend=backend,
                    dtype=dtype,
                    device=device,
                    seed=options.seed,
                    attn_dtype=options.attn_dtype if fp8 else None,
                    fp8_scale_path=options.fp8_scale_path if fp8 else None,
                )
                return _encode_all(tower, patches, step)

            references = encode_all(REFERENCE_BACKEND, torch.float32)
            encoded = {backend: encode_all(backend, dtype) for backend in backends}
    report = Report(
        model=spec.model,
        depth=spec.depth,
        full_depth=spec.full_depth,
        dtype=str(dtype).removeprefix("torch."),
        device=device_name(device),
        backends=backends,
        images=[
            _image_report(
                image,
                spec,
                references[index].embedding,
                {name: results[index] for name, results in encoded.items()},
            )
            for index, image in enumerate(patches)
        ],
        notes=notes,
        versions=versions(),
        output=None if options.output is None else str(options.output),
    )
    if options.output is not None:
        _save(options.output, report, encoded)
    return report


def render(report: Report, console: Console) -> None:
    """Print a report as a table; several backends stand side by side."""
    table = Table(
        title=f"{report.model}, {report.depth} of {report.full_depth} blocks, "
        f"{report.dtype}, {report.device}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("image", overflow="fold")
    for column in ("pixels", "patches", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    several = len(report.backends) > 1
    if several:
        for backend in report.backends:
            table.add_column(backend)
    else:
        table.add_column(f"{report.backends[0]} kernel")
        table.add_column("ms", justify="right", no_wrap=True)
        table.add_column("error", justify="right", no_wrap=True)
    for image in report.images:
        cells = []
        for backend in report.backends:
            result = image.results[backend]
            kernels = _kernel_text(result.kernels)
            time, error = f"{result.milliseconds:,.1f}", f"{result.relative_error:.1e}"
            if several:
                cells.append(f"{kernels}\n{time} ms\nerror {error}")
            else:
                cells += [kernels, time, error]
        table.add_row(
            image.name,
            f"{image.width} x {image.height}",
            f"{image.patches:,}",
            f"{image.tokens:,}",
            *cells,
            end_section=several,
        )
    console.print(table)
    console.print(
        f"error: relative, against the same tower in fp32 with {REFERENCE_BACKEND}."
    )
    for note in report.notes:
        console.print(note)
    if report.output is not None:
        console.print(f"Embeddings saved to {report.output}.", soft_wrap=True)


def _kernel_text(kernels: Mapping[str, str]) -> str:
    if len(set(kernels.values())) == 1:
        return next(iter(kernels.values()))
    return "\n".join(f"{label}: {kernels[label]}" for label in sorted(kernels))


def _backends(names: Iterable[str]) -> list[str]:
    backends = list(dict.fromkeys(name.upper() for name in names))
    if not backends:
        raise JobError("no backend was given; FLASHINFER is this package's")
    return backends


@dataclass(frozen=True)
class _Encoded:
    embedding: torch.Tensor
    milliseconds: float
    kernels: Mapping[str, str]


def _encode_all(
    tower: Tower, images: Iterable[Patches], step: Callable[[str, int], None]
) -> list[_Encoded]:
    encoded = []
    try:
        step(f"warm up {tower.backend}", _BUILD_STEPS)
        side = 4 * tower.spec.merge_size
        tower.encode(torch.zeros(side * side, tower.spec.patch_dim), [[1, side, side]])
        for image in images:
            step(f"encode {image.name} with {tower.backend}", 1)
            encoded.append(_encode(tower, image))
    except torch.OutOfMemoryError as error:
        raise JobError(
            f"{device_name(tower.device)} has too little memory ({error}); use a "
            "smaller max_pixels"
        ) from error
    return encoded


def _encode(tower: Tower, image: Patches) -> _Encoded:
    pixels = image.pixel_values.to(tower.device, tower.dtype)

    def encode() -> torch.Tensor:
        return tower.encode(pixels, [image.grid])

    time_it = _time_on_gpu if tower.device.type == "cuda" else _time_once
    embedding, milliseconds = time_it(encode)
    return _Encoded(embedding.cpu(), milliseconds, tower.kernels([image.grid]))


def _time_once(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - start) * 1e3


def _time_on_gpu(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    result = call()
    times = []
    for _ in range(GPU_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return result, statistics.median(times)


def _image_report(
    image: Patches,
    spec: TowerSpec,
    reference: torch.Tensor,
    encoded: Mapping[str, _Encoded],
) -> ImageReport:
    patches = image.grid[0] * image.grid[1] * image.grid[2]
    return ImageReport(
        name=image.name,
        width=image.width,
        height=image.height,
        grid=image.grid,
        patches=patches,
        tokens=patches // spec.merge_size**2,
        results={
            backend: Measurement(
                kernels=one.kernels,
                milliseconds=one.milliseconds,
                relative_error=_relative_error(one.embedding, reference),
            )
            for backend, one in encoded.items()
        },
    )


def _relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    reference = reference.double()
    return ((value.double() - reference).norm() / reference.norm()).item()


def _save(
    path: Path, report: Report, encoded: Mapping[str, Sequence[_Encoded]]
) -> None:
    tensors, metadata = {}, {}
    for backend, results in encoded.items():
        for image, one in zip(report.images, results, strict=True):
            key = image.name if len(encoded) == 1 else f"{backend}/{image.name}"
            tensors[key] = one.embedding.contiguous()
            metadata[f"grid_thw {image.name}"] = " ".join(map(str, image.grid))
    metadata |= {
        "model": report.model,
        "depth": f"{report.depth} of {report.full_depth}",
        "backends": " ".join(report.backends),
        "dtype": report.dtype,
        "device": report.device,
        "versions": " ".join(f"{name}=={v}" for name, v in report.versions.items()),
    }
    try:
        save_file(tensors, path, metadata)
    except (OSError, SafetensorError) as error:
        raise JobError(f"embeddings cannot be saved to {path}: {error}") from error

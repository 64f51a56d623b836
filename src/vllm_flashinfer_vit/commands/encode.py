# SPDX-License-Identifier: Apache-2.0
"""Encode images with a model's real vision tower, and compare backends on them.

Images go through the model's Hugging Face image processor and vLLM's vision tower, as
in an engine; every result is compared with the same tower in fp32.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from vllm_flashinfer_vit.commands import embeddings
from vllm_flashinfer_vit.commands.images import (
    JobError,
    Patches,
    check_any,
    image_processor,
    read_patches,
)
from vllm_flashinfer_vit.commands.job import (
    BUILD_STEPS,
    Inputs,
    JobReport,
    build,
    memory_hint,
    prepare,
    progress_bar,
    report_header,
)
from vllm_flashinfer_vit.commands.quiet import quiet_vllm
from vllm_flashinfer_vit.fp8 import scale_files
from vllm_flashinfer_vit.kernels.catalog import fp8_names
from vllm_flashinfer_vit.towers.built import Built
from vllm_flashinfer_vit.towers.config import check_quantization
from vllm_flashinfer_vit.towers.linear_layers import check_unquantized, how_layers_run
from vllm_flashinfer_vit.towers.model_tower import check_quantizable, processor_kwargs
from vllm_flashinfer_vit.towers.tower import check_backend

REFERENCE_BACKEND = "TORCH_SDPA"
# The other backends stay in the activations' dtype, and can be compared with it.
_FP8_BACKEND = "FLASHINFER"

GPU_RUNS = 5


@dataclass(frozen=True)
class Options(Inputs):
    """What to encode, and how; see also `Inputs`.

    Attributes:
        backends: Names for `--mm-encoder-attn-backend`, compared side by side.
        attn_dtype: As `--mm-encoder-attn-dtype`, None or `fp8`, for FLASHINFER.
        fp8_scale_path: As `--mm-encoder-fp8-scale-path`.
        quantization: As `--quantization`; see `build_tower`.
        unquantized: Layers that it leaves out; see `build_tower`.
        output: File for the embeddings, or None.
    """

    backends: Sequence[str] = ("FLASHINFER",)
    attn_dtype: str | None = None
    fp8_scale_path: Path | None = None
    quantization: str | None = None
    unquantized: Sequence[str] = field(default_factory=list)
    output: Path | None = None


@dataclass(frozen=True)
class Measurement:
    """One image on one backend.

    Attributes:
        kernels: Kernel names by layer class, see `Tower.kernels`.
        milliseconds: Median over `GPU_RUNS` runs on a GPU, one run on the CPU.
        relative_error: Norm of the difference to the fp32 reference, over its norm;
            None if one of the two is not finite.
    """

    kernels: Mapping[str, str]
    milliseconds: float
    relative_error: float | None


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
class Report(JobReport):
    """The result of `run`; see also `JobReport`.

    Attributes:
        backends: What was compared.
        attn_dtype: As `--mm-encoder-attn-dtype`, for FLASHINFER.
        quantization: As `--quantization`, for all backends.
        unquantized: Layers that it left out.
        images: What came out, without images that were left out.
        output: The file of embeddings, or None.
    """

    backends: Sequence[str]
    attn_dtype: str | None
    quantization: str | None
    unquantized: Sequence[str]
    images: Sequence[ImageReport]
    output: str | None


def run(options: Options, console: Console | None = None) -> Report:
    """Encode images on each backend and measure them.

    Args:
        options: What to do.
        console: Draws the progress bar; None draws none.

    Raises:
        TowerError: An option, image or checkpoint cannot be used.
        FileError: The output cannot be written, or holds something else.
        NotServedError: FLASHINFER was asked for, and this machine cannot serve it.
        ScaleError: The file of scales cannot be used.
    """
    backends = _backends(options.backends)
    _check_fp8(options, backends)
    job = prepare(options)
    check_quantizable(job.spec, options.quantization, options.unquantized)
    if options.output is not None:
        scales = [] if options.fp8_scale_path is None else [options.fp8_scale_path]
        names = [job.spec.model, *(file.name for file in job.files)]
        embeddings.check(options.output, [*job.reads, *scales], names)
    failures: list[str] = []
    notes: list[str] = []
    with progress_bar(console) as progress:
        count = len(job.files)
        total = count + (1 + len(backends)) * (count + BUILD_STEPS)
        bar = progress.add_task("load the image processor", total=total)

        def step(now: str, advance: int = 0) -> None:
            progress.update(bar, description=now, advance=advance)

        processor = image_processor(job.spec, job.max_pixels)
        step("load vLLM")
        with quiet_vllm():
            for backend in backends:
                check_backend(backend, job.device, job.dtype)
            check_quantization(options.quantization, options.unquantized, job.device)
            # What the processor leaves to one tower, it leaves to all of them.
            kwargs = processor_kwargs(job.spec, job.device, processor)
            patches = []
            for file in job.files:
                step(f"read {file.name}", 1)
                image = read_patches(file, processor, kwargs, failures)
                if image is not None:
                    patches.append(image)
            check_any(patches, failures)

            def encode_all(
                backend: str, dtype: torch.dtype, **quantized: Any
            ) -> list[_Encoded]:
                step(f"build the tower for {backend}")
                fp8 = backend == _FP8_BACKEND
                tower = build(
                    job.spec,
                    backend=backend,
                    dtype=dtype,
                    device=job.device,
                    seed=options.seed,
                    attn_dtype=options.attn_dtype if fp8 else None,
                    fp8_scale_path=options.fp8_scale_path if fp8 else None,
                    image_processor=processor,
                    **quantized,
                )
                if options.quantization is not None and quantized:
                    notes.append(f"{backend}: {how_layers_run(tower)}")
                # The first tower has the same layers, in fp32.
                check_unquantized(tower.visual, tower.spec, options.unquantized)
                return _encode_all(tower, patches, step)

            references = encode_all(REFERENCE_BACKEND, torch.float32)
            encoded = {
                backend: encode_all(
                    backend,
                    job.dtype,
                    quantization=options.quantization,
                    unquantized=options.unquantized,
                )
                for backend in backends
            }
    images = [
        _image_report(
            image,
            references[index].embedding,
            {name: results[index] for name, results in encoded.items()},
        )
        for index, image in enumerate(patches)
    ]
    for name, results in ((REFERENCE_BACKEND, references), *encoded.items()):
        failures += _not_finite(name, images, results)
    if options.attn_dtype is not None:
        notes.append(_fp8_note(images))
    report = Report(
        **report_header(job, options, notes, failures),
        backends=backends,
        attn_dtype=options.attn_dtype,
        quantization=options.quantization,
        unquantized=options.unquantized,
        images=images,
        output=None if options.output is None else str(options.output),
    )
    if options.output is not None:
        _save(options.output, report, encoded)
    return report


def _check_fp8(options: Options, backends: Sequence[str]) -> None:
    if options.attn_dtype not in (None, "fp8"):
        raise JobError(
            f"--attn-dtype is {options.attn_dtype!r}: use fp8, or leave it out"
        )
    if options.attn_dtype is not None and _FP8_BACKEND not in backends:
        raise JobError(
            f"--attn-dtype {options.attn_dtype} needs --backend {_FP8_BACKEND}: add "
            "it, or leave both out"
        )
    if options.fp8_scale_path is not None and options.attn_dtype is None:
        raise JobError(
            "--fp8-scale-path needs --attn-dtype fp8: add it, or leave both out"
        )
    if options.fp8_scale_path is not None:
        # The tower of FLASHINFER reads it too, after the references' was built.
        scale_files.read(options.fp8_scale_path)


def _fp8_note(images: Sequence[ImageReport]) -> str:
    count = sum(
        not fp8_names().isdisjoint(image.results[_FP8_BACKEND].kernels.values())
        for image in images
    )
    note = f"FP8 attention ran for {count} of {len(images)} images."
    if count == len(images):
        return note
    return f"{note} For the others' sequences it does not pay on this machine."


def _not_finite(
    backend: str, images: Sequence[ImageReport], results: Sequence["_Encoded"]
) -> list[str]:
    return [
        f"{image.name} with {backend}: NaN or infinite values in its embeddings, which "
        f"are in {one.embedding.dtype}; nothing is saved of them. Try another dtype."
        for image, one in zip(images, results, strict=True)
        if not one.is_finite
    ]


def render(report: Report, console: Console) -> None:
    """Print a report as a table; several backends stand side by side."""
    method = report.quantization
    table = report.table(*([] if method is None else [f"quantised by {method}"]))
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
            time, error = f"{result.milliseconds:,.1f}", "not finite"
            if result.relative_error is not None:
                error = f"{result.relative_error:.1e}"
            if several:
                cells.append(f"{kernels}\n{time} ms\nerror {error}")
            else:
                cells += [kernels, time, error]
        table.add_row(
            Text(image.name),
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
    report.print_rest(console, {"Embeddings": report.output})


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

    @property
    def is_finite(self) -> bool:
        return bool(self.embedding.isfinite().all())


def _encode_all(
    tower: Built, images: Iterable[Patches], step: Callable[[str, int], None]
) -> list[_Encoded]:
    with memory_hint(tower.device):
        step(f"warm up {tower.backend}", BUILD_STEPS)
        tower.warm_up()
        encoded = []
        for image in images:
            step(f"encode {image.name} with {tower.backend}", 1)
            encoded.append(_encode(tower, image))
    return encoded


def _encode(tower: Built, image: Patches) -> _Encoded:
    # Outside the time.
    inputs = tower.placed(image.inputs)
    time_it = _time_on_gpu if tower.device.type == "cuda" else _time_once
    embedding, milliseconds = time_it(partial(tower.encode, **inputs))
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
    reference: torch.Tensor,
    encoded: Mapping[str, _Encoded],
) -> ImageReport:
    return ImageReport(
        name=image.name,
        width=image.width,
        height=image.height,
        grid=image.grid,
        patches=math.prod(image.grid),
        tokens=len(reference),
        results={
            backend: Measurement(
                kernels=one.kernels,
                milliseconds=one.milliseconds,
                relative_error=_relative_error(one.embedding, reference),
            )
            for backend, one in encoded.items()
        },
    )


def _relative_error(value: torch.Tensor, reference: torch.Tensor) -> float | None:
    reference = reference.double()
    error = (value.double() - reference).norm() / reference.norm()
    # JSON has no other numbers.
    return error.item() if error.isfinite() else None


def _save(
    path: Path, report: Report, encoded: Mapping[str, Sequence[_Encoded]]
) -> None:
    tensors, metadata = {}, {}
    for backend, results in encoded.items():
        for image, one in zip(report.images, results, strict=True):
            if not one.is_finite:
                continue
            key = image.name if len(encoded) == 1 else f"{backend}/{image.name}"
            tensors[key] = one.embedding.contiguous()
            metadata[f"grid_thw {image.name}"] = " ".join(map(str, image.grid))
    if not tensors:
        # The first may be of files that were left out.
        raise JobError(f"nothing was saved to {path}. {report.failures[-1]}")
    metadata |= {
        "model": report.model,
        "weights": report.weights,
        "depth": f"{report.depth} of {report.full_depth}",
        "backends": " ".join(report.backends),
        "dtype": report.dtype,
        "attn_dtype": report.attn_dtype or report.dtype,
        "quantization": report.quantization or "none",
        "max_pixels": str(report.max_pixels or "the image processor's own"),
        "device": report.device,
        "versions": " ".join(f"{name}=={v}" for name, v in report.versions.items()),
    }
    embeddings.write(path, tensors, metadata)

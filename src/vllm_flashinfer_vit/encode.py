# SPDX-License-Identifier: Apache-2.0
"""Encode images with a model's real vision tower, and compare backends on them.

Images go through the model's Hugging Face image processor and vLLM's vision tower, as
in an engine; every result is compared with the same tower in fp32.
"""

import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import save_file

from vllm_flashinfer_vit.tower import (
    Tower,
    TowerError,
    TowerSpec,
    build_tower,
    check_backend,
    resolve_spec,
)

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
REFERENCE_BACKEND = "TORCH_SDPA"

# Five images then take two CPU cores about a minute, most of it vLLM's imports.
CPU_DEPTH = 4
CPU_MAX_PIXELS = 512 * 512

GPU_RUNS = 5

# A tower takes about as long to build as these many images take to encode.
_BUILD_STEPS = 2

# min_pixels, max_pixels, mean and std of each family's published image processor.
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_PROCESSORS = {
    "qwen2_vl": (56 * 56, 28 * 28 * 16384, _CLIP_MEAN, _CLIP_STD),
    "qwen2_5_vl": (56 * 56, 28 * 28 * 16384, _CLIP_MEAN, _CLIP_STD),
    "qwen3_vl": (256 * 256, 4096 * 4096, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


class EncodeError(TowerError):
    """An image or option cannot be used; the message says what to change."""


@dataclass(frozen=True)
class Options:
    """What to encode, and how.

    Attributes:
        images: Image files, and folders of them.
        model: A local checkpoint folder, or a name in `tower.NAMED_MODELS`.
        random_weights: Seeded random weights instead of a checkpoint's.
        depth: Blocks of the tower, from the first on. None: all of them, but
            `CPU_DEPTH` for random weights on the CPU.
        backends: Names for `--mm-encoder-attn-backend`, compared side by side.
        dtype: `bf16`, `fp16`, `fp32`; `auto` is bf16 where the device has it.
        device: `cpu`, `cuda` or `auto`.
        max_pixels: Larger images are shrunk to it. None: the processor's own limit,
            but `CPU_MAX_PIXELS` for random weights on the CPU.
        output: File for the embeddings, or None.
        seed: Seeds random weights.
    """

    images: Sequence[Path]
    model: str
    random_weights: bool = False
    depth: int | None = None
    backends: Sequence[str] = ("FLASHINFER",)
    dtype: str = "auto"
    device: str = "auto"
    max_pixels: int | None = None
    output: Path | None = None
    seed: int = 0


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


@dataclass(frozen=True)
class _Patches:
    name: str
    width: int
    height: int
    grid: tuple[int, int, int]
    pixel_values: torch.Tensor = field(repr=False)


def run(options: Options, console: Console | None = None) -> Report:
    """Encode images on each backend and measure them.

    Args:
        options: What to do.
        console: Draws the progress bar; None draws none.

    Raises:
        TowerError: An option, image or checkpoint cannot be used.
        NotServedError: FLASHINFER was asked for, and this machine cannot serve it.
    """
    device = _device(options.device)
    dtype = _dtype(options.dtype, device)
    backends = _backends(options.backends)
    _check_output(options.output)
    paths = _image_paths(options.images)
    spec, max_pixels, notes = _resolve(options, device)
    with _progress(console) as progress:
        count = len(paths) + (1 + len(backends)) * (len(paths) + _BUILD_STEPS)
        bar = progress.add_task("load the image processor", total=count)

        def step(now: str, advance: int = 0) -> None:
            progress.update(bar, description=now, advance=advance)

        processor = _processor(spec, max_pixels)
        patches = []
        for path, name in paths:
            step(f"read {name}", 1)
            patches.append(_read_patches(path, name, processor))
        step("load vLLM")
        with _quiet_vllm():
            for backend in backends:
                check_backend(backend, device, dtype)

            def encode_all(backend: str, dtype: torch.dtype) -> list[_Encoded]:
                step(f"build the tower for {backend}")
                tower = build_tower(
                    spec, backend=backend, dtype=dtype, device=device, seed=options.seed
                )
                return _encode_all(tower, patches, step)

            references = encode_all(REFERENCE_BACKEND, torch.float32)
            encoded = {backend: encode_all(backend, dtype) for backend in backends}
    report = Report(
        model=spec.model,
        depth=spec.depth,
        full_depth=spec.full_depth,
        dtype=str(dtype).removeprefix("torch."),
        device=_device_name(device),
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
        versions=_versions(),
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


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise EncodeError(
            f"device {name!r} is unknown; use auto, cpu or cuda"
        ) from None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        # A CPU without instructions for bf16 is several times slower in it.
        native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    if name not in DTYPES:
        raise EncodeError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _backends(names: Iterable[str]) -> list[str]:
    backends = list(dict.fromkeys(name.upper() for name in names))
    if not backends:
        raise EncodeError("no backend was given; FLASHINFER is this package's")
    return backends


def _check_output(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise EncodeError(
            f"embeddings cannot be saved to {path}; give a file in a folder that exists"
        )
    if not os.access(path.parent, os.W_OK):
        raise EncodeError(f"{path.parent} cannot be written to; choose another folder")


def _image_paths(given: Iterable[Path]) -> list[tuple[Path, str]]:
    paths: dict[Path, str] = {}
    for path in given:
        if not path.is_dir():
            paths[path] = str(path)
            continue
        found = sorted(
            one for one in path.iterdir() if one.suffix.lower() in IMAGE_SUFFIXES
        )
        if not found:
            raise EncodeError(
                f"folder {path} holds no image ({', '.join(IMAGE_SUFFIXES)}); images "
                "in folders below it are not looked for"
            )
        paths |= {one: one.name for one in found}
    if not paths:
        raise EncodeError("no image was given; name image files or folders")
    # Two folders may hold files of one name, and names are keys of the output.
    if len(set(paths.values())) < len(paths):
        paths = {path: str(path) for path in paths}
    return list(paths.items())


def _resolve(
    options: Options, device: torch.device
) -> tuple[TowerSpec, int | None, list[str]]:
    notes = []
    depth, max_pixels = options.depth, options.max_pixels
    if options.random_weights:
        notes.append(
            "Weights are random: times and errors are real, embeddings mean nothing."
        )
    if device.type == "cpu" and options.random_weights:
        if depth is None:
            full = resolve_spec(options.model, random_weights=True).full_depth
            depth = min(CPU_DEPTH, full)
            notes.append(
                f"On a CPU only {depth} of {full} blocks run; --depth {full} runs all."
            )
        if max_pixels is None:
            max_pixels = CPU_MAX_PIXELS
            notes.append(
                f"On a CPU images are shrunk to {max_pixels:,} pixels; --max-pixels "
                "sets another limit."
            )
    if max_pixels is not None and max_pixels < 1:
        raise EncodeError(f"max_pixels is {max_pixels}; it must be positive")
    spec = resolve_spec(
        options.model, random_weights=options.random_weights, depth=depth
    )
    return spec, max_pixels, notes


def _processor(spec: TowerSpec, max_pixels: int | None) -> Any:
    from transformers import AutoImageProcessor, Qwen2VLImageProcessor

    smallest, largest, mean, std = _PROCESSORS[spec.family]
    folder = Path(spec.model)
    if folder.is_dir():
        try:
            processor = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise EncodeError(
                f"{folder} holds no image processor ({error}); "
                "copy preprocessor_config.json from the model's repository into it"
            ) from error
        smallest = processor.size["shortest_edge"]
        largest = processor.size["longest_edge"]
    else:
        processor = Qwen2VLImageProcessor(
            patch_size=spec.patch_size,
            temporal_patch_size=spec.vision_config.get("temporal_patch_size", 2),
            merge_size=spec.merge_size,
            image_mean=list(mean),
            image_std=list(std),
        )
    if max_pixels is not None:
        token_pixels = (spec.patch_size * spec.merge_size) ** 2
        if max_pixels < token_pixels:
            raise EncodeError(
                f"max_pixels is {max_pixels}; one token of this model takes "
                f"{token_pixels} pixels"
            )
        largest = min(largest, max_pixels)
    # Set afterwards, because constructors of some transformers ignore `size`.
    processor.size = {"shortest_edge": min(smallest, largest), "longest_edge": largest}
    if getattr(processor, "min_pixels", None) is not None:
        processor.min_pixels = min(smallest, largest)
        processor.max_pixels = largest
    return processor


def _read_patches(path: Path, name: str, processor: Any) -> _Patches:
    image = _read_image(path)
    try:
        inputs = processor(images=[image], return_tensors="pt")
    except ValueError as error:
        raise EncodeError(
            f"the image processor refuses {path}, {image.width} x {image.height} "
            f"pixels ({error}); crop or pad the image"
        ) from error
    pixel_values = inputs["pixel_values"]
    if not pixel_values.isfinite().all():
        raise EncodeError(
            f"{path} holds NaN or infinite pixels after the image processor; check the "
            "file and the processor's mean and std"
        )
    frames, rows, columns = inputs["image_grid_thw"][0].tolist()
    return _Patches(
        name, image.width, image.height, (frames, rows, columns), pixel_values
    )


def _read_image(path: Path) -> Image.Image:
    try:
        with Image.open(path) as file:
            if file.mode.startswith(("I", "F")):
                raise EncodeError(
                    f"{path} has {file.mode} pixels of more than 8 bits; convert it to "
                    "8 bits per channel"
                )
            image = ImageOps.exif_transpose(file)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image)
            return image.convert("RGB")
    except FileNotFoundError:
        raise EncodeError(f"image {path} does not exist") from None
    except EncodeError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise EncodeError(
            f"{path} cannot be read as an image ({error}); it is damaged or no image"
        ) from error


@contextmanager
def _quiet_vllm() -> Iterator[None]:
    """Keep vLLM's log off standard output, and down to what a user can act on."""
    verbose = os.environ.get("VLLM_LOGGING_LEVEL", "").upper() in ("DEBUG", "INFO")
    with ExitStack() as stack:

        def set_level(name: str, level: int) -> None:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(level)

        if not verbose:
            set_level("torch", logging.ERROR)
        # Its import sets level and stream of vLLM's logger.
        import vllm.logger  # noqa: F401

        for handler in logging.getLogger("vllm").handlers:
            if getattr(handler, "stream", None) is sys.stdout:
                assert isinstance(handler, logging.StreamHandler)
                stack.callback(handler.setStream, sys.stdout)
                handler.setStream(sys.stderr)
        if not verbose:
            set_level("vllm", logging.ERROR)
            set_level("vllm.plugins.flashinfer_vit", logging.WARNING)
        yield


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=console is None,
        transient=True,
        redirect_stdout=False,
    )


@dataclass(frozen=True)
class _Encoded:
    embedding: torch.Tensor
    milliseconds: float
    kernels: Mapping[str, str]


def _encode_all(
    tower: Tower, images: Iterable[_Patches], step: Callable[[str, int], None]
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
        raise EncodeError(
            f"{_device_name(tower.device)} has too little memory ({error}); use a "
            "smaller max_pixels"
        ) from error
    return encoded


def _encode(tower: Tower, image: _Patches) -> _Encoded:
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
    image: _Patches,
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


def _versions() -> dict[str, str]:
    versions = {}
    for name in (
        "vllm-flashinfer-vit",
        "vllm",
        "torch",
        "transformers",
        "flashinfer-python",
    ):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


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
        raise EncodeError(f"embeddings cannot be saved to {path}: {error}") from error

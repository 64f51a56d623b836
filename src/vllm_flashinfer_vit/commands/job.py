# SPDX-License-Identifier: Apache-2.0
"""What the commands that run a tower on images share: options, images, quiet.

Images go through the model's Hugging Face image processor, as in an engine.
"""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_flashinfer_vit.towers.tower import TowerError, TowerSpec, resolve_spec

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")

# Five images then take two CPU cores about a minute, most of it vLLM's imports.
CPU_DEPTH = 4
CPU_MAX_PIXELS = 512 * 512

# min_pixels, max_pixels, mean and std of each family's published image processor.
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_PROCESSORS = {
    "qwen2_vl": (56 * 56, 28 * 28 * 16384, _CLIP_MEAN, _CLIP_STD),
    "qwen2_5_vl": (56 * 56, 28 * 28 * 16384, _CLIP_MEAN, _CLIP_STD),
    "qwen3_vl": (256 * 256, 4096 * 4096, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


class JobError(TowerError):
    """An image or option cannot be used; the message says what to change."""


@dataclass(frozen=True)
class Inputs:
    """Images, and the tower that they go through.

    Attributes:
        images: Image files, and folders of them.
        model: A local checkpoint folder, or a name in `tower.NAMED_MODELS`.
        random_weights: Seeded random weights instead of a checkpoint's.
        depth: Blocks of the tower, from the first on. None: all of them, but
            `CPU_DEPTH` for random weights on the CPU.
        dtype: `bf16`, `fp16`, `fp32`; `auto` is bf16 where the device has it.
        device: `cpu`, `cuda` or `auto`.
        max_pixels: Larger images are shrunk to it. None: the processor's own limit,
            but `CPU_MAX_PIXELS` for random weights on the CPU.
        seed: Seeds random weights.
    """

    images: Sequence[Path]
    model: str
    random_weights: bool = False
    depth: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_pixels: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Patches:
    """An image as the tower takes it.

    Attributes:
        name: The path as given, or below the folder that was given.
        width: Pixels in the file.
        height: Pixels in the file.
        grid: Frames, rows and columns of patches after resizing.
        pixel_values: `[P, patch_dim]`, the image processor's patches.
    """

    name: str
    width: int
    height: int
    grid: tuple[int, int, int]
    pixel_values: torch.Tensor = field(repr=False)


def pick_device(name: str) -> torch.device:
    """Return the device of a name, `auto` included.

    Raises:
        JobError: The name is unknown.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise JobError(f"device {name!r} is unknown; use auto, cpu or cuda") from None


def device_name(device: torch.device) -> str:
    """Return a device's name for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name, `auto` included.

    Raises:
        JobError: The name is unknown.
    """
    if name == "auto":
        # A CPU without instructions for bf16 is several times slower in it.
        native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    if name not in DTYPES:
        raise JobError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def check_output(path: Path | None) -> None:
    """Check that a file can be written, before hours of work; None is no file.

    Raises:
        JobError: It cannot.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise JobError(f"{path} cannot be written; give a file in a folder that exists")
    if not os.access(path.parent, os.W_OK):
        raise JobError(f"{path.parent} cannot be written to; choose another folder")


def image_paths(given: Iterable[Path]) -> list[tuple[Path, str]]:
    """Return the image files that were given, each with its name for people.

    Raises:
        JobError: There is none, or a folder holds none.
    """
    paths: dict[Path, str] = {}
    for path in given:
        if not path.is_dir():
            paths[path] = str(path)
            continue
        found = sorted(
            one for one in path.iterdir() if one.suffix.lower() in IMAGE_SUFFIXES
        )
        if not found:
            raise JobError(
                f"folder {path} holds no image ({', '.join(IMAGE_SUFFIXES)}); images "
                "in folders below it are not looked for"
            )
        paths |= {one: one.name for one in found}
    if not paths:
        raise JobError("no image was given; name image files or folders")
    # Two folders may hold files of one name, and names are keys of the output.
    if len(set(paths.values())) < len(paths):
        paths = {path: str(path) for path in paths}
    return list(paths.items())


def resolve_tower(
    options: Inputs, device: torch.device
) -> tuple[TowerSpec, int | None, list[str]]:
    """Find out which tower to build for a device.

    Returns:
        The tower; the largest image in pixels, or None for the processor's own limit;
        and what was decided, sentences for the user.

    Raises:
        TowerError: An option or checkpoint cannot be used.
    """
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
        raise JobError(f"max_pixels is {max_pixels}; it must be positive")
    spec = resolve_spec(
        options.model, random_weights=options.random_weights, depth=depth
    )
    return spec, max_pixels, notes


def image_processor(spec: TowerSpec, max_pixels: int | None) -> Any:
    """Return the model's image processor.

    Raises:
        JobError: The checkpoint has none, or `max_pixels` is too small.
    """
    from transformers import AutoImageProcessor, Qwen2VLImageProcessor

    smallest, largest, mean, std = _PROCESSORS[spec.family]
    folder = Path(spec.model)
    if folder.is_dir():
        try:
            processor = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise JobError(
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
            raise JobError(
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


def read_patches(path: Path, name: str, processor: Any) -> Patches:
    """Read an image and cut it into patches.

    Raises:
        JobError: The file is no image, or the processor refuses it.
    """
    image = _read_image(path)
    try:
        inputs = processor(images=[image], return_tensors="pt")
    except ValueError as error:
        raise JobError(
            f"the image processor refuses {path}, {image.width} x {image.height} "
            f"pixels ({error}); crop or pad the image"
        ) from error
    pixel_values = inputs["pixel_values"]
    if not pixel_values.isfinite().all():
        raise JobError(
            f"{path} holds NaN or infinite pixels after the image processor; check the "
            "file and the processor's mean and std"
        )
    frames, rows, columns = inputs["image_grid_thw"][0].tolist()
    return Patches(
        name, image.width, image.height, (frames, rows, columns), pixel_values
    )


def _read_image(path: Path) -> Image.Image:
    try:
        with Image.open(path) as file:
            if file.mode.startswith(("I", "F")):
                raise JobError(
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
        raise JobError(f"image {path} does not exist") from None
    except JobError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise JobError(
            f"{path} cannot be read as an image ({error}); it is damaged or no image"
        ) from error


@contextmanager
def quiet_vllm() -> Iterator[None]:
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


def progress_bar(console: Console | None) -> Progress:
    """Return a bar that shows what is being done; without a console, none."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=console is None,
        transient=True,
        redirect_stdout=False,
    )


def versions() -> dict[str, str]:
    """Return the versions of what a result depends on, by package name."""
    found = {}
    for name in (
        "vllm-flashinfer-vit",
        "vllm",
        "torch",
        "transformers",
        "flashinfer-python",
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

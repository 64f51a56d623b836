# SPDX-License-Identifier: Apache-2.0
"""Images for the commands: which files, and their patches.

Images go through the model's Hugging Face image processor, as in an engine.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageOps

from vllm_flashinfer_vit.commands.model_images import ModelProcessor
from vllm_flashinfer_vit.towers.spec import (
    OWN_CODE,
    Spec,
    TowerError,
    TowerSpec,
    cause,
    not_allowed,
    wants_own_code,
)
from vllm_flashinfer_vit.towers.weights import is_out_of_memory
from vllm_flashinfer_vit.towers.whole import ModelSpec

# Of a folder's files. What else Pillow opens may be a film or a table of numbers, or
# needs a program beside it.
IMAGE_SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".tif", ".tiff"),
    ".webp",
)

# min_pixels, max_pixels, mean and std of each family's published image processor.
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_GLM = (112 * 112, 28 * 28 * 15000, _CLIP_MEAN, _CLIP_STD)
_PROCESSORS = {
    "qwen2_vl": (56 * 56, 28 * 28 * 16384, _CLIP_MEAN, _CLIP_STD),
    "qwen2_5_vl": (56 * 56, 28 * 28 * 16384, _CLIP_MEAN, _CLIP_STD),
    "qwen3_vl": (256 * 256, 4096 * 4096, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
}
# Transformers takes any class of its own that a checkpoint names as image processor.
# Its other Auto classes would ask again whether the checkpoint's code may run.
_CLASS_NAME = re.compile(r"(?!Auto)\w+(ImageProcessor|FeatureExtractor)(Fast|Pil)?")

_TOO_LARGE = "{} takes more memory than there is"


class JobError(TowerError):
    """An image or option cannot be used; the message says what to change."""


class ImageFile(NamedTuple):
    """A file to read.

    Attributes:
        path: Where it is.
        name: For people: the path as given, or below the folder that was given.
        from_folder: Whether a folder was given, not the file: it may be left out.
    """

    path: Path
    name: str
    from_folder: bool


@dataclass(frozen=True)
class Patches:
    """An image as the tower takes it.

    Attributes:
        name: The path as given, or below the folder that was given.
        width: Pixels in the file.
        height: Pixels in the file.
        grid: Frames, rows and columns of patches after resizing; the tiles of an image
            count as frames.
        inputs: Arguments of the tower's `encode`.
    """

    name: str
    width: int
    height: int
    grid: tuple[int, int, int]
    inputs: Mapping[str, Any] = field(repr=False)

    @property
    def pixel_values(self) -> torch.Tensor:
        """What the image processor made of the pixels.

        Of a tower of patches and grids `[P, patch_dim]`, uint8 where it did not
        normalise them.
        """
        return self.inputs["pixel_values"]


def image_files(given: Iterable[Path]) -> list[ImageFile]:
    """Return the image files that were given.

    Args:
        given: Image files of any kind that Pillow reads, and folders: of these, the
            files with one of `IMAGE_SUFFIXES`, not those in folders below.

    Raises:
        JobError: There is none, one does not exist, or a folder holds none.
    """
    found: dict[Path, ImageFile] = {}
    for path in given:
        if not path.exists():
            raise JobError(f"image {path} does not exist")
        if not path.is_dir():
            found[path] = ImageFile(path, str(path), from_folder=False)
            continue
        inside = sorted(
            one for one in path.iterdir() if one.suffix.lower() in IMAGE_SUFFIXES
        )
        if not inside:
            raise JobError(
                f"folder {path} holds no image ({', '.join(IMAGE_SUFFIXES)}); images "
                "in folders below it are not looked for"
            )
        for one in inside:
            found.setdefault(one, ImageFile(one, one.name, from_folder=True))
    if not found:
        raise JobError("no image was given; name image files or folders")
    files = list(found.values())
    # Two folders may hold files of one name, and names are keys of the output.
    if len({file.name for file in files}) < len(files):
        files = [file._replace(name=str(file.path)) for file in files]
    return files


def not_looked_at(given: Iterable[Path]) -> list[str]:
    """Say which image files and folders in the folders that were given are left out.

    Args:
        given: As for `image_files`, which has found them all.
    """
    Image.init()
    readable = {
        suffix for suffix, kind in Image.EXTENSION.items() if kind in Image.OPEN
    }
    notes = []
    for folder in dict.fromkeys(path for path in given if path.is_dir()):
        others = [
            one
            for one in folder.iterdir()
            if not one.name.startswith(".") and one.suffix.lower() not in IMAGE_SUFFIXES
        ]
        below = sum(one.is_dir() for one in others)
        kinds = [one.suffix.lower() for one in others if one.is_file()]
        files = [kind for kind in kinds if kind in readable]
        left = []
        if files:
            named = ", ".join(sorted(set(files)))
            left.append(f"{len(files)} image files of other kinds ({named})")
        if below:
            left.append(f"{below} folders")
        if left:
            what = " and ".join(left)
            notes.append(f"Not looked at in {folder}: {what}. Give them by name.")
    return notes


def image_processor(spec: Spec, max_pixels: int | None) -> Any:
    """Return the model's image processor.

    Raises:
        TowerError: The checkpoint or the installed packages have none that fits the
            tower, or `max_pixels` is too small.
    """
    if isinstance(spec, ModelSpec):
        return ModelProcessor(spec, max_pixels)
    assert isinstance(spec, TowerSpec)
    token_pixels = (spec.patch_size * spec.merge_size) ** 2
    if max_pixels is not None and max_pixels < token_pixels:
        raise JobError(
            f"--max-pixels is {max_pixels}: one token of this model takes "
            f"{token_pixels}; use {token_pixels} or more"
        )
    folder = Path(spec.model)
    if folder.is_dir():
        return _processor_of_folder(folder, spec, max_pixels)
    from transformers import Qwen2VLImageProcessor

    smallest, largest, mean, std = _PROCESSORS[spec.family]
    processor = Qwen2VLImageProcessor(
        **_patch_sizes(spec),
        size={"shortest_edge": smallest, "longest_edge": largest},
        image_mean=list(mean),
        image_std=list(std),
    )
    _limit_pixels(processor, max_pixels)
    return processor


def _processor_of_folder(folder: Path, spec: TowerSpec, max_pixels: int | None) -> Any:
    from transformers import AutoImageProcessor

    file = f"{folder}: its preprocessor_config.json, or processor_config.json,"
    try:
        _check_class_names(folder)
        processor = AutoImageProcessor.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            # Else a config.json as timm's would be read in its place.
            image_processor_filename="preprocessor_config.json",
        )
        for name, size in _patch_sizes(spec).items():
            if (found := getattr(processor, name, None)) != size:
                raise ValueError(f"its {name} is {found}, and the tower's {size}")
        _limit_pixels(processor, max_pixels)
        # Most settings are looked at with an image only; this one must be resized.
        side = spec.patch_size * spec.merge_size + 1
        processor(images=[Image.new("RGB", (side, side))], return_tensors="pt")
    except ImportError:
        # A package is missing, and no file.
        raise
    except Exception as error:
        if wants_own_code(error) or isinstance(error, _OwnClassError):
            raise JobError(f"{file} {OWN_CODE}") from error
        raise JobError(
            f"{file} makes no image processor for this tower ({cause(error)}); copy "
            "the file from the model's repository"
        ) from error
    return processor


class _OwnClassError(ValueError):
    """A checkpoint names a class that is its own, or may load one that is."""


def _check_class_names(folder: Path) -> None:
    from transformers import ImageProcessingMixin, PreTrainedConfig

    # What `AutoImageProcessor` reads, as it reads it.
    of_images, _ = ImageProcessingMixin.get_image_processor_dict(
        folder, local_files_only=True
    )
    of_model, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    names = (
        of_images.get("image_processor_type"),
        of_images.get("feature_extractor_type"),
        of_model.get("image_processor_type"),
    )
    for name in names:
        if name is None or _CLASS_NAME.fullmatch(str(name)):
            continue
        if "auto_map" in {**of_images, **of_model}:
            raise _OwnClassError(name)
        raise ValueError(f"{name} is no image processor of Transformers")


def _patch_sizes(spec: TowerSpec) -> dict[str, int]:
    return {
        "patch_size": spec.patch_size,
        "temporal_patch_size": spec.temporal_patch_size,
        "merge_size": spec.merge_size,
    }


def _limit_pixels(processor: Any, max_pixels: int | None) -> None:
    smallest, largest = processor.size["shortest_edge"], processor.size["longest_edge"]
    if max_pixels is not None:
        largest = min(largest, max_pixels)
    processor.size = {"shortest_edge": min(smallest, largest), "longest_edge": largest}


def read_patches(
    file: ImageFile,
    processor: Any,
    processor_kwargs: Mapping[str, Any],
    failures: list[str],
) -> Patches | None:
    """Read an image and cut it into patches.

    Args:
        file: What to read.
        processor: From `image_processor`.
        processor_kwargs: Of the tower that takes the patches.
        failures: Gets a sentence if the file is left out.

    Returns:
        Its patches, or None for a file from a folder that cannot be used.

    Raises:
        JobError: A file that was named is no image, or the processor refuses it or
            makes of it what the tower does not take.
    """
    try:
        return _read_patches(file, processor, processor_kwargs)
    except JobError as error:
        if not file.from_folder:
            raise
        failures.append(f"Left out: {error}.")
        return None


def check_any(files: Iterable[object], failures: list[str]) -> None:
    """Check that not every image was left out.

    Args:
        files: What is left.
        failures: Sentences on those that were left out.

    Raises:
        JobError: It was.
    """
    if not any(True for _ in files):
        raise JobError(f"no image can be used. {failures[0]}")


def _read_patches(
    file: ImageFile, processor: Any, kwargs: Mapping[str, Any]
) -> Patches:
    path = file.path
    image = _read_image(path)
    try:
        if isinstance(processor, ModelProcessor):
            inputs, grid = processor(image)
        else:
            made = processor(images=[image], return_tensors="pt", **kwargs)
            frames, rows, columns = made["image_grid_thw"][0].tolist()
            grid = frames, rows, columns
            inputs = {"pixel_values": made["pixel_values"], "grid_thw": [grid]}
    except MemoryError:
        raise JobError(_TOO_LARGE.format(path)) from None
    except RuntimeError as error:
        # torch's own error on the CPU.
        if not is_out_of_memory(error):
            raise
        raise JobError(_TOO_LARGE.format(path)) from None
    except ValueError as error:
        raise JobError(
            f"the image processor refuses {path}, {image.width} x {image.height} "
            f"pixels ({error}); crop or pad the image"
        ) from error
    pixels = _pixels(inputs)
    if not all(one.isfinite().all() for one in pixels):
        raise JobError(
            f"{path} holds NaN or infinite pixels after the image processor; check the "
            "file and the processor's mean and std"
        )
    # A processor may ignore what it was called with; then vLLM would normalise twice.
    normalized = kwargs.get("do_normalize", True)
    if any(one.is_floating_point() != normalized for one in pixels):
        raise JobError(
            f"the image processor {type(processor).__name__} makes "
            f"{pixels[0].dtype} pixels of {path}, and the tower takes "
            f"{'normalised ones' if normalized else 'bytes'}; use the "
            "preprocessor_config.json of the model's repository"
        )
    return Patches(file.name, image.width, image.height, grid, inputs)


def _pixels(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for name, value in inputs.items():
        if name.startswith("pixel_values"):
            found += [value] if isinstance(value, torch.Tensor) else value
    return found


def _read_image(path: Path) -> Image.Image:
    try:
        # Opening a pipe would wait for a writer.
        if not path.is_file():
            raise JobError(f"{path} is no file, or leads to none; give an image file")
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
    except JobError:
        raise
    except PermissionError:
        raise JobError(not_allowed(path)) from None
    except MemoryError:
        raise JobError(_TOO_LARGE.format(path)) from None
    except Image.DecompressionBombError as error:
        raise JobError(
            f"{path} has more pixels than Pillow decodes ({error}); shrink the image"
        ) from None
    # Of a damaged file decoders raise anything, AVIF's a RuntimeError.
    except Exception as error:
        raise JobError(
            f"{path} cannot be read as an image ({cause(error)}); it is damaged or no "
            "image"
        ) from error

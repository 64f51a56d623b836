# SPDX-License-Identifier: Apache-2.0
"""Damaged image files: an image, or an error that names the file."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _fuzz import damaged, fuzz
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vllm_flashinfer_vit.commands.images import (
    IMAGE_SUFFIXES,
    ImageFile,
    JobError,
    read_patches,
)

WIDTH, HEIGHT = 16, 12
MODES = ("RGB", "1", "L", "LA", "P", "RGBA", "CMYK")


def saved(kind: str) -> list[bytes]:
    """Return an image's files of a kind, in each mode and form that Pillow writes."""
    values = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6
    forms: list[dict[str, Any]] = [{}, {"exif": turned}]
    if kind in Image.SAVE_ALL:
        forms.append({"save_all": True})
    if kind == "TIFF":
        forms += [{"compression": name} for name in ("tiff_lzw", "jpeg", "group4")]
    files = []
    for mode in MODES:
        image = Image.fromarray(values).convert(mode)
        for form in forms:
            file = io.BytesIO()
            # Pillow 13 crashes if the frames of an AVIF are turned.
            frames = {"append_images": [image]} if "save_all" in form else {}
            try:
                image.save(file, kind, **form, **frames)
            except (OSError, ValueError):
                # Not every format has every mode.
                continue
            files.append(file.getvalue())
    return files


Image.init()
FILES = {
    suffix: saved(kind)
    for suffix in IMAGE_SUFFIXES
    if (kind := Image.EXTENSION.get(suffix)) in Image.SAVE
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as context:
        # A size that grew is refused, as it is at its true limit, before it takes time.
        context.setattr(Image, "MAX_IMAGE_PIXELS", 2**16)
        yield tmp_path_factory.mktemp("images")


def processor(images: list[Image.Image], **kwargs: Any) -> dict[str, torch.Tensor]:
    """Take what an image processor would get, and see that it is an image."""
    (image,) = images
    image.load()
    assert image.mode == "RGB"
    assert min(image.size) > 0
    grid = torch.tensor([[1, image.height, image.width]])
    return {"image_grid_thw": grid, "pixel_values": torch.zeros(1, 1)}


def read(path: Path, content: bytes) -> tuple[int, int] | None:
    """Return the size of an image, or None if it is left out of its folder by name."""
    path.write_bytes(content)
    failures: list[str] = []
    made = read_patches(ImageFile(path, path.name, True), processor, {}, failures)
    if made is not None:
        assert failures == []
        assert made.grid == (1, made.height, made.width)
        return made.width, made.height
    (text,) = failures
    assert text.startswith(f"Left out: {path} ")
    assert "\n" not in text
    with pytest.raises(JobError):
        read_patches(ImageFile(path, str(path), False), processor, {}, [])
    return None


@pytest.mark.parametrize("suffix", FILES)
def test_what_is_whole_is_read(folder: Path, suffix: str) -> None:
    sizes = {read(folder / f"a{suffix}", content) for content in FILES[suffix]}
    assert (WIDTH, HEIGHT) in sizes
    assert sizes <= {(WIDTH, HEIGHT), (HEIGHT, WIDTH)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", FILES)
@given(data=st.data())
@fuzz(150)
def test_one_wrong_byte_leaves_an_image_or_an_error(
    folder: Path, suffix: str, data: st.DataObject
) -> None:
    content = data.draw(st.sampled_from(FILES[suffix]).flatmap(damaged))
    read(folder / f"a{suffix}", content)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", FILES)
@given(data=st.data())
@fuzz(50)
def test_what_was_cut_off_or_is_none_leaves_an_image_or_an_error(
    folder: Path, suffix: str, data: st.DataObject
) -> None:
    content = data.draw(st.sampled_from(FILES[suffix]))
    cut = content[: data.draw(st.integers(0, len(content)))]
    read(folder / f"a{suffix}", cut + data.draw(st.binary(max_size=40)))

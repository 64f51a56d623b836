# SPDX-License-Identifier: Apache-2.0
"""Which image files a command was given: looked at before imports of seconds."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vllm_flashinfer_vit.towers.spec import TowerError

# Of a folder's files. What else Pillow opens may be a film or a table of numbers, or
# needs a program beside it.
IMAGE_SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".tif", ".tiff"),
    ".webp",
)


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

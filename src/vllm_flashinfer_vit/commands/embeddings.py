# SPDX-License-Identifier: Apache-2.0
"""The file of embeddings that `encode` writes: safetensors, with what made them."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vllm_flashinfer_vit.commands.images import JobError
from vllm_flashinfer_vit.machine import files

# What safetensors calls the metadata: a tensor of this name makes a file unreadable.
_METADATA = "__metadata__"
# Of the metadata: every file has them, and no checkpoint's.
_OWN = {"model", "weights", "depth", "backends"}


def check(path: Path, keep: Iterable[Path], names: Iterable[str]) -> None:
    """Check that embeddings may be written, before hours of work.

    Args:
        path: The file.
        keep: As for `files.check`.
        names: What it is going to name: images, and the model.

    Raises:
        FileError: They may not.
        JobError: The file cannot hold a name.
    """
    files.check(path, keep=keep)
    for name in names:
        if name == _METADATA:
            raise JobError(
                f"{path} cannot hold the name {name!r}, which stands for something "
                "else there; rename that file or folder, or leave --output out"
            )
        try:
            name.encode()
        except UnicodeError:
            raise JobError(
                f"{path} cannot hold the name {name!r}, which is not UTF-8; rename "
                "that file or folder, or leave --output out"
            ) from None
    files.check_replaceable(path, "embeddings of this command", _read_metadata)


def _read_metadata(path: Path) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    if not metadata.keys() >= _OWN:
        raise ValueError("its metadata are not those of embeddings")


def write(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file of embeddings.

    Args:
        path: See `check`.
        tensors: Embeddings by image, or by backend and image.
        metadata: What made them: `model`, `weights`, `depth`, `backends` and more.

    Raises:
        JobError: They cannot be put in such a file.
        FileError: The file cannot be written.
    """
    try:
        content = save(dict(tensors), dict(metadata))
    except SafetensorError as error:
        raise JobError(f"embeddings cannot be saved to {path}: {error}") from error
    files.write(path, content)

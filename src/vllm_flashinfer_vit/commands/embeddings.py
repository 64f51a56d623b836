# SPDX-License-Identifier: Apache-2.0
"""The file of embeddings that `encode` writes: safetensors, with what made them."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vllm_flashinfer_vit.commands.images import JobError
from vllm_flashinfer_vit.machine import files

# Of the metadata: every file has them, and no checkpoint's.
_OWN = {"model", "weights", "depth", "backends"}


def check(path: Path, keep: Iterable[Path]) -> None:
    """Check that embeddings may be written, before hours of work.

    Args:
        path: The file.
        keep: As for `files.check`.

    Raises:
        FileError: They may not.
    """
    files.check(path, keep=keep)
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
        JobError: A name cannot be written.
        FileError: The file cannot be written.
    """
    try:
        content = save(dict(tensors), dict(metadata))
    except (SafetensorError, UnicodeError) as error:
        raise JobError(f"embeddings cannot be saved to {path}: {error}") from error
    files.write(path, content)

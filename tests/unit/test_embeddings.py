# SPDX-License-Identifier: Apache-2.0
"""The file of embeddings: which files it replaces."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from vllm_flashinfer_vit.commands import embeddings  # noqa: E402
from vllm_flashinfer_vit.commands.images import JobError  # noqa: E402
from vllm_flashinfer_vit.machine.files import FileError  # noqa: E402

METADATA = {"model": "m", "weights": "w", "depth": "1 of 2", "backends": "FLASHINFER"}


def test_it_replaces_its_own_file_and_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.touch()
    for value in (1.0, 2.0):
        embeddings.check(path, keep=[], names=["a.png"])
        embeddings.write(path, {"a.png": torch.full((2,), value)}, METADATA)
        assert load_file(path)["a.png"].tolist() == [value, value]


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"model": "m"}])
def test_it_replaces_no_checkpoint(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2)}, path, metadata)
    with pytest.raises(FileError, match="holds no embeddings"):
        embeddings.check(path, keep=[], names=["a.png"])


@pytest.mark.parametrize("content", [b"notes", b"\xff" * 100])
def test_it_replaces_no_file_of_another_kind(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(FileError, match="holds no embeddings"):
        embeddings.check(path, keep=[], names=["a.png"])


def test_a_name_that_would_make_the_file_unreadable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot hold the name '__metadata__'"):
        embeddings.check(tmp_path / "out", keep=[], names=["a.png", "__metadata__"])

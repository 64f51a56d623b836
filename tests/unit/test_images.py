# SPDX-License-Identifier: Apache-2.0
"""Images of the commands: one that is too large for the memory ends no run."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vllm_flashinfer_vit.commands.images import ImageFile, JobError, read_patches

TOO_LARGE = [
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: no memory"),
]


@pytest.mark.parametrize("error", TOO_LARGE, ids=["python", "torch"])
def test_an_image_whose_patches_fill_the_memory_is_left_out(
    tmp_path: Path, error: Exception
) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (4, 4)).save(path)

    def processor(**kwargs: Any) -> None:
        raise error

    failures: list[str] = []
    assert read_patches(ImageFile(path, "a.png", True), processor, {}, failures) is None
    assert failures == [f"Left out: {path} takes more memory than there is."]
    with pytest.raises(JobError, match="takes more memory than there is"):
        read_patches(ImageFile(path, "a.png", False), processor, {}, [])


def test_another_error_of_torch_is_not_taken_for_it(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (4, 4)).save(path)

    def processor(**kwargs: Any) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        read_patches(ImageFile(path, "a.png", True), processor, {}, [])

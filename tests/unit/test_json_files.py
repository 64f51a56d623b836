# SPDX-License-Identifier: Apache-2.0
"""JSON files that are read: what the message of an unusable one says."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from vllm_flashinfer_vit.machine.json_files import read_json, validated


class Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    size: int = Field(ge=1)


class Document(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    unit: Literal["ms"] = "ms"
    rows: dict[str, list[Row]] = {}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "the document is [], not an object"),
        ({}, "name is missing"),
        ({"name": 1}, "name is 1, not a string"),
        ({"name": "a", "unit": "s"}, "unit is 's', not 'ms'"),
        ({"name": "a", "rows": []}, "rows is [], not an object"),
        ({"name": "a", "rows": {"x": 1}}, "rows.x is 1, not a list"),
        (
            {"name": "a", "rows": {"a.b": [{"size": 1}, {"size": "2"}]}},
            "rows['a.b'][1].size is '2', not a whole number",
        ),
        ({"name": "a", "rows": {"x": [{}]}}, "rows.x[0].size is missing"),
        (
            {"name": "a", "rows": {"x": [{"size": 0}]}},
            "rows.x[0].size is 0: Input should be greater than or equal to 1",
        ),
        (
            {"name": "a", "rows": {"x": [{"size": 1, "unit": "s"}]}},
            "rows.x[0].unit is not known",
        ),
    ],
)
def test_the_first_wrong_entry_is_named(document: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        validated(Document, document)
    assert str(caught.value) == message


def test_a_deeply_nested_file_is_an_error_like_others(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="too deeply nested"):
        read_json(path)


def test_a_file_of_another_kind_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.touch()
    # It takes no room on the disk.
    os.truncate(path, 2**40)
    with pytest.raises(ValueError, match="has 1,099,511,627,776 bytes, too many"):
        read_json(path)


def test_no_more_than_a_json_file_is_read_of_what_has_no_size(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    # Both ends, so that neither waits for the other, and the pipe has no end.
    pipe = os.open(path, os.O_RDWR)
    code = (
        "import sys, pathlib, vllm_flashinfer_vit.machine.json_files as j\n"
        "j._MAX_BYTES = 100\n"
        "j.read_json(pathlib.Path(sys.argv[1]))"
    )
    try:
        os.write(pipe, b"0" * 101)
        # Whoever reads on waits for ever.
        child = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(pipe)
    assert "ValueError: it has over 100 bytes, too many" in child.stderr


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text("[1]")
    tracemalloc.start()
    try:
        assert read_json(path) == [1]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**24

# SPDX-License-Identifier: Apache-2.0
"""Damaged files of FP8 scales: the right scales, or an error that names the file."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from _fuzz import GARBAGE, changed, damaged, fuzz
from hypothesis import given
from hypothesis import strategies as st

from vllm_flashinfer_vit.fp8 import scale_files as scales
from vllm_flashinfer_vit.fp8.scale_files import (
    QKV,
    ScaleError,
    ScaleFile,
    from_amax,
    scales_for,
)

MADE_BY = {
    "command": "test",
    "version": "0",
    "vllm": "0.25.1",
    "model": "some/model",
    "method": "abs-max of 16 passes",
}
NAMES = [f"visual.blocks.{n}.attn.attn" for n in range(2)]
AMAX = {
    NAMES[0]: (QKV(448.0, 6.73, 0.0), 72),
    NAMES[1]: (QKV(11.5, 2.25e-3, 3.0e4), 72),
}
MADE = from_amax(AMAX, 1.5, MADE_BY)
CONTENT = scales.dumps(MADE).encode()
UPSTREAM = {
    name: {"q_scale": 2.0, "k": 1, "v": 0.25, "note": "by vLLM"} for name in NAMES
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scales") / "scales.json"


def read(path: Path, content: bytes) -> ScaleFile | None:
    """Return what a file holds, or None after the error that a user should see."""
    path.write_bytes(content)
    try:
        return scales.read(path)
    except ScaleError as error:
        text = str(error)
        assert text.startswith(f"the file of FP8 scales {path} cannot be used: ")
        assert text.endswith("make another by `vllm-flashinfer-vit calibrate`")
        return None


def assert_right(found: ScaleFile, expected: ScaleFile, path: Path) -> None:
    """Each layer has the scales that were written, or is said to be missing.

    Within 1 %, where e4m3 itself rounds by up to 6.
    """
    for name, layer in expected.layers.items():
        try:
            scale = scales_for(found, path, name, 72).scale
        except ScaleError as error:
            assert name in str(error)
        else:
            assert scale == pytest.approx(layer.scale, rel=0.0101)


def assert_usable(found: ScaleFile) -> None:
    assert found.layers
    for layer in found.layers.values():
        assert all(2**-126 <= x < math.inf for x in layer.scale)
        assert all(0 <= x < math.inf for x in layer.amax)
        assert layer.head_dim is None or layer.head_dim >= 1


def test_a_file_that_was_cut_off_anywhere_is_refused(path: Path) -> None:
    closed = CONTENT.rstrip()
    for end in range(len(closed)):
        assert read(path, CONTENT[:end]) is None
    assert read(path, closed) == MADE


@given(content=damaged(CONTENT))
@fuzz(600)
def test_one_wrong_byte_gives_the_right_scales_or_an_error(
    path: Path, content: bytes
) -> None:
    if (found := read(path, content)) is not None:
        assert_usable(found)
        assert_right(found, MADE, path)


@given(document=changed(json.loads(CONTENT)))
@fuzz(300)
def test_one_wrong_entry_gives_the_right_scales_or_an_error(
    path: Path, document: Any
) -> None:
    if (found := read(path, json.dumps(document).encode())) is not None:
        assert_usable(found)
        assert_right(found, MADE, path)


def layers_of(document: dict[str, Any]) -> dict[str, Any]:
    nested = document.get("layers")
    return nested if isinstance(nested, dict) else document


@given(
    document=GARBAGE
    | st.fixed_dictionaries({"layers": GARBAGE})
    | changed(UPSTREAM)
    | changed({"layers": UPSTREAM})
)
@fuzz(300)
def test_what_is_no_file_of_scales_is_refused_or_has_usable_ones(
    path: Path, document: Any
) -> None:
    """vLLM's own form holds nothing that its values could be compared with."""
    if (found := read(path, json.dumps(document).encode())) is not None:
        assert found.is_upstream
        assert_usable(found)
        for name, row in layers_of(document).items():
            if name in UPSTREAM and row == UPSTREAM[name]:
                assert found.layers[name].scale == (2.0, 1.0, 0.25)


@given(content=st.binary(max_size=40) | damaged(CONTENT))
@fuzz(150)
def test_a_damaged_file_is_kept_or_widened_never_narrowed(
    path: Path, content: bytes
) -> None:
    """An engine that saves to it leaves it alone, unless it holds what it did."""
    path.write_bytes(content)
    try:
        merged = scales.save(MADE, path)
    except ScaleError as error:
        assert str(path) in str(error) or "head dims" in str(error)
        assert path.read_bytes() == content
    else:
        assert scales.read(path) == merged
        for name, (amax, _) in AMAX.items():
            seen = merged.layers[name].amax
            assert all(a >= b for a, b in zip(seen, amax, strict=True))


AMAX_VALUES = st.just(0.0) | st.floats(0, 1e300) | st.floats(1e-3, 1e5)
LAYERS = st.dictionaries(
    st.text(min_size=1, max_size=12) | st.sampled_from(NAMES),
    st.tuples(st.builds(QKV, *[AMAX_VALUES] * 3), st.integers(1, 512)),
    max_size=4,
)


@given(amax=LAYERS, margin=st.floats(0, 1e30) | st.floats(0.5, 4))
@fuzz(200)
def test_what_is_written_is_read_to_the_last_bit(
    path: Path, amax: dict[str, tuple[QKV, int]], margin: float
) -> None:
    """What would be refused when read is not written, and the old file is kept."""
    path.write_bytes(CONTENT)
    made = from_amax(amax, margin, MADE_BY)
    try:
        scales.write(made, path)
    except ScaleError as error:
        assert str(path) in str(error)
        assert path.read_bytes() == CONTENT
    else:
        assert_usable(made)
        assert scales.read(path) == made

# SPDX-License-Identifier: Apache-2.0
"""What a patch stands for: known by its fingerprint, and wrapped by nobody else."""

import ast
import functools
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from vllm_flashinfer_vit.machine.versions import TESTED_VLLM
from vllm_flashinfer_vit.patches import fingerprints, source
from vllm_flashinfer_vit.patches.fingerprints import (
    Fingerprints,
    difference,
    known,
    left_out,
)
from vllm_flashinfer_vit.patches.source import fingerprint
from vllm_flashinfer_vit.plugin import all_patches

METHOD = "toy_vllm.layers:Layer.forward"
FUNCTION = "toy_vllm.layers:logged"
SOURCE = """
import functools

def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

class Layer:
    @logged
    @functools.lru_cache
    def forward(self, x):
        return x + 1
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of one module; its method is known."""
    folder = tmp_path / "toy_vllm"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "layers.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    marks = {name: {fingerprint(name): ("7.0", "8.0")} for name in (METHOD, FUNCTION)}
    monkeypatch.setattr(fingerprints, "known", lambda: Fingerprints({}, marks))
    yield folder
    for name in [name for name in sys.modules if name.startswith("toy_vllm")]:
        del sys.modules[name]


@pytest.fixture
def layer(toy: Path) -> Any:
    return importlib.import_module("toy_vllm.layers").Layer


def defined(target: str) -> bool:
    """Whether there is such a method or function."""
    try:
        fingerprint(target)
    except LookupError:
        return False
    return True


def by_a_stranger(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def test_a_known_method_is_no_difference_before_and_after_its_import(
    toy: Path,
) -> None:
    assert difference(METHOD) is None
    assert "toy_vllm" not in sys.modules
    importlib.import_module("toy_vllm.layers")
    assert difference(METHOD) is None


def test_another_body_is_told_with_the_versions_that_were_read(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = {METHOD: {"another": ("7.0", "8.0")}}
    monkeypatch.setattr(fingerprints, "known", lambda: Fingerprints({}, marks))
    assert difference(METHOD) == f"{METHOD} is not as it was read in vLLM up to 8.0"


def test_a_method_that_was_never_read(toy: Path, monkeypatch) -> None:
    monkeypatch.setattr(fingerprints, "known", lambda: Fingerprints({}, {}))
    assert difference(METHOD) == f"{METHOD} is not as it was read in any vLLM"


def test_a_method_without_source(toy: Path, layer: Any) -> None:
    # As compiled modules have it.
    (toy / "layers.py").rename(toy / "layers.so")
    source._block.cache_clear()
    assert "there is no source" in str(difference(METHOD))
    assert "layers.py" in str(difference(METHOD))


def test_a_stranger_around_it_or_within(layer: Any) -> None:
    inner = layer.forward
    layer.forward = by_a_stranger(inner)
    told = f"{METHOD} is wrapped or replaced by {__name__}"
    assert difference(METHOD) == told
    layer.forward = importlib.import_module("toy_vllm.layers").logged(layer.forward)
    assert difference(METHOD) == told
    layer.forward = lambda self, x: x
    assert difference(METHOD) == told


def test_functions_beside_methods(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert difference(FUNCTION) is None
    module = sys.modules[layer.__module__]
    monkeypatch.setattr(module, "logged", by_a_stranger(module.logged))
    assert difference(FUNCTION) == f"{FUNCTION} is wrapped or replaced by {__name__}"
    monkeypatch.delattr(module, "logged")
    assert "there is no" in str(difference(FUNCTION))


def test_a_method_that_is_no_python_function(layer: Any) -> None:
    layer.forward = len
    assert "no Python function" in str(difference(METHOD))
    del layer.forward
    assert "there is no" in str(difference(METHOD))


def test_the_file_knows_what_every_patch_stands_for() -> None:
    wanted = {m for p in all_patches() for m in (*p.stands_for, *p.helpers)}
    assert set(known().methods) == wanted, "run make fingerprints"
    names = {patch.name for patch in all_patches()}
    for version, release in known().releases.items():
        assert names.issuperset(release.left_out), f"{version}: run make fingerprints"
    assert set(TESTED_VLLM) <= known().releases.keys()


def test_the_file_is_as_it_is_written() -> None:
    document = json.loads(fingerprints.FILE.read_text())
    assert json.loads(json.dumps(known().to_json())) == document
    assert document["schema"] == fingerprints.SCHEMA


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_every_patch_fits_this_vllm() -> None:
    for patch in all_patches():
        # One that is in place was checked before it was put there.
        if patch.name not in left_out() and not patch.applied:
            patch.check()


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_programs_stand_for_what_splits_and_turns_q_and_k() -> None:
    """The functions that attention calls by name, not its methods alone."""
    helpers = re.compile(
        r"split_qkv|all_gather_interleave|apply_rope|_?apply_rotary_(pos_)?emb\w*"
    )
    missing, found = set(), 0
    for patch in all_patches():
        if not patch.name.endswith("-blocks") or patch.name in left_out():
            continue
        known_there = *patch.stands_for, *patch.helpers
        for method in filter(source.is_there, known_there):
            module, _, path = method.partition(":")
            owner = path.rpartition(".")[0]
            for call in ast.walk(source._method(method, None)):
                name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
                wanted = f"{module}:{name.replace('self.', f'{owner}.')}"
                # Not vLLM's layers and what a module has from elsewhere.
                if helpers.fullmatch(name.removeprefix("self.")) and defined(wanted):
                    found += 1
                    missing |= {wanted} - {*known_there}
    assert not missing
    assert found

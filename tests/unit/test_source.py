# SPDX-License-Identifier: Apache-2.0
"""What vLLM's functions take, read from their source."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_flashinfer_vit.patches.source import parameters

SOURCE = """
import nothing_of_this_name

def forward(self, other): ...

class Layer:
    kind = "a layer"

    def forward(self, q, /, k, *rest, scale, **options): ...

    @classmethod
    def build(cls, size): ...

    def twice(self, first): ...

    def twice(self, second): ...

if True:
    class Late:
        def forward(self): ...

class Child(Layer):
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "toy_package" / "inner"
    folder.mkdir(parents=True)
    # Importing the package, or its module, fails.
    (tmp_path / "toy_package" / "__init__.py").write_text("1 / 0")
    (folder / "layers.py").write_text(SOURCE)
    (folder / "broken.py").write_text("class Layer(:")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "toy_package.inner"
    assert not [name for name in sys.modules if name.startswith("toy_package")]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("Layer.forward", ("self", "q", "k", "rest", "scale", "options")),
        ("Layer.build", ("cls", "size")),
        ("Layer.twice", ("self", "second")),
        ("Late.forward", ("self",)),
    ],
)
def test_the_parameters_are_read(
    package: str, path: str, names: tuple[str, ...]
) -> None:
    assert parameters(f"{package}.layers:{path}") == names


@pytest.mark.parametrize(
    "target",
    [
        "layers:Layer.backward",
        "layers:Layer.kind",
        "layers:Other.forward",
        # A patch replaces what a class has itself.
        "layers:Child.forward",
        "missing:Layer.forward",
        "broken:Layer.forward",
    ],
)
def test_what_is_not_there(package: str, target: str) -> None:
    with pytest.raises(LookupError):
        parameters(f"{package}.{target}")


def test_a_package_that_is_not_there() -> None:
    with pytest.raises(LookupError):
        parameters("no_such_package.layers:Layer.forward")


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_every_patch_fits_the_source_of_this_vllm() -> None:
    from vllm_flashinfer_vit.plugin import all_patches

    for patch in all_patches():
        assert parameters(patch.target) == patch.parameters, patch.name

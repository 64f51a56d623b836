# SPDX-License-Identifier: Apache-2.0
"""What vLLM's functions take, read from their source."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_flashinfer_vit.patches.source import fingerprint, parameters

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


def test_functions_of_a_module_have_fingerprints(package: str) -> None:
    marks = {
        fingerprint(f"{package}.layers:{path}")
        for path in ("forward", "Layer.forward", "Late.forward")
    }
    assert len(marks) == 3
    for path in ("twice", "Layer", "nothing"):
        with pytest.raises(LookupError, match=f"no def {path}"):
            fingerprint(f"{package}.layers:{path}")


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


BODY = """
class Block:
    def forward(self, x, scale=2):
        y = x * scale
        return self.mlp(y)
"""
SAME = """
@decorated
class Block(Module):
    '''Another docstring.

class Block:
    '''

    def forward(self, x: "Tensor", scale: int = (2)) -> "Tensor":
        # A comment.
        '''What it does.'''
        z: int
        y: int = (
x * scale
        )
        return self.mlp(
            y
        )

    def other(self): ...
"""


def in_file(folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "toy.py").write_text(text)
    return fingerprint("toy:Block.forward", folder)


def test_looks_do_not_count(tmp_path: Path) -> None:
    assert in_file(tmp_path / "a", BODY) == in_file(tmp_path / "b", SAME)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x * scale", "x + scale"),
        ("scale=2", "scale=3"),
        ("scale=2", "scale=2.0"),
        ("scale=2", "*, scale=2"),
        ("self.mlp(y)", "self.mlp(x)"),
        ("return self.mlp(y)", "return (self.mlp(y),)"),
        ("    def forward", "    @wrapped\n    def forward"),
        ("    def forward", "    async def forward"),
        ("return", "print(x)\n        return"),
    ],
)
def test_what_it_does_counts(tmp_path: Path, old: str, new: str) -> None:
    assert old in BODY
    changed = in_file(tmp_path / "b", BODY.replace(old, new))
    assert in_file(tmp_path / "a", BODY) != changed


def test_the_fingerprint_is_the_same_for_every_python(tmp_path: Path) -> None:
    """Newer ones parse f-strings in another way, and give nodes further fields."""
    text = BODY.replace("x * scale", """f"{x!r:>{scale}} and {x=}" 'b' f'{x:.2f}'""")
    assert in_file(tmp_path / "a", text) == "a097c8a4837e"

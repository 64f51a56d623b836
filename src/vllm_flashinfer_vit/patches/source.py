# SPDX-License-Identifier: Apache-2.0
"""A method by its source: what it takes, and a fingerprint of what it does.

Importing vLLM's models takes seconds, and parsing their files a noticeable part of one.
So only the text of the method's class is parsed, whether it is imported or not.
"""

import ast
import functools
import hashlib
import importlib.util
import inspect
import re
import textwrap
import tokenize
from pathlib import Path
from typing import Any

# What a function does follows from none of them.
_LEFT_OUT = frozenset({"annotation", "ctx", "kind", "returns", "type_comment"})
# Hexadecimal digits that are kept of a SHA-256.
_DIGITS = 12

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters(
    target: str, folder: Path | None = None, inherited_from: str = ""
) -> tuple[str, ...]:
    """Return the names of a method's parameters, in order, without importing it.

    Args:
        target: `module:Class.method`.
        folder: Where the package lies; None for the one that would be imported.
        inherited_from: `module:Class` that defines the method; empty for the target's.

    Raises:
        LookupError: There is no such method, or no source of it, or the target's class
            defines it although another one should.
    """
    if inherited_from:
        if _defined(target, folder) is not None:
            raise LookupError(f"{target} is not inherited")
        target = f"{inherited_from}.{target.rpartition('.')[2]}"
    found = _method(target, folder).args
    names = [arg.arg for arg in (*found.posonlyargs, *found.args)]
    names += [found.vararg.arg] if found.vararg else []
    names += [arg.arg for arg in found.kwonlyargs]
    names += [found.kwarg.arg] if found.kwarg else []
    return tuple(names)


def fingerprint(target: str, folder: Path | None = None) -> str:
    """Return a hash of what a method or function does, the same for every Python.

    Comments, docstrings, annotations and layout do not count.

    Args:
        target: `module:Class.method`, the method defined in the class, or
            `module:function`.
        folder: Where the package lies; None for the one that would be imported.

    Raises:
        LookupError: There is no such method or function, or no source of it.
    """
    text = repr(_essence(_method(target, folder)))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def is_there(target: str) -> bool:
    """Whether there is a method or function, see `fingerprint`."""
    try:
        _method(target, None)
    except LookupError:
        return False
    return True


def _method(target: str, folder: Path | None) -> _Function:
    module, _, path = target.partition(":")
    class_name, _, attribute = path.partition(".")
    if not attribute:
        function = _block(_source(module, folder), "def", path)
        assert isinstance(function, _Function)
        return function
    found = _defined(target, folder)
    if found is None:
        raise LookupError(f"there is no {target}")
    return found


def _defined(target: str, folder: Path | None) -> _Function | None:
    """Return the method that a class defines itself, or None."""
    module, _, path = target.partition(":")
    class_name, _, attribute = path.partition(".")
    owner = _block(_source(module, folder), "class", class_name)
    assert isinstance(owner, ast.ClassDef)
    found = None
    for part in owner.body:
        if isinstance(part, _Function) and part.name == attribute:
            found = part
    return found


def _source(module: str, folder: Path | None) -> Path:
    package, *parts = module.split(".")
    if folder is None:
        # Of a package at the top, which is not imported for that.
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise LookupError(f"{package} is not installed")
        folder = Path(spec.submodule_search_locations[0]).parent
    return Path(folder, package, *parts).with_suffix(".py")


@functools.cache
def _block(file: Path, word: str, name: str) -> ast.ClassDef | _Function:
    """Return a class or a function, which `word` says."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise LookupError(f"there is no source {file}") from error
    # Functions at the top only: others are methods.
    indent = r"\s*" if word == "class" else ""
    head = re.compile(rf"{indent}{word} {name}\s*[(:]")
    starts = [at for at, line in enumerate(lines) if head.match(line)]
    # The last definition holds; a docstring may have a line that looks like one.
    for start in reversed(starts):
        try:
            block = inspect.getblock(lines[start:])
            (found,) = ast.parse(textwrap.dedent("".join(block))).body
        except (SyntaxError, tokenize.TokenError, ValueError):
            continue
        assert isinstance(found, ast.ClassDef | _Function)
        return found
    raise LookupError(f"there is no {word} {name} in {file}")


def _essence(node: Any) -> Any:
    """Return a tree of tuples with what counts, in the order of the source."""
    if isinstance(node, list):
        return tuple(_essence(part) for part in node if not _is_idle(part))
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign(targets=[node.target], value=node.value)
    if isinstance(node, ast.JoinedStr):
        # Python 3.12 ends some f-strings with an empty constant.
        node = ast.JoinedStr([v for v in node.values if getattr(v, "value", v) != ""])
    if not isinstance(node, ast.AST):
        return node
    fields = (
        (name, _essence(value))
        for name, value in ast.iter_fields(node)
        if name not in _LEFT_OUT
    )
    # Newer Pythons have further fields, which are empty here.
    return type(node).__name__, *(item for item in fields if item[1] not in (None, ()))


def _is_idle(node: Any) -> bool:
    """Whether it is a docstring or a mere declaration."""
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )

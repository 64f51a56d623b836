# SPDX-License-Identifier: Apache-2.0
"""What a function takes, by its source: importing vLLM's models takes seconds."""

import ast
import importlib.util
from pathlib import Path


def parameters(target: str) -> tuple[str, ...]:
    """Return the names of a function's parameters, in order, without importing it.

    Args:
        target: `module:Class.attribute`; the function must be defined in the class.

    Raises:
        LookupError: There is no such function, or no source of it.
    """
    module, _, path = target.partition(":")
    class_name, _, attribute = path.partition(".")
    found = None
    for node in ast.walk(_parse(module)):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == attribute:
                    found = part.args
    if found is None:
        raise LookupError(target)
    names = [arg.arg for arg in (*found.posonlyargs, *found.args)]
    names += [found.vararg.arg] if found.vararg else []
    names += [arg.arg for arg in found.kwonlyargs]
    names += [found.kwarg.arg] if found.kwarg else []
    return tuple(names)


def _parse(module: str) -> ast.Module:
    package, *parts = module.split(".")
    # Of a package at the top, which is not imported for that.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(module)
    file = Path(spec.submodule_search_locations[0], *parts).with_suffix(".py")
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError) as error:
        raise LookupError(module) from error

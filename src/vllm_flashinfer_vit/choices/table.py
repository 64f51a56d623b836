# SPDX-License-Identifier: Apache-2.0
"""Files of measured choices: schema, read, validate, write.

One JSON file holds one GPU's classes, and the measurements that they follow from. The
ones that come with the package lie in this folder; all are written by
`vllm-flashinfer-vit tune` and never by hand.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_flashinfer_vit.settings import KERNEL_NAMES, SERVES_UP_TO, KernelName

SCHEMA = "vllm-flashinfer-vit/choices/2"
BUNDLED = Path(__file__).parent / "data"


class TableError(ValueError):
    """A file of choices cannot be used; the message names it and the remedy."""


class Class(NamedTuple):
    """A range of longest sequences, and the kernels that serve it.

    Attributes:
        max_len: Longest sequence of the class, in tokens; None for any length.
        kernel: The kernel's name.
        many: The kernel for batches of many sequences, most of which may be empty; None
            if `kernel` serves them too.
    """

    max_len: int | None
    kernel: KernelName
    many: KernelName | None = None


class Measurement(NamedTuple):
    """What one call takes, by kernel.

    Attributes:
        dtype: Name of the activation dtype, `bfloat16`.
        head_dim: Head dim in elements.
        longest: Length of every sequence, in tokens.
        num_seqs: Number of sequences.
        us: Median time in microseconds, by kernel.
    """

    dtype: str
    head_dim: int
    longest: int
    num_seqs: int
    us: Mapping[str, float]


@dataclass(frozen=True)
class Table:
    """One GPU's measured choices.

    Attributes:
        made_by: The command, the GPU's name (`gpu`) and the versions that made it.
        classes: Classes, ascending, by `key(dtype, head_dim)`; the last is unbounded.
        measurements: What the classes follow from.
        left_out: What was not measured, and why.
    """

    made_by: Mapping[str, Any]
    classes: Mapping[str, tuple[Class, ...]]
    measurements: tuple[Measurement, ...] = ()
    left_out: tuple[str, ...] = ()


def key(dtype: str, head_dim: int) -> str:
    """Name an entry of `Table.classes`: `bfloat16/80`."""
    return f"{dtype}/{head_dim}"


def file_name(gpu_name: str) -> str:
    """Return the name of a GPU's file: `h200.json` for `NVIDIA H200`."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")
    return f"{slug.removeprefix('nvidia-')}.json"


def read(folder: Path, gpu_name: str) -> Table | None:
    """Read a GPU's file in a folder, or return None if there is none.

    Raises:
        TableError: The file cannot be used.
    """
    path = folder / file_name(gpu_name)
    # False also where the folder may not be entered, as a container user's home.
    if not os.path.exists(path):
        return None
    try:
        table = _parse(json.loads(path.read_text(encoding="utf-8")))
        if table.made_by["gpu"] != gpu_name:
            raise ValueError(f"it is of {table.made_by['gpu']!r}, not of {gpu_name!r}")
    except (OSError, ValueError) as error:
        raise TableError(
            f"the file of choices {path} cannot be used: {error}; delete it or run "
            "`vllm-flashinfer-vit tune` again"
        ) from error
    return table


def write(table: Table, path: Path) -> None:
    """Write a table; whoever reads the file meanwhile sees the old or the new one.

    Raises:
        ValueError: The table would be refused when read.
        OSError: The file cannot be written.
    """
    text = dumps(table)
    _parse(json.loads(text))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def dumps(table: Table) -> str:
    """Return a table's JSON text, a line for each entry and each measurement."""
    classes = (
        f"{json.dumps(name)}: {json.dumps([row._asdict() for row in rows])}"
        for name, rows in table.classes.items()
    )
    measurements = (json.dumps(row._asdict()) for row in table.measurements)
    parts = (
        f'  "schema": {json.dumps(SCHEMA)}',
        f'  "made_by": {_block("{}", _pairs(table.made_by))}',
        f'  "left_out": {_block("[]", map(json.dumps, table.left_out))}',
        f'  "classes": {_block("{}", classes)}',
        f'  "measurements": {_block("[]", measurements)}',
    )
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _pairs(mapping: Mapping[str, Any]) -> Iterable[str]:
    return (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in mapping.items())


def _block(brackets: str, lines: Iterable[str]) -> str:
    text = ",\n".join(f"    {line}" for line in lines)
    return f"{brackets[0]}\n{text}\n  {brackets[1]}" if text else brackets


def _parse(document: Any) -> Table:
    """Check a document against `SCHEMA`.

    Raises:
        ValueError: It does not follow it.
    """
    if not isinstance(document, dict):
        raise ValueError("it holds no JSON object")
    if document.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {document.get('schema')!r}, not {SCHEMA!r}")
    try:
        made_by = dict(document["made_by"])
        for name in ("gpu", "vllm"):
            if not isinstance(made_by[name], str):
                raise ValueError(f"made_by.{name} is {made_by[name]!r}, not a string")
        return Table(
            made_by=made_by,
            classes={
                name: _parse_classes(name, rows)
                for name, rows in document["classes"].items()
            },
            measurements=tuple(Measurement(**row) for row in document["measurements"]),
            left_out=tuple(document["left_out"]),
        )
    except KeyError as error:
        raise ValueError(f"the entry {error} is missing") from None
    # A list in place of an object, or an object with other members.
    except (TypeError, AttributeError) as error:
        raise ValueError(f"an entry has the wrong form ({error})") from None


def _parse_classes(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[Class, ...]:
    if not re.fullmatch(r"[a-z0-9_]+/[1-9][0-9]*", name):
        raise ValueError(f"{name!r} is no dtype/head dim such as bfloat16/80")
    classes = []
    longest: int | None = 0
    for row in rows:
        kernel, max_len, many = row["kernel"], row["max_len"], row["many"]
        kernels = (kernel,) if many is None else (kernel, many)
        for used in kernels:
            if used not in KERNEL_NAMES:
                good = ", ".join(KERNEL_NAMES)
                raise ValueError(f"{name} names the kernel {used!r}; known are {good}")
        if longest is None:
            raise ValueError(f"{name} has a class behind the one for any length")
        if max_len is not None and (type(max_len) is not int or max_len <= longest):
            raise ValueError(
                f"{name} has a class up to {max_len!r} tokens behind {longest}: whole "
                "numbers must ascend"
            )
        for used in kernels:
            bound = SERVES_UP_TO.get(used)
            if bound is not None and (max_len is None or max_len > bound):
                raise ValueError(
                    f"{name} gives {used} sequences of more than {bound} tokens"
                )
        longest = max_len
        classes.append(Class(max_len, kernel, many))
    if longest is not None:
        raise ValueError(f"{name} lacks the last class, whose max_len is null")
    return tuple(classes)

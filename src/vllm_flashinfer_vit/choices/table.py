# SPDX-License-Identifier: Apache-2.0
"""Files of measured choices: schema, read, validate, write.

One JSON file holds one GPU's classes, and the measurements that they follow from. The
ones that come with the package lie in `data/`, in a folder for each vLLM that they were
measured with; all are written by `vllm-flashinfer-vit tune` and never by hand.
"""

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, ConfigDict, Field

from vllm_flashinfer_vit.choices.gemm_table import (
    GemmClass,
    GemmMeasurement,
    GemmMeasurementRow,
    GemmRows,
    Time,
    check_bounds,
)
from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.machine import files
from vllm_flashinfer_vit.machine.json_files import (
    Strict,
    lined,
    one_of,
    read_json,
    validated,
)
from vllm_flashinfer_vit.ops.plan import Class

# 2: without the version of QuACK. 3: without GEMMs.
_Schema = Literal[
    "vllm-flashinfer-vit/choices/2",
    "vllm-flashinfer-vit/choices/3",
    "vllm-flashinfer-vit/choices/4",
]
SCHEMA: _Schema = "vllm-flashinfer-vit/choices/4"
# Before the number in all of them.
_KIND = SCHEMA.rstrip("0123456789")
BUNDLED = Path(__file__).parent / "data"
# After the reason why a run measured nothing of an entry that a table has.
_STAYS = "; what was measured before stays"


class TableError(ValueError):
    """A file of choices cannot be used; the message names it and the remedy."""


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
        made_by: The command, the GPU's name (`gpu`), and `Stack.versions`.
        classes: Classes, ascending, by `key(dtype, head_dim)`; the last is unbounded.
        measurements: What the classes follow from.
        left_out: What was not measured, and why.
        gemms: The same of GEMMs of layers in FP8, by `GemmLayer.key`. A layer without
            an entry has vLLM's own.
        gemm_measurements: What `gemms` follow from.
    """

    made_by: Mapping[str, Any]
    classes: Mapping[str, tuple[Class, ...]]
    measurements: tuple[Measurement, ...] = ()
    left_out: tuple[str, ...] = ()
    gemms: Mapping[str, tuple[GemmClass, ...]] = field(default_factory=dict)
    gemm_measurements: tuple[GemmMeasurement, ...] = ()


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
    return read_file(folder / file_name(gpu_name), gpu_name)


def read_file(path: Path, gpu_name: str) -> Table | None:
    """Read a file of a GPU, or return None if there is none.

    Raises:
        TableError: The file cannot be used.
    """
    # False also where the folder may not be entered, as a container user's home.
    if not os.path.exists(path):
        return None
    try:
        table = _parse(read_json(path))
        if table.made_by["gpu"] != gpu_name:
            raise ValueError(f"it is of {table.made_by['gpu']!r}, not of {gpu_name!r}")
    except (OSError, ValueError) as error:
        raise TableError(
            f"the file of choices {path} cannot be used: {error}; delete it or run "
            "`vllm-flashinfer-vit tune` again"
        ) from error
    return table


def check_kind(path: Path) -> None:
    """Check that a file holds choices, of any GPU and by any schema of them.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds something else.
    """
    document = read_json(path)
    schema = document.get("schema") if isinstance(document, dict) else None
    if not str(schema).startswith(_KIND):
        raise ValueError(f"its schema is {schema!r}")


def read_bundled(gpu_name: str, vllm: str | None) -> list[Table]:
    """Read the package's files of a GPU, best first; empty if there are none.

    That of the newest vLLM up to the installed one comes first, then older ones, newest
    first, then newer ones, oldest first.

    Args:
        gpu_name: The GPU's product name.
        vllm: The installed version, or None if it is not known: the newest is best. A
            release candidate or a development build counts as its release.

    Raises:
        TableError: A file cannot be used.
    """
    by_release = {Version(folder.name).release: folder for folder in BUNDLED.iterdir()}
    newest_first = sorted(by_release, reverse=True)
    here = max(newest_first, default=())
    if vllm is not None:
        with contextlib.suppress(InvalidVersion):
            here = Version(vllm).release
    order = [release for release in newest_first if release <= here]
    order += [release for release in reversed(newest_first) if release > here]
    tables = (read(by_release[release], gpu_name) for release in order)
    return [table for table in tables if table is not None]


def added(old: Table, new: Table) -> Table:
    """Return a later run's table with what an older one has beside it.

    Args:
        old: Of the same GPU and versions.
        new: Its dtypes and head dims, and its layers' GEMMs, count.
    """
    kept = {name: rows for name, rows in old.classes.items() if name not in new.classes}
    gemms = {name: rows for name, rows in old.gemms.items() if name not in new.gemms}
    stay = kept.keys() | gemms.keys()
    new_out = [line + _STAYS if _entry(line) in stay else line for line in new.left_out]
    measured = new.classes.keys() | new.gemms.keys()
    tried = {_entry(line) for line in new.left_out}
    # Of what was tried again, only what its choices were measured without still holds.
    still_out = [
        line
        for line in old.left_out
        if (name := _entry(line)) not in measured
        and (name not in tried or (name in stay and not line.endswith(_STAYS)))
    ]
    return Table(
        {
            **new.made_by,
            "command": " && ".join(
                str(table.made_by.get("command", "unknown")) for table in (old, new)
            ),
        },
        kept | dict(new.classes),
        (
            *(row for row in old.measurements if key(row.dtype, row.head_dim) in kept),
            *new.measurements,
        ),
        (*still_out, *new_out),
        gemms | dict(new.gemms),
        (
            *(row for row in old.gemm_measurements if row.layer in gemms),
            *new.gemm_measurements,
        ),
    )


def _entry(line: str) -> str:
    """Return the entry that a line of `Table.left_out` is about."""
    return line.partition(":")[0]


def write(table: Table, path: Path) -> None:
    """Write a table, see `files.write`; its folder is made if there is none.

    Raises:
        ValueError: The table would be refused when read.
        FileError: The file cannot be written.
    """
    text = dumps(table)
    _parse(json.loads(text))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, text.encode())


def dumps(table: Table) -> str:
    """Return a table's JSON text, a line for each entry and each measurement."""
    return lined(to_json(table))


def to_json(table: Table) -> dict[str, Any]:
    """Return the document of a table's file."""
    return {
        "schema": SCHEMA,
        "made_by": dict(table.made_by),
        "left_out": list(table.left_out),
        "classes": {name: _rows(rows) for name, rows in table.classes.items()},
        "measurements": _rows(table.measurements),
        "gemms": {name: _rows(rows) for name, rows in table.gemms.items()},
        "gemm_measurements": _rows(table.gemm_measurements),
    }


def _rows(records: Sequence[Any]) -> list[dict[str, Any]]:
    return [record._asdict() for record in records]


def _parse(document: Any) -> Table:
    """Check a document against `SCHEMA`.

    Raises:
        ValueError: It does not follow it.
    """
    checked = validated(_Document, document)
    return Table(
        # With the members that nothing here reads.
        made_by=document["made_by"],
        classes={
            name: tuple(Class(row.max_len, row.kernel, row.many) for row in rows)
            for name, rows in checked.classes.items()
        },
        measurements=tuple(
            Measurement(row.dtype, row.head_dim, row.longest, row.num_seqs, row.us)
            for row in checked.measurements
        ),
        left_out=tuple(checked.left_out),
        gemms={
            name: tuple(GemmClass(row.max_rows, row.gemm) for row in rows)
            for name, rows in checked.gemms.items()
        },
        gemm_measurements=tuple(
            GemmMeasurement(row.layer, row.rows, row.us)
            for row in checked.gemm_measurements
        ),
    )


class _MadeBy(Strict):
    gpu: str
    vllm: str
    torch: str | None = None
    triton: str | None = None
    flashinfer: str | None = None
    cudnn: str | None = None
    quack: str | None = None


_KernelName = Annotated[str, one_of(KERNELS)]


class _ClassRow(Strict):
    max_len: int | None
    kernel: _KernelName
    many: _KernelName | None


def _ascending(rows: list[_ClassRow]) -> list[_ClassRow]:
    check_bounds([row.max_len for row in rows], "max_len", "tokens")
    for row in rows:
        for used in filter(None, (row.kernel, row.many)):
            bound = KERNELS[used].max_len
            if bound is not None and (row.max_len is None or row.max_len > bound):
                raise ValueError(
                    f"it gives {used} sequences of more than {bound} tokens"
                )
    return rows


_Rows = Annotated[list[_ClassRow], AfterValidator(_ascending)]


def _named(classes: dict[str, _Rows]) -> dict[str, _Rows]:
    for name in classes:
        if not re.fullmatch(r"[a-z0-9_]+/[1-9][0-9]{0,8}", name):
            raise ValueError(f"{name!r} is no dtype/head dim such as bfloat16/80")
    return classes


class _MeasurementRow(Strict):
    model_config = ConfigDict(extra="forbid")

    dtype: str
    head_dim: int
    longest: int
    num_seqs: int
    us: dict[str, Time]


class _Document(Strict):
    schema_: _Schema = Field(alias="schema")
    made_by: _MadeBy
    classes: Annotated[dict[str, _Rows], AfterValidator(_named)]
    measurements: list[_MeasurementRow]
    left_out: list[str]
    gemms: GemmRows = {}
    gemm_measurements: list[GemmMeasurementRow] = []

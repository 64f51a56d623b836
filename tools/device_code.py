# SPDX-License-Identifier: Apache-2.0
"""Empties what a CUDA library holds for other GPUs, so that it compresses to less.

nvcc puts a library's device code into containers, each with an entry for each GPU and
maybe PTX, which the driver compiles. The driver reads the entry that fits its GPU, and
goes past the others by their sizes; so their contents may be zeros. The container's
header is in CUDA's `fatbinary_section.h`. The entries' is not documented: a container
that does not add up is left as it is.
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MAGIC = struct.pack("<I", 0xBA55ED50)
# Magic, version, size of this header, size of all entries.
_HEADER = struct.Struct("<IHHQ")
_VERSION = 1
# Kind, unknown, size of this header, size of the contents; the GPU comes at 28.
_ENTRY = struct.Struct("<HHIQ")
_GPU_AT = 28
_PTX, _MACHINE_CODE = 1, 2


class _Entry(NamedTuple):
    """Code for a GPU: what it is, its compute capability times ten, and where."""

    kind: int
    gpu: int
    start: int
    size: int


def keep_only(library: Path, gpu: int) -> int:
    """Fill the code of other GPUs with zeros, in place.

    Machine code is kept that runs on the GPU: that of the same major compute capability
    and of its minor one or a lower one. PTX is kept where there is none.

    Args:
        library: A file of any kind; one without device code stays as it is.
        gpu: Compute capability times ten, 90 for 9.0.

    Returns:
        How many bytes are zeros now.
    """
    emptied = 0
    if not library.stat().st_size:
        return emptied
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for entries in _containers(data):
            fits = [
                e.kind == _MACHINE_CODE and e.gpu // 10 == gpu // 10 and e.gpu <= gpu
                for e in entries
            ]
            for entry, is_kept in zip(entries, fits, strict=True):
                if is_kept or (entry.kind == _PTX and not any(fits)):
                    continue
                if entry.kind in (_PTX, _MACHINE_CODE):
                    data[entry.start : entry.start + entry.size] = bytes(entry.size)
                    emptied += entry.size
    return emptied


def _containers(data: mmap.mmap) -> Iterator[list[_Entry]]:
    at = data.find(_MAGIC)
    while at != -1:
        end, entries = _container(data, at)
        if entries:
            yield entries
        at = data.find(_MAGIC, end)


def _container(data: mmap.mmap, at: int) -> tuple[int, list[_Entry]]:
    """Return where to look on, and the entries; none if it does not add up."""
    nothing = at + len(_MAGIC), []
    if at + _HEADER.size > len(data):
        return nothing
    _, version, header, size = _HEADER.unpack_from(data, at)
    position, end = at + header, at + header + size
    if version != _VERSION or header != _HEADER.size or end > len(data):
        return nothing
    entries = []
    while position + _GPU_AT + 4 <= end:
        kind, _, header, size = _ENTRY.unpack_from(data, position)
        (gpu,) = struct.unpack_from("<I", data, position + _GPU_AT)
        if header <= _GPU_AT or position + header + size > end:
            return nothing
        entries.append(_Entry(kind, gpu, position + header, size))
        position += header + size
    return (end, entries) if position == end else nothing

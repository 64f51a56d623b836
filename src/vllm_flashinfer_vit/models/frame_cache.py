# SPDX-License-Identifier: Apache-2.0
"""Tensors that depend on the size of a frame alone, kept up to a number of bytes."""

from collections import OrderedDict
from collections.abc import Callable

import torch

Tables = tuple[torch.Tensor, ...]


class FrameCache:
    """Keeps tables by rows and columns of a frame; the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        """Begin empty; tables of more than `max_bytes` are never kept."""
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._tables: OrderedDict[tuple[int, int], Tables] = OrderedDict()

    def get(self, rows: int, columns: int, make: Callable[[], Tables]) -> Tables:
        """Return a frame's tables, not to be written, from `make` the first time."""
        size = rows, columns
        if (tables := self._tables.get(size)) is not None:
            self._tables.move_to_end(size)
            return tables
        tables = make()
        if _bytes(tables) > self.max_bytes:
            return tables
        self._tables[size] = tables
        self.held_bytes += _bytes(tables)
        while self.held_bytes > self.max_bytes:
            _, oldest = self._tables.popitem(last=False)
            self.held_bytes -= _bytes(oldest)
        return tables


def _bytes(tables: Tables) -> int:
    return sum(table.nbytes for table in tables)

# SPDX-License-Identifier: Apache-2.0
"""What a benchmark could not run, and why."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class Failures:
    """What did not run and why, for the end of the output."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, what: str, reason: str) -> None:
        """Note and print one failure; a line of reason is enough."""
        (first, *_) = reason.strip().splitlines() or ["no reason was given"]
        line = f"{what}: {first}"
        self.lines.append(line)
        print(f"  not run: {line}", flush=True)

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """Note an exception and go on, unless the GPU is lost with it."""
        try:
            yield
        except Exception as error:
            self.add(what, f"{type(error).__name__}: {error}")
            if torch.cuda.is_initialized():
                # Raises if every further call of this process would fail.
                torch.cuda.synchronize()

    def end(self, rows: Path) -> None:
        """Print every failure once more and where rows are; end with 1 if one is."""
        if self.lines:
            print("\nNot run:")
            for line in dict.fromkeys(self.lines):
                print(f"  {line}")
        print(f"rows in {rows}")
        if self.lines:
            raise SystemExit(1)

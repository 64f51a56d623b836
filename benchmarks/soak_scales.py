# SPDX-License-Identifier: Apache-2.0
"""What soak.py does to the scale file that servers share, while they serve."""

import random
import time
from pathlib import Path

from vllm_flashinfer_vit.fp8 import scale_files

_POLL_S = 0.5


def saved_layers(path: Path, timeout_s: float) -> int:
    """Return how many layers a scale file has, once servers have saved it.

    Args:
        path: The file.
        timeout_s: How long to wait for it.

    Raises:
        ScaleError: There is none by then, or it is damaged.
    """
    until = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < until:
        time.sleep(_POLL_S)
    return len(scale_files.read(path).layers)


class Mischief:
    """Replaces, cuts and removes a file, as people and full disks do.

    Attributes:
        count: How often so far.
    """

    WAYS = ("replace", "rewrite", "truncate", "empty", "garble", "remove")

    def __init__(self, path: Path, seed: int) -> None:
        """Keep what the file holds, to put it back at times.

        Args:
            path: The file, as servers have saved it.
            seed: Decides what is done.
        """
        self.count = 0
        self._path, self._rng = path, random.Random(seed)
        self._good = path.read_bytes()

    def step(self) -> None:
        """Do one of `WAYS`, and wait a while."""
        getattr(self, f"_{self._rng.choice(self.WAYS)}")()
        self.count += 1
        time.sleep(self._rng.uniform(0.05, 0.5))

    def _replace(self) -> None:
        """As one, as this package does."""
        other = self._path.with_name(f"{self._path.name}.new")
        other.write_bytes(self._good)
        other.replace(self._path)

    def _rewrite(self) -> None:
        """In place and slowly, as an editor does."""
        half = len(self._good) // 2
        with self._path.open("wb", buffering=0) as file:
            file.write(self._good[:half])
            time.sleep(self._rng.uniform(0, 0.1))
            file.write(self._good[half:])

    def _truncate(self) -> None:
        self._path.write_bytes(self._good[: self._rng.randrange(len(self._good))])

    def _empty(self) -> None:
        self._path.write_bytes(b"")

    def _garble(self) -> None:
        self._path.write_bytes(self._rng.randbytes(len(self._good)))

    def _remove(self) -> None:
        self._path.unlink(missing_ok=True)

# SPDX-License-Identifier: Apache-2.0
"""What soak.py does to the scale file while servers save into it, and what must hold.

An engine saves once, after its 16th step with images, into what it finds there.
"""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from vllm_flashinfer_vit.fp8 import scale_files
from vllm_flashinfer_vit.fp8.scale_files import QKV, ScaleError
from vllm_flashinfer_vit.fp8.state import made_by_engine
from vllm_flashinfer_vit.towers.spec import NAMED_MODELS

# What `EngineScales.after_step` logs.
SAVED = "Saved FP8 scales of "
NOT_SAVED = "the FP8 scales were not saved to "
# Short, so that the file may change while a save is under way.
_PAUSE_S = 0.01


def valid_file(model: str, checkpoint: Path) -> bytes:
    """Return a scale file that the servers of a model's checkpoint would widen."""
    config = NAMED_MODELS[model][1]
    head_dim = config.get("embed_dim", config["hidden_size"]) // config["num_heads"]
    seen = {"visual.blocks.0.attn.attn": (QKV(1.0, 1.0, 1.0), head_dim)}
    scales = scale_files.from_amax(seen, 1.5, made_by_engine(str(checkpoint)))
    return scale_files.dumps(scales).encode()


class Mischief:
    """Replaces, cuts and removes a file, as people and full disks do.

    Attributes:
        count: How often so far.
        last: What it wrote last; None if it removed the file.
    """

    WAYS = ("replace", "rewrite", "truncate", "empty", "garble", "remove")

    def __init__(self, path: Path, good: bytes, seed: int) -> None:
        """Begin without a change.

        Args:
            path: The file, which may not be there yet.
            good: A valid one.
            seed: Decides what is done.
        """
        self.count = 0
        self.last: bytes | None = None
        self._path, self._good, self._rng = path, good, random.Random(seed)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Go on in a thread until the block ends; its own errors are raised there."""
        is_over = threading.Event()

        def work() -> None:
            while not is_over.is_set():
                self.step()

        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work)
            try:
                yield
            finally:
                is_over.set()
        working.result()

    def step(self) -> None:
        """Do one of `WAYS`, and wait a while."""
        self.last = getattr(self, f"_{self._rng.choice(self.WAYS)}")()
        self.count += 1
        time.sleep(self._rng.uniform(0, _PAUSE_S))

    def _replace(self) -> bytes:
        """As one, as this package does."""
        other = self._path.with_name(f"{self._path.name}.new")
        other.write_bytes(self._good)
        other.replace(self._path)
        return self._good

    def _rewrite(self) -> bytes:
        """In place and slowly, as an editor does."""
        half = len(self._good) // 2
        with self._path.open("wb", buffering=0) as file:
            file.write(self._good[:half])
            time.sleep(self._rng.uniform(0, _PAUSE_S))
            file.write(self._good[half:])
        return self._good

    def _truncate(self) -> bytes:
        return self._write(self._good[: self._rng.randrange(len(self._good))])

    def _empty(self) -> bytes:
        return self._write(b"")

    def _garble(self) -> bytes:
        return self._write(self._rng.randbytes(len(self._good)))

    def _write(self, content: bytes) -> bytes:
        self._path.write_bytes(content)
        return content

    def _remove(self) -> None:
        self._path.unlink(missing_ok=True)


def saves(logs: Sequence[str]) -> tuple[int, int]:
    """Return how often servers' logs say that scales were saved, and were not."""
    text = "\n".join(logs)
    return text.count(SAVED), text.count(NOT_SAVED)


def broken_promises(path: Path, last: bytes | None, logs: Sequence[str]) -> list[str]:
    """Return what servers did that they must not, in words.

    Args:
        path: The scale file, which nobody writes any more.
        last: What the mischief wrote last.
        logs: Of the servers, all of which have had their 16th step with images.
    """
    found = [
        f"server {number}: its log does not say whether scales were saved"
        for number, log in enumerate(logs, 1)
        if not any(saves([log]))
    ]
    try:
        scale_files.read(path)
    except ScaleError as error:
        # What lies there may be damaged, but by nobody else.
        if path.exists() and path.read_bytes() != last:
            found.append(f"after the servers had saved: {error}")
    return found

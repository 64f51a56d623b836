# SPDX-License-Identifier: Apache-2.0
"""How much static FP8 scales cut off, read from the device without waiting for it.

Quantisers count blocks of 128 rows on the device, in replays of graphs and in compiled
code, too; see `DeviceScales.clip_counts`. Block scales and dynamic ones come from the
values that they scale, and cut nothing off.
"""

import time
from collections import Counter
from typing import NamedTuple

import torch

from vllm_flashinfer_vit.engine.metrics import Key
from vllm_flashinfer_vit.fp8.state import ScaleState

# Between two readings: Prometheus mostly asks every 15 s, or less often.
READ_INTERVAL_S = 10.0
# How long the last reading waits for a pass that still runs.
_LAST_WAIT_S = 1.0

_SERIES = ("fp8_blocks", "fp8_clipped_blocks")
_TENSORS = ("q", "k", "v")


class _Reading(NamedTuple):
    """A copy that is under way.

    Attributes:
        counts: `[L, 2, 3]` int64 on the host, of L layers.
        copied: What the device passes when they are there; None on the CPU.
    """

    counts: torch.Tensor
    copied: torch.cuda.Event | None

    def is_done(self, wait_s: float) -> bool:
        """Return whether it is complete; wait for that for so long at most."""
        end_s = time.monotonic() + wait_s
        while self.copied is not None and not self.copied.query():
            if time.monotonic() >= end_s:
                return False
            time.sleep(1e-3)
        return True


class ClipReader:
    """Reads what the layers of one engine count."""

    def __init__(self, *, may_sleep: bool = False) -> None:
        """Begin without layers.

        Args:
            may_sleep: Whether vLLM may take the layers' memory away between steps.
        """
        self._may_sleep = may_sleep
        self._states: list[ScaleState] = []
        self._has_begun = False
        self._reading: _Reading | None = None
        self._next_at_s = 0.0

    def enroll(self, state: ScaleState | None) -> None:
        """Read a layer, too, if it has static scales."""
        if state is not None and state.is_static:
            self._states.append(state)

    def begin(self) -> None:
        """Forget what profiling and warm-up counted; call it when a step begins."""
        if not self._has_begun:
            self._has_begun = True
            self._clear(self._counts())

    def read(self) -> Counter[Key]:
        """Return what a reading brought, and start one, once in `READ_INTERVAL_S`.

        Call it when a step has launched its work; what it counts mostly comes with a
        later step.
        """
        if self._reading is None and time.monotonic() >= self._next_at_s:
            self._start()
        return self._take(wait_s=0.0)

    def read_last(self) -> Counter[Key]:
        """Return all that was not read before; it may wait for the device.

        Of an engine that may sleep, only what a reading under way brings.
        """
        # Without a step there is nothing but what profiling and warm-up counted.
        if not self._has_begun:
            return Counter()
        found = self._take(_LAST_WAIT_S)
        # Asleep, an engine's addresses have no memory: to read there ends all CUDA.
        if self._reading is None and not self._may_sleep:
            self._start()
        return found + self._take(_LAST_WAIT_S)

    def _counts(self) -> list[torch.Tensor]:
        # Of a tower that another pipeline stage runs, vLLM leaves no memory.
        counts = (state.clip_counts for state in self._states)
        return [one for one in counts if not one.is_meta]

    @staticmethod
    def _clear(counts: list[torch.Tensor]) -> None:
        if counts:
            # One launch for all layers.
            torch._foreach_zero_(counts)

    def _start(self) -> None:
        counts = self._counts()
        if not counts:
            return
        self._next_at_s = time.monotonic() + READ_INTERVAL_S
        # PyTorch takes pinned memory for it, which a copy needs to wait for nothing.
        read = torch.stack(counts).to("cpu", non_blocking=True)
        # After the copy, in the order of the stream: later passes count anew.
        self._clear(counts)
        self._reading = _Reading(read, _mark(counts[0].device))

    def _take(self, wait_s: float) -> Counter[Key]:
        reading = self._reading
        if reading is None or not reading.is_done(wait_s):
            return Counter()
        self._reading = None
        rows = reading.counts.sum(dim=0).tolist()
        return Counter(
            {
                (name, tensor): count
                for name, row in zip(_SERIES, rows, strict=True)
                for tensor, count in zip(_TENSORS, row, strict=True)
                if count
            }
        )


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """Return what the device passes when it has done all so far; None for the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event

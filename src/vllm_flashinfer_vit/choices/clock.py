# SPDX-License-Identifier: Apache-2.0
"""A clock for GPU calls: replays of CUDA graphs on a cold L2 cache, taking turns."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import torch

# Above twice the L2 cache of any GPU.
_FLUSH_BYTES = 256 * 2**20
_BUDGET_MS = 20.0
_LEAST_ROUNDS = 4
_MOST_ROUNDS = 24

Run = Callable[[], torch.Tensor]
_T = TypeVar("_T")


class Clock(Protocol):
    """Prepares calls and times them; a test has its own."""

    def prepare(self, run: Run) -> Run:
        """Make a call ready for being timed; it then returns its output as before."""

    def median_us(self, runs: Mapping[str, Run]) -> dict[str, float]:
        """Return each prepared call's median time in microseconds."""


def capture(run: Run) -> Run:
    """Run a call once, so that it compiles and plans, and record it into a CUDA graph.

    Returns:
        A call that replays the graph and returns its output buffer.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # torch.cuda.graph() would also empty the allocator's cache, at every capture.
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            output = run()
        except BaseException:
            # Ending a broken capture fails too, and would hide why.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)

    # The graph reads tensors that the call closes over, so the call must live on.
    def replay(_captured: Run = run) -> torch.Tensor:
        graph.replay()
        return output

    return replay


class GraphClock:
    """Times replays of CUDA graphs on a cold L2 cache, the calls taking turns."""

    prepare = staticmethod(capture)

    def __init__(self, device: torch.device) -> None:
        """Make the buffer that is overwritten to empty the L2 cache."""
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def median_us(self, runs: Mapping[str, Run]) -> dict[str, float]:
        """Return each call's median time; more rounds the shorter the calls are."""
        begin = time.perf_counter()
        self._rounds(runs, 1)
        one_round_ms = (time.perf_counter() - begin) * 1e3
        wanted = int(_BUDGET_MS / one_round_ms)
        rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, wanted))
        # An even number, so that half of them run backwards.
        samples = self._rounds(runs, rounds + rounds % 2)
        return {kernel: statistics.median(us) for kernel, us in samples.items()}

    def _rounds(self, runs: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
        kernels = list(runs)
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]
        events = {kernel: [] for kernel in kernels}
        for turn in range(rounds):
            for kernel in order_of_turn(kernels, turn):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # The replay is launched while the flush still runs.
                self._flush.zero_()
                start.record()
                runs[kernel]()
                end.record()
                events[kernel].append((start, end))
        torch.cuda.synchronize()
        return {
            kernel: [start.elapsed_time(end) * 1e3 for start, end in pairs]
            for kernel, pairs in events.items()
        }


def order_of_turn(contenders: Sequence[_T], turn: int) -> list[_T]:
    """Return the order in which contenders run in a turn, the first of which is turn 0.

    A contender inherits power draw and clocks from the one before it. So every second
    turn is the one before it backwards, and every two turns begin with another one:
    within `2 * len(contenders)` turns each runs as often after either neighbour.
    """
    first = turn // 2 % len(contenders)
    order = [*contenders[first:], *contenders[:first]]
    return order[::-1] if turn % 2 else order

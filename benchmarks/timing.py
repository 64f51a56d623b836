# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks take times.

A time is taken on an idle device with a cold L2 cache, by CUDA events around one call:
in the modes `eager`, `fused` and `compiled` from the moment when the host begins to
launch, in `graph`, `fused_graph` and `compiled_graph` around the replay of a CUDA
graph. `new`, `fused_new` and `compiled_new` are the first three with an image size that
is new in each call, the same sizes for all, after a second or two of others; in all
other modes each call is the same. Providers take turns, so that clocks and heat hit all
alike.
"""

import time
from collections.abc import Callable, Mapping

import torch

from chosen_rows import what_is_timed
from vllm_flashinfer_vit.choices.clock import order_of_turn

# Five times the L2 cache of an H200.
FLUSH_BYTES = 256 * 2**20
Run = Callable[[], torch.Tensor]


class Clock:
    """Times single calls on one device."""

    def __init__(self, on: torch.device) -> None:
        """Make the buffer that is overwritten to empty the L2 cache."""
        self._flush = None
        if on.type == "cuda":
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=on)

    def sample_ms(self, run: Run, mode: str) -> float:
        """Return the time of one call in milliseconds."""
        if self._flush is None:
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        # A replay is launched while the flush still runs; an eager call starts on an
        # idle device, so that the host's time to launch it counts in full.
        if what_is_timed(mode) != "graph":
            torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def host_ms(run: Callable[[], object], calls: int = 1) -> float:
    """Return the host's time for a call, the mean over a batch of them.

    It begins on an idle device, and nothing waits for the device within the batch.
    """
    _wait_for_device()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    taken_s = time.perf_counter() - begin
    # Otherwise what comes next on this device would run beside it.
    _wait_for_device()
    return taken_s * 1e3 / calls


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rounds_within(
    one_round_ms: float, budget_s: float, least: int = 7, most: int = 100
) -> int:
    """Return how many rounds fit a time budget, within bounds."""
    return max(least, min(most, int(budget_s * 1e3 / max(one_round_ms, 1e-3))))


def take_turns(
    clock: Clock,
    runs: Mapping[str, Run],
    mode: str,
    budget_s: float,
    least: int = 7,
) -> dict[str, list[float]]:
    """Time every provider once a round, in the order of `order_of_turn`.

    The number of rounds is even, so that half of them run backwards.

    Args:
        clock: The clock.
        runs: Calls by provider; each has run before.
        mode: As in the rows; see this module's docstring.
        budget_s: Time for all providers together, in seconds.
        least: Rounds to run even over the budget.

    Returns:
        Samples in milliseconds by provider.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    begin = time.perf_counter()
    # Another warm-up, and what a round costs with its flushes.
    for name in names:
        clock.sample_ms(runs[name], mode)
    one_round_ms = (time.perf_counter() - begin) * 1e3
    rounds = rounds_within(one_round_ms, budget_s, least)
    for turn in range(rounds + rounds % 2):
        for name in order_of_turn(names, turn):
            samples[name].append(clock.sample_ms(runs[name], mode))
    return samples

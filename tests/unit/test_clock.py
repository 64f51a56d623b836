# SPDX-License-Identifier: Apache-2.0
"""In which order kernels are timed."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

pytest.importorskip("vllm")

import torch

from vllm_flashinfer_vit.choices import clock as clocks
from vllm_flashinfer_vit.choices.clock import GraphClock, order_of_turn


@pytest.mark.parametrize("count", range(3, 8))
def test_nobody_runs_after_the_same_one_only(count: int) -> None:
    contenders = range(count)
    turns = [order_of_turn(contenders, turn) for turn in range(2 * count)]
    assert all(sorted(turn) == list(contenders) for turn in turns)
    for end in (0, -1):
        assert Counter(turn[end] for turn in turns) == dict.fromkeys(contenders, 2)
    pairs = Counter(pair for turn in turns for pair in pairwise(turn))
    for contender in contenders:
        before, after = (contender - 1) % count, (contender + 1) % count
        assert pairs[before, contender] == pairs[after, contender] > 0


@pytest.mark.parametrize("budget_ms", [0.0, 1e6])
def test_kernels_take_turns_both_ways(
    budget_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def elapsed_time(self, end: "Event") -> float:
            return 0.001

    ran: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clocks, "_BUDGET_MS", budget_ms)
    clock = GraphClock(torch.device("cpu"))

    def run(name: str) -> Callable[[], torch.Tensor]:
        return lambda: ran.append(name) or torch.empty(0)

    kernels = ("cudnn", "triton", "flash_attn")
    found = clock.median_us({name: run(name) for name in kernels})
    assert found == dict.fromkeys(kernels, 1.0)
    turns = [tuple(ran[i : i + 3]) for i in range(3, len(ran), 3)]
    assert len(turns) == (24 if budget_ms else 4)
    assert turns[1::2] == [turn[::-1] for turn in turns[::2]]

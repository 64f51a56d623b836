# SPDX-License-Identifier: Apache-2.0
"""What becomes of a comparison in which a candidate or a case fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _tuning import CLOCK, ToldClock

from vllm_flashinfer_vit.choices.compare import GpuLostError, compare
from vllm_flashinfer_vit.choices.measure import Cell


def test_a_kernel_after_which_nothing_runs_ends_the_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Inputs:
        def call(self, candidate: str) -> Callable[[], torch.Tensor]:
            return fails if candidate == "cudnn" else lambda: torch.ones(1)

        def check(self, candidate: str, out: torch.Tensor) -> None:
            pass

    gpu = torch.device("cuda")
    clock = ToldClock(CLOCK)
    cases = {"1 x 8 tokens": Cell(8, 1)}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    times, left_out = compare(list(CLOCK), cases, lambda _: Inputs(), clock, gpu)
    assert list(times[Cell(8, 1)]) == ["flash_attn"] and "cudnn" in left_out[0]
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(GpuLostError, match="^1 x 8 tokens: cudnn: RuntimeError: CUDA"):
        compare(list(CLOCK), cases, lambda _: Inputs(), clock, gpu)
    # Or where they are timed, and the last one to fail is not known.
    monkeypatch.setattr(clock, "median_us", fails)
    rest = ["flash_attn", "triton"]
    with pytest.raises(GpuLostError, match="tokens: flash_attn or triton: RuntimeErr"):
        compare(rest, cases, lambda _: Inputs(), clock, gpu)


def test_what_memory_does_not_hold_or_nobody_runs_leaves_the_rest_as_it_is() -> None:
    class Inputs:
        def __init__(self, case: str) -> None:
            if "large" in case:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self._case = case

        def call(self, candidate: str) -> Callable[[], torch.Tensor] | None:
            if candidate == "cudnn":
                raise RuntimeError("it fails")
            return None if self._case == "nobody's" else lambda: torch.ones(1)

        def check(self, candidate: str, out: torch.Tensor) -> None:
            pass

    names = ("too large", "first", "larger", "nobody's", "last")
    cases = {name: name for name in names}
    clock = ToldClock(CLOCK)
    cpu = torch.device("cpu")
    times, left_out = compare(list(CLOCK), cases, Inputs, clock, cpu)
    assert times == dict.fromkeys(("first", "last"), {"flash_attn": 10.0})
    assert left_out == [
        "too large: out of memory",
        "cudnn from first on: RuntimeError: it fails",
        "larger: out of memory",
    ]

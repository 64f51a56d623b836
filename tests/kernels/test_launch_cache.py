# SPDX-License-Identifier: Apache-2.0
"""The cache of what was made for tensors of one layout."""

import pytest
import torch

from vllm_flashinfer_vit.kernels import _launch
from vllm_flashinfer_vit.kernels._launch import cached_by_layout


def test_the_cache_sees_layouts_and_no_addresses() -> None:
    seen = []

    @cached_by_layout
    def function(x: torch.Tensor, y: torch.Tensor | None, size: int) -> int:
        seen.append((x, y, size))
        return len(seen)

    x = torch.zeros(4, 6)
    assert function(x, None, 1) == 1
    assert function(torch.ones(4, 6), None, 1) == 1
    assert function(x, None, 2) == 2
    assert function(x, x, 1) == 3
    assert function(x.half(), None, 1) == 4
    assert function(torch.zeros(4, 7)[:, :6], None, 1) == 5
    assert function(x[:3], None, 1) == 6
    assert function(x, None, 1) == 1


def test_the_cache_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "_MAX_LAYOUTS", 2)
    seen = []
    function = cached_by_layout(lambda size: seen.append(size) or len(seen))
    for size in (1, 2, 3, 3, 2, 1):
        function(size)
    assert seen == [1, 2, 3, 1]


def test_the_cache_stays_small_though_calls_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of two threads: each adds its own while the other is at work."""
    monkeypatch.setattr(_launch, "_MAX_LAYOUTS", 2)
    seen: list[int] = []

    @cached_by_layout
    def function(size: int) -> int:
        seen.append(size)
        return function(size - 100) if size > 100 else size

    for size in (1, 2, 103, 104, 105):
        function(size)
    seen.clear()
    for size in (3, 4, 103, 104):
        function(size)
    assert seen == [3, 4, 103, 104]


def test_the_cache_keeps_no_error() -> None:
    @cached_by_layout
    def function(x: torch.Tensor) -> None:
        raise ValueError(f"got {tuple(x.shape)}")

    for _ in range(2):
        with pytest.raises(ValueError, match=r"got \(3,\)"):
            function(torch.zeros(3))

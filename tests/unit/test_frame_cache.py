# SPDX-License-Identifier: Apache-2.0
"""Tables are made once, and the oldest go when there are too many bytes."""

import torch

from vllm_flashinfer_vit.models.frame_cache import FrameCache


def table(rows: int) -> tuple[torch.Tensor, ...]:
    return torch.zeros(rows, dtype=torch.uint8), torch.ones(rows, dtype=torch.uint8)


def test_tables_are_made_once() -> None:
    cache = FrameCache(100)
    first = cache.get(2, 5, lambda: table(10))
    assert cache.get(2, 5, lambda: table(99)) is first
    assert cache.get(5, 2, lambda: table(10)) is not first
    assert cache.held_bytes == 40


def test_the_least_recently_used_go_first() -> None:
    cache = FrameCache(100)
    kept = cache.get(1, 1, lambda: table(20))
    gone = cache.get(2, 2, lambda: table(20))
    cache.get(1, 1, lambda: table(99))
    cache.get(3, 3, lambda: table(20))
    assert cache.held_bytes == 80
    assert cache.get(1, 1, lambda: table(99)) is kept
    assert cache.get(2, 2, lambda: table(20)) is not gone


def test_more_than_all_is_not_kept() -> None:
    cache = FrameCache(100)
    kept = cache.get(1, 1, lambda: table(20))
    large = cache.get(9, 9, lambda: table(60))
    assert large[0].numel() == 60
    assert cache.held_bytes == 40
    assert cache.get(1, 1, lambda: table(20)) is kept
    assert cache.get(9, 9, lambda: table(60)) is not large

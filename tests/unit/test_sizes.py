# SPDX-License-Identifier: Apache-2.0
"""Sizes of encoder CUDA graphs against brute force, and how buffers are padded."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_flashinfer_vit.graphs.sizes import (
    ReplaySizeError,
    even_split,
    fill,
    fill_by,
    fine_budgets,
    is_cu_seqlens,
    largest_budget,
    max_sequences,
    max_windows,
    usual_frames,
)


@functools.cache
def most_windows(budget: int, num_frames: int, side: int) -> int:
    """Return the most windows of any batch, by trying every size of every frame."""
    if num_frames == 0 or budget == 0:
        return 0
    return max(
        -(-h // side) * -(-w // side)
        + most_windows(budget - h * w, num_frames - 1, side)
        for h in range(1, budget + 1)
        for w in range(1, budget // h + 1)
    )


@pytest.mark.parametrize("side", [1, 2, 3, 4])
def test_max_windows_is_attained_and_never_passed(side: int) -> None:
    for budget in range(1, 19):
        for num_frames in range(1, 8):
            assert max_windows(budget, num_frames, side) == most_windows(
                budget, num_frames, side
            )


GRID = st.tuples(*[st.integers(1, n) for n in (8, 60, 60)])


@given(st.lists(GRID, min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 99))
def test_max_windows_bounds_any_batch(
    grids: list[tuple[int, int, int]], side: int, spare: int
) -> None:
    windows = sum(t * -(-h // side) * -(-w // side) for t, h, w in grids)
    tokens = sum(t * h * w for t, h, w in grids)
    frames = sum(t for t, _, _ in grids)
    assert windows <= max_windows(tokens + spare, frames + spare, side)


@pytest.mark.parametrize(
    ("budget", "items", "frames", "expected"),
    [(64, 64, 128, 64), (1024, 64, 128, 128), (1024, 8, 0, 8), (4, 8, 0, 4)],
)
def test_max_sequences(budget: int, items: int, frames: int, expected: int) -> None:
    assert max_sequences(budget, items, frames) == expected


def test_automatic_graphs_have_room_for_usual_frames() -> None:
    # Frames of one token fit into small budgets, those of 16 tokens into any.
    assert usual_frames(128) >= 128
    assert all(usual_frames(budget) >= budget // 16 for budget in (640, 16384))
    assert usual_frames(16384) < 16384 // 14


def test_fine_budgets() -> None:
    assert fine_budgets(64, 256) == [64, 80, 96, 112, 128, 160, 192, 224, 256]
    assert fine_budgets(64, 300)[-2:] == [256, 300]
    assert fine_budgets(3, 7) == [3, 4, 5, 6, 7]
    assert len(fine_budgets(64, 16384)) == 33


@given(st.integers(1, 5000), st.integers(0, 20000))
def test_fine_budgets_waste_a_quarter_at_most(smallest: int, more: int) -> None:
    budgets = fine_budgets(smallest, smallest + more)
    assert budgets[0] == smallest
    assert budgets[-1] == smallest + more
    assert budgets == sorted(set(budgets))
    for small, large in zip(budgets, budgets[1:], strict=False):
        assert large <= small + math.ceil(small / 4)


@given(st.integers(1, 300), st.integers(0, 40), st.integers(0, 299))
def test_fine_budgets_of_rows_hold_whole_ones(row: int, rows: int, more: int) -> None:
    last = row * (1 + rows) + more % row
    first, *between = fine_budgets(row, last, row)
    assert first == row and [row, *between][-1] == last
    assert all(budget % row == 0 for budget in between[:-1])


@pytest.mark.parametrize(
    ("smallest", "largest", "ranks", "is_quick", "expected"),
    [
        (64, 16384, 1, True, 3072),
        (64, 16384, 1, False, 6144),
        (64, 16384, 2, True, 6144),
        (64, 256, 1, True, 256),
        # One item is more than a GPU needs to be busy.
        (4096, 16384, 1, True, 4096),
    ],
)
def test_the_largest_automatic_graph(
    smallest: int, largest: int, ranks: int, is_quick: bool, expected: int
) -> None:
    assert largest_budget(smallest, largest, 4, ranks, is_quick) == expected


def test_fine_budgets_waste_on_average() -> None:
    budgets = fine_budgets(64, 16384)
    sizes = [round(64 * 2 ** (i / 1000)) for i in range(8000)]
    waste = [next(b for b in budgets if b >= size) / size for size in sizes]
    assert sum(waste) / len(waste) < 1.1


@pytest.mark.parametrize(("first", "last"), [(0, 4), (8, 4), (-1, -1)])
def test_fine_budgets_refuse(first: int, last: int) -> None:
    with pytest.raises(ValueError, match=f"from {first} to {last}"):
        fine_budgets(first, last)


@given(st.integers(1, 400), st.integers(1, 400))
def test_even_split(num_tokens: int, num_seqs: int) -> None:
    offsets = even_split(num_tokens, num_seqs)
    lengths = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
    assert (offsets[0], offsets[-1], len(lengths)) == (0, num_tokens, num_seqs)
    assert max(lengths) - min(lengths) <= 1


@given(
    st.lists(st.integers(0, 50), max_size=20),
    st.integers(0, 20),
    st.sampled_from(["cu_seqlens", "cu_window_seqlens"]),
)
def test_padded_lengths_are_never_negative(
    lengths: list[int], spare: int, key: str
) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    buffer = torch.full((len(offsets) + spare,), -7, dtype=torch.int32)
    fill(key, buffer, offsets)
    assert buffer.diff().tolist() == lengths + [0] * spare


def test_other_buffers_are_padded_with_zeros() -> None:
    buffer = torch.full((4, 2), math.nan)
    fill("pixel_values", buffer, torch.ones(3, 2))
    assert buffer.tolist() == [[1, 1]] * 3 + [[0, 0]]


def test_empty_values() -> None:
    buffer = torch.ones(3, dtype=torch.int32)
    fill("cu_seqlens", buffer, buffer.new_empty(0))
    assert buffer.tolist() == [0, 0, 0]


def test_too_many_values_name_the_sizes() -> None:
    buffer = torch.zeros(3)
    with pytest.raises(ReplaySizeError, match=r"cu_seqlens .* has 5 .* with 3"):
        fill("cu_seqlens", buffer, torch.ones(5))
    assert buffer.tolist() == [0, 0, 0]


def test_a_models_own_padding_is_kept_where_the_buffer_holds_all() -> None:
    def cut_off(buffer: torch.Tensor, values: torch.Tensor) -> None:
        count = min(len(buffer), len(values))
        buffer[:count].copy_(values[:count])
        buffer[count:] = values[-1]

    buffer = torch.zeros(4)
    fill_by(cut_off, "cu_seqlens", buffer, torch.tensor([0.0, 7.0]))
    assert buffer.tolist() == [0, 7, 7, 7]
    with pytest.raises(ReplaySizeError, match=r"cu_seqlens .* \(5,\).* \(4,\)"):
        fill_by(cut_off, "cu_seqlens", buffer, torch.ones(5))
    # Of fewer rows, which are too long.
    with pytest.raises(ReplaySizeError, match=r"pos_embeds .* \(2, 5\).* \(4, 3\)"):
        fill_by(cut_off, "pos_embeds", torch.zeros(4, 3), torch.ones(2, 5))


def test_is_cu_seqlens() -> None:
    assert is_cu_seqlens("cu_seqlens")
    assert is_cu_seqlens("cu_window_seqlens")
    assert not is_cu_seqlens("max_seqlen")
    assert not is_cu_seqlens("max_seqlens")
    assert not is_cu_seqlens("sequence_lengths")

# SPDX-License-Identifier: Apache-2.0
"""What Triton kernels share on the device: the search for a block's sequence."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels import flash
from vllm_flashinfer_vit.kernels._launch import Launch
from vllm_flashinfer_vit.kernels._triton import (
    find_sequence,
    last_row,
    split_width,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit(do_not_specialize=["num_seqs"])
def _find_kernel(cu_seqlens_ptr, blocks_ptr, found_ptr, num_seqs, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    block = tl.load(blocks_ptr + pid)
    found = find_sequence(cu_seqlens_ptr, num_seqs, block, BLOCK)
    tl.store(found_ptr + pid, found)


def _blocks_ref(cu_seqlens: list[int], block: int, num_blocks: int) -> list[int]:
    """The sequence of each block, by counting."""
    found = [-1] * num_blocks
    for n, (start, end) in enumerate(zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        if start < end:
            found[start // block + n :] = [n] * (num_blocks - start // block - n)
    return found


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(
    "cu_seqlens",
    [
        pytest.param([0], id="no-sequence"),
        pytest.param([0, 0, 0], id="nothing"),
        pytest.param([0, 1], id="one-token"),
        pytest.param([0, 128, 256, 384], id="whole-blocks"),
        pytest.param([0, 129, 200, 457, 458], id="ragged"),
        pytest.param([0, 0, 0, 70, 70, 300], id="empty-first-and-inside"),
        pytest.param([0, 64, 300, 300, 300, 300], id="repeated-tail"),
        pytest.param([0, 64, 300, 0, 0, 0], id="zero-tail"),
        pytest.param([*range(0, 4400, 4), 0, 0], id="more-than-a-tile"),
        pytest.param([0] * 1100 + [5, 400] + [0] * 1000, id="far-from-the-front"),
    ],
)
def test_blocks_find_their_sequence(cu_seqlens: list[int], block: int) -> None:
    num_seqs = len(cu_seqlens) - 1
    num_blocks = max(cu_seqlens) // block + num_seqs + 1
    expected = _blocks_ref(cu_seqlens, block, num_blocks)
    # Of many blocks some are enough: a program takes the interpreter milliseconds.
    asked = torch.arange(0, num_blocks, 1 + num_blocks // 60, dtype=torch.int32)
    found = torch.empty_like(asked, device=DEVICE)
    _find_kernel[(len(asked),)](
        torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE),
        asked.to(DEVICE),
        found,
        num_seqs,
        BLOCK=block,
    )
    assert found.tolist() == [expected[i] for i in asked]
    # Each sequence has the blocks that its rows fill.
    for n, (start, end) in enumerate(zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        assert expected.count(n) >= -((start - end) // block) or end <= start


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _last_kernel(cu_seqlens_ptr, found_ptr, num_seqs, num_tokens):
    tl.store(found_ptr, last_row(cu_seqlens_ptr, num_seqs, num_tokens))


@pytest.mark.parametrize(
    "cu_seqlens",
    [
        pytest.param([0], id="no-sequence"),
        pytest.param([0, 7, 9], id="two"),
        pytest.param([0, 7, 9, 0, 0], id="zero-tail"),
        pytest.param([0, 7, 9, 9, 9], id="repeated-tail"),
        pytest.param([*range(1024), 0], id="the-last-of-a-tile"),
        pytest.param([*range(1025)], id="the-first-of-the-next-tile"),
        pytest.param([*range(0, 4400, 4), 0, 0], id="more-than-a-tile"),
        pytest.param([0] * 2100 + [5, 400] + [0] * 1000, id="far-from-the-front"),
    ],
)
def test_the_last_row_is_found_in_any_tile(cu_seqlens: list[int]) -> None:
    found = torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE)
    _last_kernel[(1,)](offsets, found, len(cu_seqlens) - 1, 5000)
    assert found.item() == max(cu_seqlens)


def test_the_last_row_is_one_of_the_rows() -> None:
    found = torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 5, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    _last_kernel[(1,)](offsets, found, 2, 9)
    assert found.item() == 9


@pytest.mark.parametrize(
    ("width", "least", "parts"),
    [
        (64, 16, (64, 0)),
        (80, 16, (64, 16)),
        (72, 16, (64, 16)),
        (96, 16, (64, 32)),
        (72, 32, (64, 32)),
        (120, 16, (64, 64)),
    ],
)
def test_a_width_is_cut_into_powers_of_two(
    width: int, least: int, parts: tuple[int, int]
) -> None:
    assert split_width(width, least) == parts


def test_a_padded_graph_launches_no_block_per_slot_and_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grids = []

    def noted(kernel: Any, grid: int, *args: Any, **constants: Any) -> Launch:
        grids.append(grid)
        return Launch(kernel, grid, *args, **constants)

    monkeypatch.setattr(flash, "Launch", noted)
    qkv = torch.randn(1000, 3, 1, 64, dtype=torch.float16, device=DEVICE)
    cu_seqlens = torch.tensor([0, 300] + [0] * 62, dtype=torch.int32, device=DEVICE)
    flash.prepare(*qkv.unbind(1), cu_seqlens, 1000, 0.125)()
    # 15 and one for each slot, and 32 that clear rows; 63 * 16 before.
    assert grids == [1000 // 64 + 63 + 32]

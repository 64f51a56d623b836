# SPDX-License-Identifier: Apache-2.0
"""The derived lengths and offsets, exactly, against plain Python."""

import pytest
import torch

from cases import CASES, Case, params
from vllm_flashinfer_vit.kernels.seqlens import SeqLens, derive_seqlens

pytestmark = pytest.mark.usefixtures("nan_empty")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STRIDES = (1280, 1280, 3840, 1280)
MANY = 65536


def seqlens_ref(cu_seqlens: list[int], num_tokens: int, num_slots: int) -> list[int]:
    """The `num_slots + 1` offsets, one at a time."""
    offsets: list[int] = []
    for i in range(num_slots + 1):
        offset = cu_seqlens[i] if i < len(cu_seqlens) else 0
        offset = min(max(offset, 0), num_tokens)
        offsets.append(max(offset, offsets[-1] if offsets else 0))
    return offsets


def _check(derived: SeqLens, expected: list[int], strides: tuple[int, ...]) -> None:
    lengths = [b - a for a, b in zip(expected, expected[1:], strict=False)]
    assert derived.lengths.dtype == torch.int32
    assert derived.lengths.shape == (len(lengths), 1, 1, 1)
    assert derived.lengths.flatten().tolist() == lengths
    assert len(derived.offsets) == len(strides)
    for offsets, stride in zip(derived.offsets, strides, strict=True):
        assert offsets.dtype == torch.int64
        assert offsets.shape == (len(expected), 1, 1, 1)
        assert offsets.flatten().tolist() == [offset * stride for offset in expected]


@pytest.mark.parametrize("extra_slots", [0, 5])
@pytest.mark.parametrize("case", params(CASES))
def test_lengths_and_offsets_are_the_references(case: Case, extra_slots):
    cu_seqlens = case.cu_seqlens(DEVICE)
    slots = cu_seqlens.shape[0] - 1 + extra_slots
    derived = derive_seqlens(cu_seqlens, case.rows, slots, STRIDES)
    expected = seqlens_ref(cu_seqlens.tolist(), case.rows, slots)
    assert expected[-1] == case.tokens
    _check(derived, expected, STRIDES)


@pytest.mark.parametrize(
    "offsets",
    [
        pytest.param([0, 10, 7, 20], id="falls-in-the-middle"),
        pytest.param([0, -5, 8, 8], id="negative"),
        pytest.param([0, 10, 90, 20], id="beyond-the-last-row"),
        pytest.param([3, 10, 20, 0], id="does-not-start-at-0"),
    ],
)
def test_bad_offsets_stay_inside_and_never_fall(offsets):
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    derived = derive_seqlens(cu_seqlens, 32, 8, STRIDES)
    _check(derived, seqlens_ref(offsets, 32, 8), STRIDES)


@pytest.mark.parametrize("num_seqs", [254, 255, 256, 257, 700, 4700])
def test_batches_of_several_blocks(num_seqs):
    lengths = torch.arange(num_seqs) % 7
    offsets = [0, *lengths.cumsum(0).tolist()]
    rows = offsets[-1]
    offsets[-3:] = [0, 0, 0]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    slots = num_seqs + 70
    derived = derive_seqlens(cu_seqlens, rows, slots, STRIDES)
    _check(derived, seqlens_ref(offsets, rows, slots), STRIDES)


def test_offsets_beyond_int32():
    # 4 million rows of 3 * 16 * 80: 1.5e10 elements.
    cu_seqlens = torch.tensor([0, 3_999_999, 4_000_000], dtype=torch.int32).to(DEVICE)
    derived = derive_seqlens(cu_seqlens, 4_000_000, 8, STRIDES)
    assert derived.offsets[2][2].item() == 4_000_000 * 3840
    assert derived.offsets[2][1].item() == 3_999_999 * 3840


def test_equal_strides_share_one_tensor():
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    q, k, v, o = derive_seqlens(cu_seqlens, 4, 8, STRIDES).offsets
    assert q is k is o
    assert v is not q


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(torch.tensor([0, 4]), id="int64"),
        pytest.param(torch.zeros((2, 2), dtype=torch.int32), id="2-d"),
        pytest.param(torch.zeros(8, dtype=torch.int32)[::2], id="strided"),
        pytest.param(torch.zeros(0, dtype=torch.int32), id="no-entry"),
    ],
)
def test_malformed_cu_seqlens_are_refused(bad):
    with pytest.raises(ValueError, match=r"contiguous int32 of shape \[N \+ 1\], got"):
        derive_seqlens(bad, 4, 8, STRIDES)


def test_impossible_sizes_are_refused():
    cu_seqlens = torch.zeros(9, dtype=torch.int32)
    with pytest.raises(ValueError, match="7 slots cannot hold 8 sequences"):
        derive_seqlens(cu_seqlens, 4, 7, STRIDES)
    with pytest.raises(ValueError, match=f"{2**31} tokens"):
        derive_seqlens(cu_seqlens, 2**31, 8, STRIDES)


@pytest.mark.gpu
def test_65536_sequences():
    lengths = torch.arange(MANY) % 5
    offsets = [0, *lengths.cumsum(0).tolist()]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    derived = derive_seqlens(cu_seqlens, offsets[-1], MANY + 64, STRIDES)
    _check(derived, seqlens_ref(offsets, offsets[-1], MANY + 64), STRIDES)


@pytest.mark.gpu
def test_replay_reads_the_new_cu_seqlens():
    cu_seqlens = torch.tensor([0, 10, 20, 30], dtype=torch.int32, device="cuda")
    derive_seqlens(cu_seqlens, 64, 8, STRIDES)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        derived = derive_seqlens(cu_seqlens, 64, 8, STRIDES)
    for offsets in ([0, 1, 40, 0], [0, 64, 64, 64], [0, 0, 0, 0]):
        cu_seqlens.copy_(torch.tensor(offsets, dtype=torch.int32))
        graph.replay()
        _check(derived, seqlens_ref(offsets, 64, 8), STRIDES)

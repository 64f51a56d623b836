# SPDX-License-Identifier: Apache-2.0
"""What an op derives from a batch before it picks a kernel."""

import pytest
import torch

from vllm_flashinfer_vit.ops.batch import Batch, ready, row_offsets

_TOKENS = 12


def _batch(**rest: object) -> Batch:
    q, k, v = torch.randn(_TOKENS, 3, 2, 8).unbind(1)
    return Batch(q, k, v, **rest)  # type: ignore[arg-type]


def _offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_equal_sequences_get_prefix_sums() -> None:
    inputs = ready(_batch(seq_len=4))
    assert inputs.cu_seqlens.tolist() == [0, 4, 8, 12]
    assert inputs.cu_seqlens.dtype == torch.int32
    assert (inputs.longest, _batch(seq_len=4).mean_len) == (4, 4.0)
    # No row is left out.
    assert inputs.is_clean


@pytest.mark.parametrize(
    ("max_seqlen", "longest"),
    [
        (None, _TOKENS),
        (torch.tensor(7), 7),
        (torch.tensor(100), _TOKENS),
        (torch.tensor(0), _TOKENS),
    ],
)
def test_the_longest_sequence_is_bounded_on_the_host(
    max_seqlen: torch.Tensor | None, longest: int
) -> None:
    batch = _batch(cu_seqlens=_offsets(0, 7, 12), max_seqlen=max_seqlen)
    assert ready(batch).longest == longest


def test_a_length_on_the_device_is_not_read() -> None:
    max_seqlen = torch.tensor(7, device="meta")
    batch = _batch(cu_seqlens=_offsets(0, 7, 12), max_seqlen=max_seqlen)
    assert ready(batch).longest == _TOKENS


def test_rows_of_a_padded_batch_are_two_sequences() -> None:
    tokens = torch.tensor([3, 0, 4], dtype=torch.int32)
    found = row_offsets(tokens, 4)
    assert found.tolist() == [0, 3, 4, 4, 8, 12, 12]
    assert found.dtype == torch.int32


def test_empty_sequences_count_for_the_mean() -> None:
    batch = _batch(cu_seqlens=_offsets(0, 12, 12, 12))
    assert batch.mean_len == 4.0
    assert not ready(batch).is_clean and ready(batch, is_clean=True).is_clean

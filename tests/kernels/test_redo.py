# SPDX-License-Identifier: Apache-2.0
"""What a kernel marks as wrong is computed again, and nothing else."""

import pytest
import torch

from cases import CASES, LARGE, TOLERANCES, Case, make_qkv, params, values
from vllm_flashinfer_vit.kernels import redo
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, HEAD_DIM, SCALE = 4, 72, 0.1


def parts_of(case: Case, parts: int) -> list[tuple[int, int, int]]:
    """The head, the first row and the end of each part, in the order of the marks."""
    found, start = [], 0
    for length in case.lengths:
        tiles = -(-length // (parts * redo.MARKED_ROWS))
        found += [
            (head, start + min(first, length), start + min(first + 64, length))
            for head in range(HEADS)
            for first in range(0, tiles * parts * redo.MARKED_ROWS, 64)
        ]
        start += length
    return found


@pytest.mark.parametrize("case", params(CASES, extended=LARGE))
@pytest.mark.parametrize(("parts", "every"), values([(4, 3)], extended=[(3, 1)]))
def test_marked_parts_are_computed_again(case, parts, every):
    q, k, v = make_qkv(case, HEADS, HEAD_DIM, torch.float16, kv_heads=2, device=DEVICE)
    found = parts_of(case, parts)
    num_marks = (len(found) // redo.MARKS + 1) * redo.MARKS
    marks = torch.zeros(num_marks, dtype=torch.int32)
    marks[: len(found)][::every] = 7
    out = torch.full_like(q, 5.0, memory_format=torch.contiguous_format)
    expected = out.float()
    cu_seqlens = case.cu_seqlens(DEVICE)
    args = cu_seqlens, case.max_seqlen, SCALE
    right = attention_ref(q.float(), k.float(), v.float(), *args)
    for head, first, end in found[::every]:
        expected[first:end, head] = right[first:end, head]
    redo.prepare(q, k, v, cu_seqlens, marks.to(DEVICE), out, parts, SCALE)()
    atol = TOLERANCES[torch.float16] * 5
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=atol)


def test_marks_of_sequences_behind_many_empty_ones():
    """More than one look at the offsets."""
    case = Case("many", (*[0] * 130, 5, *[0] * 130, 70), repeats=3)
    q, k, v = make_qkv(case, HEADS, HEAD_DIM, torch.float16, device=DEVICE)
    marks = torch.ones(redo.MARKS, dtype=torch.int32, device=DEVICE)
    marks[8 * 4 :] = 0
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    cu_seqlens = case.cu_seqlens(DEVICE)
    redo.prepare(q, k, v, cu_seqlens, marks, out, 4, SCALE)()
    args = cu_seqlens, case.max_seqlen, SCALE
    expected = attention_ref(q.float(), k.float(), v.float(), *args)
    atol = TOLERANCES[torch.float16] * 5
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=atol)

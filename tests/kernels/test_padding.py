# SPDX-License-Identifier: Apache-2.0
"""Padding rows become zeros, nothing else changes, and offsets never fall."""

import pytest
import torch

from cases import CASES, Case, make_qkv, params
from vllm_flashinfer_vit.kernels.padding import clear_padding, mask_padding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("case", params([case for case in CASES if case.rows]))
def test_padding_alone_is_cleared(case):
    qkv = make_qkv(case, 3, 72, torch.float16, kv_heads=1, device=DEVICE)
    before = [x.clone() for x in qkv]
    out = torch.full((case.rows, 3, 72), float("nan"), device=DEVICE)
    cu_seqlens = case.cu_seqlens(DEVICE)
    mended = mask_padding(cu_seqlens, qkv[2], out)
    assert torch.equal(mended, cu_seqlens.cummax(0).values.int())
    assert out[: case.tokens].isnan().all()
    assert (out[case.tokens :] == 0).all()
    assert (qkv[2][case.tokens :] == 0).all()
    for x, old in zip(qkv, before, strict=True):
        assert torch.equal(x[: case.tokens], old[: case.tokens])
    for x in qkv[:2]:
        assert x[case.tokens :].isnan().all()


@pytest.mark.parametrize("tail", ["zeros", "repeats"])
def test_many_sequences(tail):
    # The last of them end after the offsets that are searched at once.
    lengths = tuple(i % 3 for i in range(1100))
    case = Case("many", lengths, pad_rows=5, **{tail: 1000})
    v = torch.ones(case.rows, 1, 8, dtype=torch.float16, device=DEVICE)
    out = torch.ones_like(v)
    cu_seqlens = case.cu_seqlens(DEVICE)
    mended = mask_padding(cu_seqlens, v, out)
    assert torch.equal(mended, cu_seqlens.cummax(0).values.int())
    for x in (v, out):
        assert (x[: case.tokens] == 1).all()
        assert (x[case.tokens :] == 0).all()


def test_heads_of_v_at_any_stride():
    case = Case("one", (3,), pad_rows=4)
    # Heads first, with a gap after each: the gap is somebody else's.
    memory = torch.ones(2, 9, 8, dtype=torch.float16, device=DEVICE)
    v = memory.transpose(0, 1)[: case.rows]
    out = torch.ones(case.rows, 2, 8, dtype=torch.float16, device=DEVICE)
    mask_padding(case.cu_seqlens(DEVICE), v, out)
    assert (memory[:, :3] == 1).all()
    assert (memory[:, 3:7] == 0).all()
    assert (memory[:, 7:] == 1).all()


@pytest.mark.parametrize("case", params([case for case in CASES if case.rows]))
def test_a_stream_is_cleared_after_its_sequences(case):
    x = torch.full((case.rows, 200), float("nan"), dtype=torch.float16, device=DEVICE)
    x[: case.tokens] = 1
    clear_padding(case.cu_seqlens(DEVICE), x)
    assert (x[: case.tokens] == 1).all()
    assert (x[case.tokens :] == 0).all()


@pytest.mark.gpu
def test_more_than_int32_elements():
    tokens = 600_000
    qkv = torch.ones(tokens, 3 * 16, 80, dtype=torch.bfloat16, device="cuda")
    assert qkv.numel() > 2**31
    rows = 2**31 // (16 * 80) + 200
    out = torch.ones(rows, 16, 80, dtype=torch.bfloat16, device="cuda")
    v = qkv.as_strided((rows, 16, 80), (0, 80, 1))
    cu_seqlens = torch.tensor([0, rows - 100], dtype=torch.int32, device="cuda")
    mask_padding(cu_seqlens, v, out)
    assert (out[:-100] == 1).all() and not out[-100:].any()
    v = qkv[:, 32:]
    cu_seqlens = torch.tensor([0, tokens - 100], dtype=torch.int32, device="cuda")
    mask_padding(cu_seqlens, v, out[:tokens])
    assert (v[:-100] == 1).all() and not v[-100:].any()
    assert (qkv[-100:, :32] == 1).all()

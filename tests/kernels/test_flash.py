# SPDX-License-Identifier: Apache-2.0
"""The flash-attention kernel against the plain PyTorch reference."""

import pytest
import torch
from _once import once

from cases import (
    CASES,
    LARGE,
    TOLERANCES,
    Case,
    make_qkv,
    params,
    relative_error,
    values,
)
from vllm_flashinfer_vit.kernels import flash
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref

pytestmark = pytest.mark.usefixtures("nan_empty")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
attention = once(flash.prepare)
HEAD_DIMS = [64, 72, 80, 96, 128]


def _qkv(case, heads, head_dim, dtype, **kwargs):
    return make_qkv(case, heads, head_dim, dtype, device=DEVICE, **kwargs)


def _assert_right(out, qkv, case: Case, scale: float) -> None:
    assert out.is_contiguous() and out.dtype == qkv[0].dtype
    assert (out[case.tokens :] == 0).all()
    args = case.cu_seqlens(DEVICE), case.max_seqlen, scale
    expected = attention_ref(*(x.float() for x in qkv), *args)
    atol = TOLERANCES[out.dtype] * 5  # |v| of N(0, 1) stays below 5 here
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("case", params(CASES, extended=LARGE))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    values([(1, 1, 80, torch.float32)], extended=[(2, 1, 72, torch.float16)]),
    ids=str,
)
def test_flash_of_every_case(case, heads, kv_heads, head_dim, dtype):
    qkv = _qkv(case, heads, head_dim, dtype, kv_heads=kv_heads)
    scale = head_dim**-0.5
    out = attention(*qkv, case.cu_seqlens(DEVICE), case.max_seqlen, scale)
    _assert_right(out, qkv, case, scale)


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 40, 88, 112])
def test_flash_of_every_head_dim(head_dim):
    case = Case("ragged", (130, 1, 64, 0, 5), pad_rows=3)
    qkv = _qkv(case, 2, head_dim, torch.float16)
    out = attention(*qkv, case.cu_seqlens(DEVICE), 130, 0.1)
    _assert_right(out, qkv, case, 0.1)


def test_flash_of_grouped_heads():
    case = Case("two", (70, 5))
    qkv = _qkv(case, 4, 64, torch.float16, kv_heads=2)
    out = attention(*qkv, case.cu_seqlens(DEVICE), 70, 0.1)
    _assert_right(out, qkv, case, 0.1)


def test_flash_of_other_layouts():
    case = Case("two", (90, 11))
    q, k, v = _qkv(case, 2, 72, torch.float16)
    args = case.cu_seqlens(DEVICE), case.max_seqlen, 72**-0.5
    packed = attention(q, k, v, *args)
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    # Rows of 2 * 72 + 1 elements: nothing is aligned to more than one element.
    odd = torch.zeros(101, 2 * 72 + 1, dtype=torch.float16, device=DEVICE)
    odd = odd[:, 1:].unflatten(1, (2, 72)).copy_(v)
    out = attention(heads_first, k.contiguous(), odd, *args)
    assert torch.equal(out, packed)


@pytest.mark.usefixtures("exact_dot")
@pytest.mark.parametrize("loose", [512, 2000])
def test_flash_of_a_sequence_is_the_same_in_a_batch(loose):
    """Whatever lies before it, and whichever block size `max_seqlen` stands for."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    batch = Case("batch", (70, 300, 7, 150))
    q, k, v = _qkv(batch, 2, 80, dtype)
    together = attention(q, k, v, batch.cu_seqlens(DEVICE), loose, 0.1)
    start = 0
    for length in batch.lengths:
        alone = Case("alone", (length,))
        rows = slice(start, start + length)
        start += length
        cu_seqlens = alone.cu_seqlens(DEVICE)
        out = attention(q[rows], k[rows], v[rows], cu_seqlens, length, 0.1)
        assert torch.equal(out, together[rows])


def test_flash_keeps_bad_values_in_their_sequence():
    case = Case("three", (70, 70, 70))
    q, k, v = _qkv(case, 1, 72, torch.float16)
    args = case.cu_seqlens(DEVICE), case.max_seqlen, 0.125
    good = attention(q, k, v, *args)
    for x in (q, k, v):
        x[70:140] = float("nan")
    out = attention(q, k, v, *args)
    assert out[70:140].isnan().all()
    assert torch.equal(out[:70], good[:70])
    assert torch.equal(out[140:], good[140:])


def test_flash_of_offsets_beyond_all_rows():
    case = Case("two", (70, 35))
    qkv = _qkv(case, 1, 72, torch.float16)
    cu_seqlens = case.cu_seqlens(DEVICE)
    expected = attention(*qkv, cu_seqlens, 70, 0.1)
    cu_seqlens[-1] = 2**31 - 1
    assert torch.equal(attention(*qkv, cu_seqlens, 70, 0.1), expected)


def test_flash_of_scores_far_from_zero():
    case = Case("two", (100, 65))
    q, k, v = _qkv(case, 1, 64, torch.float32)
    q, k = q.abs() + 3, -k.abs() - 3  # every score lies near -800
    args = case.cu_seqlens(DEVICE), case.max_seqlen, 0.5
    out = attention(q, k, v, *args)
    assert relative_error(out, attention_ref(q, k, v, *args)) < 1e-4


def test_flash_rejects_what_it_cannot_do():
    case = Case("8", (8,))
    q, k, v = _qkv(case, 3, 64, torch.float16)
    cu_seqlens = case.cu_seqlens(DEVICE)
    with pytest.raises(ValueError, match="got 132"):
        wide = torch.zeros(8, 1, 132, device=DEVICE)
        attention(wide, wide, wide, cu_seqlens, 8, 1.0)
    with pytest.raises(ValueError, match="one dtype"):
        attention(q, k.float(), v, cu_seqlens, 8, 1.0)
    with pytest.raises(ValueError, match="divisor"):
        attention(q, k[:, :2], v[:, :2], cu_seqlens, 8, 1.0)
    with pytest.raises(ValueError, match="int64"):
        attention(q, k, v, cu_seqlens.long(), 8, 1.0)
    with pytest.raises(ValueError, match=r"got -0\.5"):
        attention(q, k, v, cu_seqlens, 8, -0.5)


@pytest.mark.gpu
def test_flash_clears_padding_beyond_int32():
    # Inputs of one row, repeated: only the output is large.
    case = Case("one", (64,), pad_rows=2**31 // (16 * 80) + 200)
    row = torch.ones(1, 16, 80, dtype=torch.bfloat16, device="cuda")
    x = row.expand(case.rows, 16, 80)
    out = attention(x, x, x, case.cu_seqlens("cuda"), 64, 0.1)
    assert out.numel() > 2**31
    assert (out[:64] == 1).all()
    assert not out[64:].any()

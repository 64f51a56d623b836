# SPDX-License-Identifier: Apache-2.0
"""The plain PyTorch reference against code that shares nothing with it."""

import pytest
import torch

from cases import CASES, TOLERANCES, Case, make_qkv, params
from vllm_flashinfer_vit.kernels import attention_ref as reference_attention
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref

pytestmark = pytest.mark.usefixtures("nan_empty")


def _masked_attention(q, k, v, case: Case, scale: float) -> torch.Tensor:
    """fp64 attention over all rows at once; a mask keeps sequences apart."""
    owner = torch.repeat_interleave(
        torch.arange(len(case.lengths)), torch.tensor(case.lengths, dtype=torch.int64)
    )
    mask = owner[:, None] == owner[None]
    group = q.shape[1] // k.shape[1]
    rows = case.tokens
    out = torch.zeros(q.shape, dtype=torch.float64)
    for head in range(q.shape[1]):
        scores = q[:rows, head].double() @ k[:rows, head // group].double().T * scale
        weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        out[:rows, head] = weights @ v[:rows, head // group].double()
    return out


@pytest.mark.parametrize("case", params(CASES))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [(2, 2, 80, torch.float32), (4, 2, 72, torch.bfloat16)],
)
def test_attention_equals_masked_fp64(case, heads, kv_heads, head_dim, dtype):
    q, k, v = make_qkv(case, heads, head_dim, dtype, kv_heads=kv_heads)
    scale = head_dim**-0.5
    out = attention_ref(q, k, v, case.cu_seqlens(), case.max_seqlen, scale)
    assert out.dtype == dtype and out.is_contiguous()
    assert (out[case.tokens :] == 0).all()
    expected = _masked_attention(q, k, v, case, scale)
    atol = TOLERANCES[dtype] * 5  # |v| of N(0, 1) stays below 5 here
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


def test_attention_is_the_same_in_small_chunks(monkeypatch):
    case = Case("two-of-40", (40, 7, 40))
    q, k, v = make_qkv(case, 2, 64, torch.float32)
    args = q, k, v, case.cu_seqlens(), 40, 0.125
    whole = attention_ref(*args)
    monkeypatch.setattr(reference_attention, "_MAX_SCORES", 2 * 40 * 9)
    torch.testing.assert_close(attention_ref(*args), whole, rtol=0, atol=1e-6)


def test_attention_of_a_thousand_windows_is_one_call(monkeypatch):
    case = Case("1000-windows", (64,) * 1000)
    q, k, v = make_qkv(case, 2, 80, torch.float32)
    calls = []
    dense = reference_attention._dense_attention

    def counted(*args):
        calls.append(args)
        return dense(*args)

    monkeypatch.setattr(reference_attention, "_dense_attention", counted)
    attention_ref(q, k, v, case.cu_seqlens(), 64, 80**-0.5)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("cu_seqlens", "max_seqlen", "message"),
    [
        ([1, 4], 4, "start at 0"),
        ([0, 4, 2], 4, "entry 2 is 2 after 4"),
        ([0, 0, 4, 0, 6], 4, "entry 3 is 0 after 4"),
        ([0, 4, 9], 8, "8 rows"),
        ([0, 8], 7, "sequence 0 has 8 tokens"),
        ([], 8, "int32"),
        ([[0, 8]], 8, "int32"),
    ],
)
def test_attention_rejects_bad_offsets(cu_seqlens, max_seqlen, message):
    q, k, v = make_qkv(Case("8", (8,)), 1, 64, torch.float32)
    offsets = torch.tensor(cu_seqlens, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        attention_ref(q, k, v, offsets, max_seqlen, 1.0)


def test_attention_rejects_bad_tensors():
    case = Case("8", (8,))
    cu_seqlens = case.cu_seqlens()
    q, k, v = make_qkv(case, 3, 64, torch.float32)
    with pytest.raises(ValueError, match="int64 on cpu"):
        attention_ref(q, k, v, cu_seqlens.long(), 8, 1.0)
    with pytest.raises(ValueError, match="multiple of 2"):
        attention_ref(q, k[:, :2], v[:, :2], cu_seqlens, 8, 1.0)
    with pytest.raises(ValueError, match="D-stride 1"):
        attention_ref(q[None], k, v, cu_seqlens, 8, 1.0)
    with pytest.raises(ValueError, match="D-stride 1"):
        attention_ref(q, k.mT.contiguous().mT, v, cu_seqlens, 8, 1.0)
    with pytest.raises(ValueError, match="T and D of q"):
        attention_ref(q, k, v[:, :, :32], cu_seqlens, 8, 1.0)

# SPDX-License-Identifier: Apache-2.0
"""The window kernel against the plain PyTorch reference."""

import pytest
import torch
from _once import once

from cases import (
    LARGE,
    SHORT_CASES,
    TOLERANCES,
    Case,
    attention_eager,
    make_cos_sin,
    make_qkv,
    params,
    relative_error,
    values,
    window_lengths,
)
from vllm_flashinfer_vit.kernels import window
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.kernels.rope import rope
from vllm_flashinfer_vit.kernels.rope_ref import rope_ref

pytestmark = pytest.mark.usefixtures("nan_empty")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
attention = once(window.prepare)
HEAD_DIMS = [64, 72, 80, 96, 128]


def _inputs(case, heads, head_dim, dtype, *, kv_heads=None, seed=0, device=DEVICE):
    q, k, v = make_qkv(
        case, heads, head_dim, dtype, kv_heads=kv_heads, device=device, seed=seed
    )
    cos, sin = make_cos_sin(case, head_dim, dtype, device=device)
    return q, k, v, cos, sin


@pytest.fixture(params=[False, True], ids=["halves", "interleaved"])
def interleaved(request):
    return request.param


def _expected(q, k, v, cos, sin, case: Case, interleaved=False) -> torch.Tensor:
    """fp32 output; nothing before it is rounded."""
    q, k = rope_ref(q.float(), k.float(), cos, sin, interleaved)
    cu_seqlens = case.cu_seqlens(q.device)
    return attention_ref(
        q, k, v.float(), cu_seqlens, case.max_seqlen, q.shape[2] ** -0.5
    )


@pytest.mark.parametrize("case", params(SHORT_CASES, extended=LARGE))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    values([(3, 3, 80, torch.float32)], extended=[(2, 1, 72, torch.float16)]),
    ids=str,
)
def test_window_of_every_case(case, heads, kv_heads, head_dim, dtype):
    q, k, v, _, _ = _inputs(case, heads, head_dim, dtype, kv_heads=kv_heads)
    args = case.cu_seqlens(DEVICE), case.max_seqlen, head_dim**-0.5
    out = attention(q, k, v, *args)
    assert out.is_contiguous() and out.dtype == dtype
    assert (out[case.tokens :] == 0).all()
    expected = attention_ref(q.float(), k.float(), v.float(), *args)
    atol = TOLERANCES[dtype] * 5  # |v| of N(0, 1) stays below 5 here
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=atol)


def test_window_of_grouped_heads():
    case = Case("two", (20, 5))
    q, k, v, cos, sin = _inputs(case, 4, 64, torch.float16, kv_heads=2)
    out = attention(q, k, v, case.cu_seqlens(DEVICE), 20, 64**-0.5, cos, sin)
    expected = _expected(q, k, v, cos, sin, case)
    assert relative_error(out, expected) < TOLERANCES[torch.float16]


@pytest.mark.parametrize("head_dim", values([64, 72, 80], [40, 88, 96, 128]))
def test_window_turns_as_rope_does(head_dim, interleaved):
    dtype = torch.float16
    case = Case("ragged", (20, 1, 32, 0))
    q, k, v, cos, sin = _inputs(case, 2, head_dim, dtype, kv_heads=1)
    args = case.cu_seqlens(DEVICE), case.max_seqlen, head_dim**-0.5
    for tables in ((cos, sin), make_cos_sin(case, head_dim, device=DEVICE)):
        turns = *tables, interleaved
        fused = attention(q, k, v, *args, *turns)
        assert torch.equal(fused, attention(*rope(q, k, *turns), v, *args))
        expected = _expected(q, k, v, *tables, case, interleaved)
        assert relative_error(fused, expected) < TOLERANCES[dtype]


def test_window_of_other_layouts(interleaved):
    case = Case("two", (30, 11))
    q, k, v, cos, sin = _inputs(case, 2, 72, torch.float16)
    args = case.cu_seqlens(DEVICE), case.max_seqlen, 72**-0.5
    packed = attention(q, k, v, *args, cos, sin, interleaved)
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    # Rows of 2 * 72 + 1 elements: nothing is aligned to more than one element.
    odd = torch.zeros(2, 41, 2 * 72 + 1, dtype=torch.float16, device=DEVICE)
    odd_k, odd_v = odd[..., 1:].unflatten(2, (2, 72)).copy_(torch.stack([k, v]))
    cos_t, sin_t = cos.T.contiguous().T, sin.T.contiguous().T
    for other_k in (k.contiguous(), odd_k):
        turns = cos_t, sin_t, interleaved
        out = attention(heads_first, other_k, odd_v, *args, *turns)
        assert torch.equal(out, packed)


def test_window_of_a_sequence_is_the_same_in_a_batch():
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    first, second = window_lengths(16, 20), window_lengths(10, 12)
    batch = Case("batch", first + second)
    q, k, v, cos, sin = _inputs(batch, 2, 80, dtype)
    together = attention(q, k, v, batch.cu_seqlens(DEVICE), 64, 0.1, cos, sin)
    start = 0
    for lengths in (first, second):
        alone = Case("alone", lengths)
        rows = slice(start, start + alone.tokens)
        start += alone.tokens
        tensors = [x[rows] for x in (q, k, v)]
        cu_seqlens = alone.cu_seqlens(DEVICE)
        out = attention(*tensors, cu_seqlens, 64, 0.1, cos[rows], sin[rows])
        assert torch.equal(out, together[rows])


def test_window_keeps_bad_values_in_their_sequence():
    case = Case("three", (20, 20, 20))
    q, k, v, _, _ = _inputs(case, 2, 64, torch.float16)
    args = case.cu_seqlens(DEVICE), case.max_seqlen, 0.125
    good = attention(q, k, v, *args)
    for x in (q, k, v):
        x[20:40] = float("nan")
    out = attention(q, k, v, *args)
    assert out[20:40].isnan().all()
    assert torch.equal(out[:20], good[:20])
    assert torch.equal(out[40:], good[40:])


def test_window_of_offsets_beyond_all_rows():
    case = Case("two", (20, 40))
    qkv = _inputs(case, 2, 64, torch.float16)[:3]
    cu_seqlens = case.cu_seqlens(DEVICE)
    expected = attention(*qkv, cu_seqlens, 40, 0.1)
    cu_seqlens[-1] = 2**31 - 1
    assert torch.equal(attention(*qkv, cu_seqlens, 40, 0.1), expected)


def test_window_rejects_what_it_cannot_do():
    case = Case("8", (8,))
    q, k, v, cos, sin = _inputs(case, 3, 64, torch.float16)
    cu_seqlens = case.cu_seqlens(DEVICE)
    with pytest.raises(ValueError, match="max_seqlen=129"):
        attention(q, k, v, cu_seqlens, 129, 1.0)
    with pytest.raises(ValueError, match="got 132"):
        wide = torch.zeros(8, 1, 132, device=DEVICE)
        attention(wide, wide, wide, cu_seqlens, 8, 1.0)
    with pytest.raises(ValueError, match="one dtype"):
        attention(q, k.float(), v, cu_seqlens, 8, 1.0)
    with pytest.raises(ValueError, match="divisor"):
        attention(q, k[:, :2], v[:, :2], cu_seqlens, 8, 1.0)
    with pytest.raises(ValueError, match="int64"):
        attention(q, k, v, cu_seqlens.long(), 8, 1.0)
    with pytest.raises(ValueError, match="together"):
        attention(q, k, v, cu_seqlens, 8, 1.0, cos)
    with pytest.raises(ValueError, match=r"\[8, 32\]"):
        attention(q, k, v, cu_seqlens, 8, 1.0, cos[:, :16], sin[:, :16])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "case",
    params(
        [
            Case("exact", (64,) * 256),
            Case("ragged", window_lengths(84, 92), zeros=3, pad_rows=100),
            Case("frames-of-100", (100,) * 40),
            Case("16", (16,) * 100),
            Case("32", (25, 32, 1, 17) * 25),
            Case("128", (128, 127, 65, 3) * 10),
        ]
    ),
)
def test_window_is_as_exact_as_eager(case, head_dim, dtype, interleaved):
    q, k, v, cos, sin = _inputs(case, 16, head_dim, dtype)
    turns = cos, sin, interleaved
    expected = _expected(q, k, v, cos, sin, case, interleaved)
    scale = head_dim**-0.5
    cu_seqlens = case.cu_seqlens("cuda")
    out = attention(q, k, v, cu_seqlens, case.max_seqlen, scale, *turns)
    eager = attention_eager(*rope_ref(q, k, *turns), v, case, scale)
    unfused = rope(q, k, *turns)
    assert torch.equal(out, attention(*unfused, v, cu_seqlens, case.max_seqlen, scale))
    assert relative_error(out, expected) <= 2 * relative_error(eager, expected)
    assert (out[case.tokens :] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rotary", ["halves", "interleaved", "none"])
def test_window_in_a_graph_of_other_lengths(rotary):
    rows, slots = 400, 8
    cases = [
        Case("as-captured", (64,) * 6, repeats=2, pad_rows=16),
        Case("zero-tail", (64, 40, 7), zeros=5, pad_rows=289),
        Case("repeated-tail", (10, 64, 64, 64, 50), repeats=3, pad_rows=148),
        Case("nothing", (), zeros=8, pad_rows=400),
        Case("full", (50,) * 8),
    ]
    assert all(case.rows == rows for case in cases)
    dtype = torch.bfloat16
    *static, cos, sin = _inputs(cases[0], 4, 80, dtype)
    turn = () if rotary == "none" else (cos, sin, rotary == "interleaved")
    static = [x.clone() for x in static]
    cu_seqlens = cases[0].cu_seqlens("cuda")
    assert cu_seqlens.numel() == slots + 1
    attention(*static, cu_seqlens, 64, 0.1, *turn)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*static, cu_seqlens, 64, 0.1, *turn)
    for seed, case in enumerate(cases):
        fresh = make_qkv(case, 4, 80, dtype, device="cuda", seed=seed)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        cu_seqlens.copy_(case.cu_seqlens("cuda"))
        graph.replay()
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first)
        assert (out[case.tokens :] == 0).all()
        eager = attention(*fresh, case.cu_seqlens("cuda"), 64, 0.1, *turn)
        assert torch.equal(out, eager)


@pytest.mark.gpu
def test_window_clears_padding_beyond_int32():
    # Inputs of one row, repeated: only the output is large.
    case = Case("one", (64,), pad_rows=2**31 // (16 * 80) + 200)
    row = torch.ones(1, 16, 80, dtype=torch.bfloat16, device="cuda")
    x = row.expand(case.rows, 16, 80)
    out = attention(x, x, x, case.cu_seqlens("cuda"), 64, 0.1)
    assert out.numel() > 2**31
    assert (out[:64] == 1).all()
    assert not out[64:].any()


@pytest.mark.gpu
@pytest.mark.slow
def test_window_of_more_than_int32_elements():
    case = Case("600k", (64,) * 9375)
    qkv = torch.randn(case.rows, 3 * 16, 80, dtype=torch.bfloat16, device="cuda")
    assert qkv.numel() > 2**31
    q, k, v = qkv.split(16, dim=1)
    cos, sin = make_cos_sin(case, 80, device="cuda")
    scale = 80**-0.5
    out = attention(q, k, v, case.cu_seqlens("cuda"), 64, scale, cos, sin)
    window = Case("window", (64,))
    for i in (0, 2**31 // 3840 // 64, 9374):
        rows = slice(64 * i, 64 * i + 64)
        tensors = [x[rows] for x in (q, k, v, cos, sin)]
        expected = _expected(*tensors, window)
        eager = attention_eager(
            *rope_ref(*tensors[:2], *tensors[3:]), tensors[2], window, scale
        )
        error = relative_error(out[rows], expected)
        assert error <= 2 * relative_error(eager, expected)

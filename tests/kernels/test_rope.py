# SPDX-License-Identifier: Apache-2.0
"""The rotary kernel returns the bits of its reference, which is a complex product."""

import pytest
import torch

from cases import (
    Case,
    make_cos_sin,
    make_qkv,
    values,
)
from vllm_flashinfer_vit.kernels._triton import stride_unit
from vllm_flashinfer_vit.kernels.rope import rope
from vllm_flashinfer_vit.kernels.rope_ref import rope_ref

pytestmark = pytest.mark.usefixtures("nan_empty")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter truncates when it converts to bf16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.fixture(params=[False, True], ids=["halves", "interleaved"])
def interleaved(request):
    return request.param


def _assert_same_bits(q, k, cos, sin, interleaved) -> None:
    args = q, k, cos, sin, interleaved
    for out, expected in zip(rope(*args), rope_ref(*args), strict=True):
        assert out.is_contiguous()
        assert out.dtype == expected.dtype
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (128, 64), (80, 40), (6, 2)],
)
@pytest.mark.parametrize(("heads", "kv_heads"), values([(3, 1)], [(16, 16)]))
def test_rope_of_projection_views(
    head_dim, rotary_dim, heads, kv_heads, dtype, interleaved
):
    case = Case("37", (37,))
    q, k, _ = make_qkv(case, heads, head_dim, dtype, kv_heads=kv_heads, device=DEVICE)
    cos, sin = make_cos_sin(case, rotary_dim, dtype, device=DEVICE)
    _assert_same_bits(q, k, cos, sin, interleaved)
    # As towers with interleaved pairs, and those that get angles, have them.
    _assert_same_bits(q, k, cos.float(), sin.float(), interleaved)


@pytest.mark.parametrize("tokens", [0, 1, 2, 129])
def test_rope_of_few_tokens(tokens, interleaved):
    case = Case("few", (tokens,))
    q, k, _ = make_qkv(case, 2, 80, torch.float16, device=DEVICE)
    _assert_same_bits(q, k, *make_cos_sin(case, 80, device=DEVICE), interleaved)


def test_rope_of_other_layouts(interleaved):
    case = Case("21", (21,))
    q, k, _ = make_qkv(case, 4, 72, torch.float16, device=DEVICE)
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    # Rows of 4 * 72 + 1 elements: nothing is aligned to more than one element.
    odd = torch.zeros(21, 4 * 72 + 1, dtype=torch.float16, device=DEVICE)
    odd = odd[:, 1:].unflatten(1, (4, 72)).copy_(k)
    both = torch.cat(make_cos_sin(case, 72, device=DEVICE), dim=1)
    cos, sin = both.chunk(2, dim=1)
    _assert_same_bits(heads_first, odd, cos, sin, interleaved)
    # One row of angles for all tokens, and angles that are not contiguous.
    for tables in [
        (cos[:1].expand(21, -1), sin[:1].expand(21, -1)),
        (cos.T.contiguous().T, sin.T.contiguous().T),
    ]:
        _assert_same_bits(q, k, *tables, interleaved)
    # Rows of an even number of elements that no larger power of two divides.
    even = torch.zeros(21, 4 * 72 + 2, dtype=torch.float16, device=DEVICE)
    even = even[:, 2:].unflatten(1, (4, 72)).copy_(k)
    _assert_same_bits(even, even, cos, sin, interleaved)


def test_rope_of_one_layout_at_any_address(interleaved):
    case = Case("5", (5,))
    cos, sin = make_cos_sin(case, 64, device=DEVICE)
    memory = torch.randn(2, 5 * 2 * 64 + 8, device=DEVICE).half()
    for first in (0, 1, 0, 1):
        q, k = memory[:, first:][:, : 5 * 2 * 64].unflatten(1, (5, 2, 64)).unbind(0)
        _assert_same_bits(q, k, cos, sin, interleaved)


def test_rope_copies_the_rest_as_it_is(interleaved):
    case = Case("5", (5,))
    q, k, _ = make_qkv(case, 2, 64, torch.float16, device=DEVICE)
    q[..., 32] = float("inf")
    k[..., 63] = float("-inf")
    _assert_same_bits(q, k, *make_cos_sin(case, 32, device=DEVICE), interleaved)


def test_rope_rejects_what_it_cannot_read():
    case = Case("8", (8,))
    q, k, _ = make_qkv(case, 2, 64, torch.float32, device=DEVICE)
    cos, sin = make_cos_sin(case, 64, device=DEVICE)
    for bad_q, bad_k, message in [
        (q, k[:7], "must be"),
        (q, k.half(), "q's dtype"),
        (q[:, :1], k, "at most its heads"),
        (q, k.mT.contiguous().mT, "D-stride 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            rope(bad_q, bad_k, cos, sin)
    with pytest.raises(ValueError, match="must be"):
        rope(q, k, cos[:, :31], sin)


@pytest.mark.parametrize("rotary_dim", [80, 40])
def test_rope_ref_is_a_complex_product(rotary_dim):
    case = Case("9", (9,))
    half = rotary_dim // 2
    q, k, _ = make_qkv(case, 3, 80, torch.float32, kv_heads=1)
    cos, sin = make_cos_sin(case, rotary_dim)
    turn = torch.complex(cos, sin)[:, None]
    for x, out in zip((q, k), rope_ref(q, k, cos, sin), strict=True):
        assert out.is_contiguous()
        turned = torch.complex(x[..., :half], x[..., half:rotary_dim]) * turn
        expected = torch.cat((turned.real, turned.imag, x[..., rotary_dim:]), dim=-1)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rotary_dim", [80, 40])
def test_rope_ref_of_interleaved_pairs_is_a_complex_product(rotary_dim):
    case = Case("9", (9,))
    q, k, _ = make_qkv(case, 3, 80, torch.float32, kv_heads=1)
    cos, sin = make_cos_sin(case, rotary_dim)
    turn = torch.complex(cos, sin)[:, None]
    found = rope_ref(q, k, cos, sin, True)
    natural = []
    for x, out in zip((q, k), found, strict=True):
        pairs = x[..., :rotary_dim].unflatten(-1, (-1, 2)).contiguous()
        turned = torch.view_as_complex(pairs) * turn
        rest = x[..., rotary_dim:]
        parts = turned.real, turned.imag, rest[..., ::2], rest[..., 1::2]
        torch.testing.assert_close(out, torch.cat(parts, dim=-1), rtol=0, atol=1e-5)
        natural.append(torch.cat([torch.view_as_real(turned).flatten(2), rest], dim=-1))
    # Scores are those of columns in their own order.
    scores, expected = (torch.einsum("thd,tgd->hgt", *x) for x in (found, natural))
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)


def test_rope_ref_rounds_once():
    case = Case("64", (64,))
    q, k, _ = make_qkv(case, 2, 64, torch.bfloat16)
    cos, sin = make_cos_sin(case, 64)
    rotated = rope_ref(q, k, cos, sin)
    in_fp32 = rope_ref(q.float(), k.float(), cos, sin)
    for out, expected in zip(rotated, in_fp32, strict=True):
        assert torch.equal(out, expected.bfloat16())


def test_rope_ref_rejects_shapes_that_do_not_fit():
    case = Case("8", (8,))
    q, k, _ = make_qkv(case, 2, 64, torch.float32)
    cos, sin = make_cos_sin(case, 64)
    for args in [
        (q, k[:7], cos, sin),
        (q, k[..., :32], cos, sin),
        (q, k, cos[:7], sin[:7]),
        (q, k, cos, sin[:, :16]),
        (q[..., :32], k[..., :32], cos, sin),
    ]:
        with pytest.raises(ValueError, match="must be"):
            rope_ref(*args)


def test_stride_unit_is_the_widest_load_that_fits():
    assert stride_unit(40, 3840, 80) == 8
    assert stride_unit(36, 3456, 72) == 4
    assert stride_unit(64, 289) == 1
    assert stride_unit(0, 64) == 8


@pytest.mark.gpu
def test_rope_in_a_graph(interleaved):
    case = Case("300", (300,))
    q, k, _ = make_qkv(case, 4, 80, torch.bfloat16, device="cuda")
    cos, sin = make_cos_sin(case, 80, torch.bfloat16, device="cuda")
    rope(q, k, cos, sin, interleaved)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = rope(q, k, cos, sin, interleaved)
    for seed in (1, 2):
        new_q, new_k, _ = make_qkv(
            case, 4, 80, torch.bfloat16, device="cuda", seed=seed
        )
        q.copy_(new_q)
        k.copy_(new_k)
        graph.replay()
        expected = rope_ref(q, k, cos, sin, interleaved)
        for out, right in zip(outs, expected, strict=True):
            assert torch.equal(out, right)


@pytest.mark.gpu
@pytest.mark.slow
def test_rope_of_more_than_int32_elements(interleaved):
    tokens = 600_000
    qkv = torch.randn(tokens, 3 * 16, 80, dtype=torch.bfloat16, device="cuda")
    assert qkv.numel() > 2**31
    q, k, _ = qkv.split(16, dim=1)
    cos, sin = make_cos_sin(Case("600k", (tokens,)), 80, device="cuda")
    q_out, k_out = rope(q, k, cos, sin, interleaved)
    for start in (0, 2**31 // 3840 - 8, tokens - 16):
        part = slice(start, start + 16)
        expected = rope_ref(q[part], k[part], cos[part], sin[part], interleaved)
        assert torch.equal(q_out[part], expected[0])
        assert torch.equal(k_out[part], expected[1])

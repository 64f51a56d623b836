# SPDX-License-Identifier: Apache-2.0
"""One kernel normalises each head of q and k and turns it, where it lies."""

import pytest
import torch

from cases import Case, make_cos_sin, make_qkv, relative_error, values
from vllm_flashinfer_vit.kernels.rope_ref import rope_ref
from vllm_flashinfer_vit.kernels.turn import prepare, turn
from vllm_flashinfer_vit.kernels.turn_ref import turn_ref

pytestmark = pytest.mark.usefixtures("nan_empty")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter truncates when it converts to bf16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
EPS = 1e-5


def make_inputs(tokens, head_dim, heads=3, kv_heads=3, dtype=torch.float16, seed=0):
    """q and k of a projection, whose v is NaN, cos and sin, and the norms' weights."""
    case = Case("tokens", (tokens,))
    kinds = {"kv_heads": kv_heads, "device": DEVICE, "seed": seed}
    q, k, v = make_qkv(case, heads, head_dim, dtype, **kinds)
    v.fill_(float("nan"))
    cos, sin = make_cos_sin(case, head_dim, device=DEVICE, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed)
    drawn = 1 + 0.3 * torch.randn(2, head_dim, generator=generator)
    return q, k, cos, sin, tuple(drawn.to(DEVICE, dtype))


def expected_of(q, k, cos, sin, weights):
    q, k = q.clone(), k.clone()
    turn_ref(q, k, cos, sin, weights, EPS)
    return q, k


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 88, 112, 128, 2])
@pytest.mark.parametrize(("heads", "kv_heads"), values([(3, 1)], [(16, 16), (12, 12)]))
def test_turn(head_dim, heads, kv_heads, dtype):
    q, k, *rest = make_inputs(21, head_dim, heads, kv_heads, dtype)
    expected = expected_of(q, k, *rest)
    turn(q, k, *rest, EPS)
    unit = torch.finfo(dtype).eps
    for found, right in zip((q, k), expected, strict=True):
        bound = unit * right.float().abs() + 8 * torch.finfo(torch.float32).eps
        assert ((found.float() - right.float()).abs() <= bound).all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    q, k, *rest = make_inputs(tokens, 64)
    expected = expected_of(q, k, *rest)
    turn(q, k, *rest, EPS)
    for found, right in zip((q, k), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=2e-3, atol=1e-3)


@pytest.mark.extended
def test_heads_that_are_far_apart():
    """Heads as planes: their offsets are beyond int32, though no stride is."""
    q, k, *rest = make_inputs(2, 64)
    expected = expected_of(q, k, *rest)
    stride = 2**30 + 8
    # 10 GiB, of which few pages are touched. Offsets that wrap lie within, too.
    storage = torch.UntypedStorage(2 * 5 * stride, device=DEVICE)
    memory = torch.tensor([], dtype=q.dtype, device=DEVICE).set_(storage)
    far = memory.as_strided(q.shape, (64, stride, 1), 2**31).copy_(q)
    turn(far, k, *rest, EPS)
    for found, right in zip((far, k), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=2e-3, atol=1e-3)


def test_settled_calls_take_other_weights():
    q, k, cos, sin, weights = make_inputs(9, 64)
    call = prepare(q, k, cos, sin, weights, EPS)
    for seed in (1, 2):
        new_q, new_k, *_, new = make_inputs(9, 64, seed=seed)
        expected = expected_of(new_q, new_k, cos, sin, new)
        q.copy_(new_q)
        k.copy_(new_k)
        call(*new)
        for found, right in zip((q, k), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=2e-3, atol=1e-3)


def test_the_reference_turns_as_rope_does():
    q, k, cos, sin, weights = make_inputs(9, 80, dtype=torch.float32)
    still = torch.ones_like(cos), torch.zeros_like(sin)
    normed = expected_of(q, k, *still, weights)
    expected = rope_ref(*normed, cos, sin)
    turn_ref(q, k, cos, sin, weights, EPS)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])


def test_the_reference_normalises_each_head():
    q, k, cos, sin, weights = make_inputs(9, 64, dtype=torch.float32)
    still = torch.ones_like(cos), torch.zeros_like(sin)
    expected = [
        torch.nn.functional.rms_norm(x, (64,), weight, EPS)
        for x, weight in zip((q, k), weights, strict=True)
    ]
    turn_ref(q, k, *still, weights, EPS)
    for found, right in zip((q, k), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


def axial_inputs(tokens, head_dim, dtype=torch.float16, seed=0):
    """What Gemma 4's blocks have: norms of q, k and v, and axial rotary embedding."""
    q, k, cos, sin, weights = make_inputs(
        tokens, head_dim, kv_heads=2, dtype=dtype, seed=seed
    )
    v = make_inputs(tokens, head_dim, kv_heads=2, dtype=dtype, seed=9)[1]
    return q, k, cos, sin, weights, EPS, head_dim // 4, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128, 4])
@pytest.mark.parametrize("tokens", [0, 1, 21])
def test_axial_and_v(tokens, head_dim, dtype):
    q, k, *rest, v = axial_inputs(tokens, head_dim, dtype=dtype)
    expected = [x.clone() for x in (q, k, v)]
    turn_ref(*expected[:2], *rest, expected[2])
    turn(q, k, *rest, v)
    unit = torch.finfo(dtype).eps
    for found, right in zip((q, k, v), expected, strict=True):
        bound = unit * right.float().abs() + 8 * torch.finfo(torch.float32).eps
        assert ((found.float() - right.float()).abs() <= bound).all()


def test_the_reference_turns_the_halves_of_a_head_apart():
    q, k, cos, sin, weights, *_, v = axial_inputs(9, 64, dtype=torch.float32)
    expected = []
    for x, weight in zip((q, k), weights, strict=True):
        normed = torch.nn.functional.rms_norm(x, (64,), weight, EPS)
        halves = zip(
            normed.chunk(2, -1), cos.chunk(2, -1), sin.chunk(2, -1), strict=True
        )
        turned = [
            rope_ref(half, half, half_cos, half_sin)[0]
            for half, half_cos, half_sin in halves
        ]
        expected.append(torch.cat(turned, -1))
    expected.append(torch.nn.functional.rms_norm(v, (64,), None, EPS))
    turn_ref(q, k, cos, sin, weights, EPS, span=16, v=v)
    for found, right in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", [turn, turn_ref])
def test_what_does_not_fit(call):
    q, k, cos, sin, weights = make_inputs(8, 64)
    for arguments, message in [
        ((q, k[:7], cos, sin, weights, EPS), "must be"),
        ((q, k, cos[:, :16], sin[:, :16], weights, EPS), "for all of a head"),
        ((q, k, cos, sin, weights[:1], EPS), "two of"),
        ((q, k, cos, sin, (weights[0], weights[1][:8]), EPS), "two of"),
        ((q, k, cos, sin, weights, EPS, 24), "a span of 24"),
        ((q, k, cos, sin, weights, EPS, 0), "a span of 0"),
        ((q, k, cos, sin, weights, EPS, None, k[:, :2]), "v must be like k"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(*arguments)


def test_what_the_kernel_cannot_read():
    q, k, cos, sin, weights = make_inputs(8, 64)
    for arguments in [
        (q, k.float(), cos, sin),
        (q.mT.contiguous().mT, k, cos, sin),
        (q, k, cos.T.contiguous().T, sin),
    ]:
        with pytest.raises(ValueError, match="every last stride"):
            turn(*arguments, weights, EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_in_a_graph(head_dim):
    kinds = {"heads": 16, "kv_heads": 16, "dtype": torch.bfloat16}
    q, k, *rest = make_inputs(300, head_dim, **kinds)
    turn(q, k, *rest, EPS)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turn(q, k, *rest, EPS)
    for seed in (1, 1, 2):
        new_q, new_k, *_ = make_inputs(300, head_dim, **kinds, seed=seed)
        q.copy_(new_q)
        k.copy_(new_k)
        graph.replay()
        turn(new_q, new_k, *rest, EPS)
        assert torch.equal(q, new_q) and torch.equal(k, new_k)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72])
def test_axial_in_a_graph(head_dim):
    dtype = torch.bfloat16
    q, k, *rest, v = axial_inputs(300, head_dim, dtype=dtype)
    turn(q, k, *rest, v)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turn(q, k, *rest, v)
    for seed in (1, 1, 2):
        new_q, new_k, *_, new_v = axial_inputs(300, head_dim, dtype=dtype, seed=seed)
        for held, new in zip((q, k, v), (new_q, new_k, new_v), strict=True):
            held.copy_(new)
        graph.replay()
        turn(new_q, new_k, *rest, new_v)
        for held, new in zip((q, k, v), (new_q, new_k, new_v), strict=True):
            assert torch.equal(held, new)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_int32_elements():
    tokens = 2**31 // (3 * 16 * 128) + 64
    q, k, cos, sin, weights = make_inputs(64, 128, 16, 16, torch.bfloat16)
    qkv = torch.zeros(tokens, 48, 128, dtype=torch.bfloat16, device="cuda")
    assert qkv.numel() > 2**31
    large_q, large_k, _ = qkv.split(16, dim=1)
    large_q[-64:], large_k[-64:] = q, k
    padding = torch.zeros(tokens - 64, 64, device="cuda")
    tables = [torch.cat([padding, table]) for table in (cos, sin)]
    turn(large_q, large_k, *tables, weights, EPS)
    expected = expected_of(q, k, cos, sin, weights)
    assert relative_error(large_q[-64:], expected[0]) < 4e-3
    assert relative_error(large_k[-64:], expected[1]) < 4e-3
    assert not large_q[:-64].any()

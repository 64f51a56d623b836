# SPDX-License-Identifier: Apache-2.0
"""The QKV projection that turns q and k: sizes on the CPU, results on a Hopper GPU."""

import importlib.util
import itertools

import pytest
import torch
from torch.nn.functional import linear

from cases import relative_error
from vllm_flashinfer_vit.blocks import quack_turn
from vllm_flashinfer_vit.blocks.quack_turn import (
    Heads,
    build,
    compiled,
    fits,
    prepare,
    reads,
    turned,
    views,
)
from vllm_flashinfer_vit.kernels.rope_ref import rope_ref

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HAS_QUACK = importlib.util.find_spec("quack") is not None
HAS_RUNTIME = HAS_QUACK and importlib.util.find_spec("quack.gemm_runtime") is not None
# Head dim, heads of q and k, heads of v, interleaved pairs, inputs.
TOWERS = [
    (80, 32, 16, False, 1280),
    (72, 32, 16, False, 1152),
    (72, 24, 12, True, 1536),
    (64, 32, 16, True, 1024),
    (64, 24, 12, False, 768),
    (88, 4, 2, False, 256),
    (96, 6, 3, False, 288),
    (112, 3, 2, True, 224),
    (128, 24, 12, False, 1536),
    # Grouped queries: 12 and 4 heads, 4 of v.
    (80, 16, 4, False, 1280),
]

pytestmark = pytest.mark.usefixtures("nan_empty")
hopper = pytest.mark.skipif(
    not (HAS_HOPPER and HAS_RUNTIME), reason="needs a Hopper GPU and QuACK 0.6"
)


@pytest.mark.parametrize(
    ("head_dim", "heads", "tile"),
    [
        (80, 32, 160),
        (80, 3, 80),
        (72, 32, 144),
        # 72 columns are no multiple of 16.
        (72, 3, 0),
        (64, 32, 128),
        (64, 24, 192),
        (96, 32, 192),
        (112, 32, 112),
        (120, 32, 0),
        (128, 32, 128),
        (256, 32, 0),
    ],
)
def test_a_tile_is_whole_heads(head_dim, heads, tile):
    """All of a tile's columns are turned, or none."""
    found = Heads(head_dim, heads, False).tile
    assert found == tile
    assert tile == 0 or heads * head_dim % tile == 0


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype", "heads", "table", "expected"),
    [
        (3840, 1280, torch.bfloat16, Heads(80, 32, False), torch.float32, True),
        (3840, 1280, torch.float16, Heads(80, 32, True), torch.bfloat16, True),
        (3840, 1280, torch.float32, Heads(80, 32, False), torch.float32, False),
        (3840, 1276, torch.bfloat16, Heads(80, 32, False), torch.float32, False),
        (3840, 1280, torch.bfloat16, Heads(120, 16, False), torch.float32, False),
        (3840, 1280, torch.bfloat16, Heads(80, 32, False), torch.float64, False),
        (228, 64, torch.bfloat16, Heads(76, 2, False), torch.float32, False),
    ],
)
def test_which_projections_fit(outputs, inputs, dtype, heads, table, expected):
    weight = torch.empty(outputs, inputs, dtype=dtype)
    bias = torch.empty(outputs, dtype=dtype)
    assert fits(weight, None, heads, table) is expected
    assert fits(weight, bias, heads, table) is expected
    assert not fits(weight, bias.double(), heads, table)


def test_which_tables_are_read():
    doubled = torch.zeros(8, 80)
    assert reads(doubled) and reads(doubled[:, :40])
    assert not reads(doubled[:, 1:41])
    assert not reads(torch.zeros(8, 41)[:, :40])
    assert not reads(torch.zeros(40, 8).t())
    assert reads(torch.zeros(8, 40, dtype=torch.bfloat16)[:, 2:])


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_what_it_computes(is_interleaved):
    """Pairs are complex numbers that are turned, and stay where they are."""
    heads = Heads(8, 3, is_interleaved)
    qkv, angles = torch.randn(5, 32), torch.rand(5, 4)
    found = turned(qkv, angles.cos(), angles.sin(), heads).view(5, 4, 8)
    pairs = qkv.view(5, 4, 8)
    pairs = pairs.unflatten(2, (4, 2) if is_interleaved else (2, 4))
    if not is_interleaved:
        pairs = pairs.transpose(2, 3)
    numbers = torch.view_as_complex(pairs.contiguous())
    numbers[:, :3] *= torch.polar(torch.ones(5, 4), angles)[:, None]
    expected = torch.view_as_real(numbers)
    if not is_interleaved:
        expected = expected.transpose(2, 3)
    assert torch.allclose(found, expected.flatten(2), atol=1e-6)
    assert torch.equal(found[:, 3], qkv.view(5, 4, 8)[:, 3])


def test_scores_are_those_of_the_rotary_pass():
    """It leaves interleaved pairs in their places, which q and k share."""
    heads = Heads(8, 2, True)
    qkv, angles = torch.randn(5, 24), torch.rand(5, 4)
    q, k, _ = turned(qkv, angles.cos(), angles.sin(), heads).view(5, 3, 8).unbind(1)
    plain = qkv.view(5, 3, 8).split(1, dim=1)
    expected = rope_ref(*plain[:2], angles.cos(), angles.sin(), True)
    scores = expected[0][:, 0] @ expected[1][:, 0].t()
    assert torch.allclose(q @ k.t(), scores, atol=1e-5)


def test_a_kernel_that_cannot_be_had(monkeypatch):
    def fail(*args):
        raise ImportError("no such QuACK")

    monkeypatch.setattr(quack_turn, "compiled", fail)
    weight = torch.zeros(96, 64, dtype=torch.bfloat16)
    reason = build(weight, None, Heads(16, 4, False), torch.float32)
    assert reason == "ImportError: no such QuACK"


def test_wrong_results_are_refused(monkeypatch):
    heads = Heads(16, 4, False)
    weight = torch.randn(96, 64, dtype=torch.bfloat16)

    def stand_in(kernel, x, cos, sin, out):
        return lambda layer: out.copy_(
            kernel(turned(linear(x, layer.weight), cos, sin, heads))
        )

    monkeypatch.setattr(quack_turn, "prepare", stand_in)
    for kernel, reason in ((torch.clone, None), (torch.neg, "its results are wrong")):
        monkeypatch.setattr(quack_turn, "compiled", lambda *args, k=kernel: k)
        assert build(weight, None, heads, torch.float32) == reason


def make(rows, tower, *, dtype, table, has_bias=True, seed=0):
    """x as a norm returns it, weight, bias, cosines and sines, and the heads."""
    head_dim, both, values, is_interleaved, inputs = tower
    random = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, device="cuda")

    outputs = (both + values) * head_dim
    angles = 50 * torch.rand(rows, head_dim // 2, generator=random, device="cuda")
    return (
        normal(rows, inputs).to(dtype),
        (normal(outputs, inputs) / inputs**0.5).to(dtype),
        normal(outputs).to(dtype) if has_bias else None,
        angles.cos().to(table),
        angles.sin().to(table),
        Heads(head_dim, both, is_interleaved),
    )


def run(x, weight, bias, cos, sin, heads):
    out = x.new_empty(len(x), len(weight))
    kernel = compiled(weight, bias, heads, cos.dtype)
    prepare(kernel, x, cos, sin, out)(views(weight, bias))
    return out


def exact(x, weight, bias, cos, sin, heads):
    bias = None if bias is None else bias.double()
    sums = linear(x.double(), weight.double(), bias)
    by_head = sums.unflatten(1, (-1, heads.head_dim))
    both, v = by_head.tensor_split([heads.turned], dim=1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    if heads.is_interleaved:
        first, second = both[..., ::2], both[..., 1::2]
        pairs = [first * c - second * s, second * c + first * s]
        both = torch.stack(pairs, dim=-1).flatten(2)
    else:
        first, second = both.chunk(2, dim=-1)
        both = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
    return torch.cat([both, v], dim=1).flatten(1)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 1000, 4097])
@pytest.mark.parametrize("tower", TOWERS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "table", "has_bias"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float16, torch.float32, False),
        (torch.float16, torch.float16, True),
    ],
    ids=str,
)
def test_it_is_more_exact_than_two_passes(tower, rows, dtype, table, has_bias):
    inputs = make(rows, tower, dtype=dtype, table=table, has_bias=has_bias)
    x, weight, bias, cos, sin, heads = inputs
    assert fits(weight, bias, heads, table)
    out, expected = run(*inputs), exact(*inputs)
    assert not out.isnan().any()
    apart = turned(linear(x, weight, bias), cos, sin, heads)
    assert relative_error(out, expected) <= 1.02 * relative_error(apart, expected)
    assert build(weight, bias, heads, table) is None


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("tower", TOWERS[:4], ids=str)
def test_tables_may_have_gaps(tower):
    """Halves of doubled tables, as models hand them over."""
    inputs = make(1100, tower, dtype=torch.bfloat16, table=torch.bfloat16)
    x, weight, bias, cos, sin, heads = inputs
    doubled = [torch.cat([t, t], dim=1)[:, : t.shape[1]] for t in (cos, sin)]
    assert not doubled[0].is_contiguous() and reads(doubled[0])
    found = run(x, weight, bias, *doubled, heads)
    assert torch.equal(found, run(*inputs))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("tower", TOWERS[:4], ids=str)
def test_one_call_serves_all_layers_in_a_graph(tower):
    first, second = (
        make(1024, tower, dtype=torch.bfloat16, table=torch.float32, seed=seed)
        for seed in range(2)
    )
    x, weight, bias, cos, sin, heads = (
        held.clone() if isinstance(held, torch.Tensor) else held for held in first
    )
    out = x.new_empty(len(x), len(weight))
    call = prepare(compiled(weight, bias, heads, cos.dtype), x, cos, sin, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(views(weight, bias))
    for inputs in (first, second, first):
        for held, new in zip((x, weight, bias, cos, sin), inputs, strict=False):
            held.copy_(new)
        graph.replay()
        assert torch.equal(out, run(*inputs))
    call(views(second[1], second[2]))
    assert torch.equal(out, run(x, second[1], second[2], cos, sin, heads))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("tower", TOWERS[:4], ids=str)
def test_rows_stay_apart(tower):
    inputs = make(1300, tower, dtype=torch.bfloat16, table=torch.float32)
    x, weight, bias, cos, sin, heads = inputs
    before = run(*inputs)
    assert torch.equal(before, run(*inputs))
    x[1000] = cos[1001] = float("nan")
    after = run(*inputs)
    both = heads.turned * heads.head_dim
    assert after[1000].isnan().all() and after[1001, :both].isnan().all()
    assert torch.equal(after[1001, both:], before[1001, both:])
    for some in (slice(0, 1000), slice(1002, None)):
        assert torch.equal(after[some], before[some])


@hopper
@pytest.mark.gpu
def test_rows_before_and_after_are_left():
    """Rows of a longer buffer, and an x with columns beside it."""
    inputs = make(1500, TOWERS[1], dtype=torch.bfloat16, table=torch.float32)
    x, weight, bias, cos, sin, heads = inputs
    wide = torch.cat([x, x], dim=1)[:, : x.shape[1]]
    out = x.new_zeros(2000, len(weight))
    kernel = compiled(weight, bias, heads, cos.dtype)
    prepare(kernel, wide, cos, sin, out[:1500])(views(weight, bias))
    assert torch.equal(out[:1500], run(*inputs))
    assert (out[1500:] == 0).all()


@hopper
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tower", TOWERS[:3], ids=str)
def test_more_than_int32_elements(tower):
    head_dim, both, values, *_ = tower
    rows = 2**31 // ((both + values) * head_dim) + 64
    inputs = make(rows, tower, dtype=torch.bfloat16, table=torch.bfloat16)
    x, weight, bias, cos, sin, heads = inputs
    out = run(*inputs)
    assert out.numel() > 2**31
    for some in (slice(0, 64), slice(-64, None)):
        expected = exact(x[some], weight, bias, cos[some], sin[some], heads)
        assert relative_error(out[some], expected) < 4e-3


@pytest.mark.skipif(not HAS_RUNTIME, reason="needs QuACK 0.6")
def test_what_quack_finds_kernels_by(monkeypatch):
    """Its folder must not hand out what another source or other heads compiled to."""
    from quack.gemm_runtime import host

    keys = []

    def note(*args, **kwargs):
        keys.append(repr((args, kwargs)))
        raise RuntimeError("compiled")

    monkeypatch.setenv("QUACK_ARCH", "sm_90")
    monkeypatch.setattr(host, "_compile_gemm_epi", note)
    weight, bias = torch.zeros(96, 64).bfloat16(), torch.zeros(96).bfloat16()
    for revision, interleaved, turns, table, has_bias in itertools.product(
        ("a", "b"), (False, True), (2, 4), (torch.float32, torch.bfloat16), (0, 1)
    ):
        monkeypatch.setattr(quack_turn, "_revision", lambda now=revision: now)
        heads = Heads(16, turns, interleaved)
        with pytest.raises(RuntimeError, match="compiled"):
            compiled(weight, bias if has_bias else None, heads, table)
    assert len(keys) == len(set(keys)) == 32

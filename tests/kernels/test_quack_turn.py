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
    Layer,
    Projection,
    Tile,
    build,
    compiled,
    fits,
    prepare,
    project,
    reads,
    tile_for,
    turned,
)
from vllm_flashinfer_vit.kernels.rope_ref import rope_ref

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
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
    tiles = Heads(head_dim, heads, False).tiles(BF16)
    assert {found.columns for found in tiles} == ({tile} if tile else set())
    assert tile == 0 or heads * head_dim % tile == 0


@pytest.mark.parametrize(
    ("rows", "outputs", "expected"),
    [
        # Two waves of the smaller one, and of the larger one.
        (1024, 3072, 128),
        (2048, 4608, 192),
        (4096, 3072, 192),
        (16384, 3072, 192),
    ],
)
def test_the_tile_of_which_waves_take_less(rows, outputs, expected):
    """As measured on an H100."""
    tiles = Heads(128, 24, False).tiles(BF16)
    assert [tile.rows for tile in tiles] == [192, 128]
    assert tile_for(tiles, rows, outputs, 132).rows == expected
    for one, dtype in ((80, BF16), (128, FP8)):
        (only,) = Heads(one, 32, False).tiles(dtype)
        assert tile_for((only,), rows, outputs, 132) is only


H80 = Heads(80, 32, False)


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype", "heads", "table", "expected"),
    [
        (3840, 1280, torch.bfloat16, H80, torch.float32, True),
        (3840, 1280, torch.float16, H80._replace(is_interleaved=True), BF16, True),
        (3840, 1280, torch.float32, H80, torch.float32, False),
        (3840, 1276, torch.bfloat16, H80, torch.float32, False),
        (3840, 1288, torch.bfloat16, H80, torch.float32, True),
        (3840, 1280, torch.bfloat16, Heads(120, 16, False), torch.float32, False),
        (3840, 1280, torch.bfloat16, H80, torch.float64, False),
        (228, 64, torch.bfloat16, Heads(76, 2, False), torch.float32, False),
    ],
)
def test_which_projections_fit(outputs, inputs, dtype, heads, table, expected):
    weight = torch.empty(outputs, inputs, dtype=dtype)
    bias = torch.empty(outputs, dtype=dtype)
    assert fits(Layer(weight, None), heads, table, dtype) is expected
    assert fits(Layer(weight, bias), heads, table, dtype) is expected
    assert not fits(Layer(weight, bias.double()), heads, table, dtype)
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    assert not fits(Layer(weight, None), heads, table, other)
    # Of single bytes, twice as many are a whole load.
    quantized = Layer(weight.to(FP8), bias, torch.ones(1), torch.ones(outputs))
    whole = expected and inputs % 16 == 0
    assert fits(quantized, heads, table, dtype) is whole


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


def make_layer(kind, weight, bias, rows):
    """A layer's parameters of a kind of scales, and what makes rows of its dtype."""
    if kind == "plain":
        return Layer(weight, bias)
    # Of vLLM's layers: one scale of all, one of each row, one of each row and output.
    row_scales, col_scales = {
        "tensor": (1, 1),
        "tokens": (rows, 1),
        "rows": (rows, len(weight)),
    }[kind]
    on = {"device": weight.device}
    return Layer(
        (weight.float() * 30).clamp(-400, 400).to(FP8),
        bias,
        torch.linspace(0.01, 0.03, row_scales, **on),
        torch.linspace(0.5, 2, col_scales, **on),
    )


def test_a_kernel_that_cannot_be_had(monkeypatch):
    def fail(*args):
        raise ImportError("no such QuACK")

    monkeypatch.setattr(quack_turn, "compiled", fail)
    layer = Layer(torch.zeros(96, 64, dtype=BF16), None)
    reason = build(layer, Heads(16, 4, False), torch.float32, BF16)
    assert reason == "ImportError: no such QuACK"


@pytest.mark.parametrize("kind", ["plain", "tensor", "tokens", "rows"])
def test_wrong_results_are_refused(monkeypatch, kind):
    heads = Heads(16, 4, False)
    weight = torch.randn(96, 64, dtype=BF16)
    layer = make_layer(kind, weight, weight[:, 0].contiguous(), 16)

    def stand_in(kernel, x, cos, sin, out):
        return lambda given: out.copy_(
            kernel(turned(project(x, given), cos, sin, heads))
        )

    monkeypatch.setattr(quack_turn, "prepare", stand_in)
    wrong = "its results with tiles of 128 rows are wrong"
    for kernel, reason in ((torch.clone, None), (torch.neg, wrong)):
        monkeypatch.setattr(quack_turn, "compiled", lambda *args, k=kernel: k)
        assert build(layer, heads, torch.float32, BF16) == reason


def test_a_projection_holds_no_layer(monkeypatch):
    """A weight that is loaded at another address must not stay in memory."""
    made = []
    monkeypatch.setattr(quack_turn, "compiled", lambda *args: made.append(args[4]))
    layer = Layer(torch.zeros(768, 64, dtype=BF16), torch.zeros(768, dtype=BF16))
    heads = Heads(128, 4, False)
    found = Projection(layer, heads, torch.float32, BF16, 8, 132)
    assert made == [Tile(192, 128, (1, 2)), Tile(128, 128, (2, 1))]
    assert not any(isinstance(x, torch.Tensor) for x in vars(found).values())
    tables = torch.zeros(8, 64), torch.zeros(8, 64)
    assert found.turns(8, *tables)
    assert not found.turns(7, *(table[:7] for table in tables))
    assert not found.turns(9, *tables)
    assert not found.turns(8, tables[0], tables[1].half())
    again = Projection(layer, heads, torch.float32, BF16, 8, 132)
    other = Projection(layer._replace(bias=None), heads, torch.float32, BF16, 8, 132)
    assert found.alike == again.alike != other.alike


def make(rows, tower, *, dtype, table, has_bias=True, seed=0, kind="plain"):
    """x as a norm returns it, a layer, cosines and sines, and the heads."""
    head_dim, both, values, is_interleaved, inputs = tower
    random = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, device="cuda")

    outputs = (both + values) * head_dim
    angles = 50 * torch.rand(rows, head_dim // 2, generator=random, device="cuda")
    x = normal(rows, inputs).to(dtype)
    weight = (normal(outputs, inputs) / inputs**0.5).to(dtype)
    bias = normal(outputs).to(dtype) if has_bias else None
    layer = make_layer(kind, weight, bias, rows)
    if kind != "plain":
        x = (20 * x).clamp(-400, 400).to(FP8)
    heads = Heads(head_dim, both, is_interleaved)
    return x, layer, angles.cos().to(table), angles.sin().to(table), heads


def run(x, layer, cos, sin, heads, dtype=None, tile=None):
    dtype = dtype or x.dtype
    out = x.new_empty(len(x), len(layer.weight), dtype=dtype)
    tile = tile or heads.tiles(layer.weight.dtype)[0]
    kernel = compiled(layer, heads, cos.dtype, dtype, tile)
    prepare(kernel, x, cos, sin, out)(layer)
    return out


def exact(x, layer, cos, sin, heads):
    sums = linear(x.double(), layer.weight.double())
    if layer.row_scales is not None:
        sums *= layer.row_scales.double()[:, None]
        sums *= layer.col_scales.double()
    if layer.bias is not None:
        sums += layer.bias.double()
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
    x, layer, cos, sin, heads = inputs
    assert fits(layer, heads, table, dtype)
    assert build(layer, heads, table, dtype) is None
    expected = exact(*inputs)
    apart = turned(linear(x, layer.weight, layer.bias), cos, sin, heads)
    error = relative_error(apart, expected)
    for tile in heads.tiles(layer.weight.dtype):
        out = run(*inputs, tile=tile)
        assert not out.isnan().any()
        assert relative_error(out, expected) <= 1.02 * error


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 1000, 4097])
@pytest.mark.parametrize("tower", TOWERS, ids=str)
@pytest.mark.parametrize("kind", ["tensor", "tokens", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_in_fp8(tower, rows, kind, dtype):
    """As exact as vLLM's GEMM with a pass that turns: its sums have as few bits."""
    from vllm_flashinfer_vit.kernels.scaled_mm import cutlass_op

    inputs = make(rows, tower, dtype=dtype, table=torch.float32, kind=kind)
    x, layer, cos, sin, heads = inputs
    assert fits(layer, heads, torch.float32, dtype)
    assert build(layer, heads, torch.float32, dtype) is None
    plain = x.new_empty(rows, len(layer.weight), dtype=dtype)
    scales = layer.row_scales[:, None], layer.col_scales[None]
    cutlass_op()(plain, x, layer.weight.t(), *scales, layer.bias)
    expected = exact(*inputs)
    error = relative_error(turned(plain, cos, sin, heads), expected)
    for tile in heads.tiles(layer.weight.dtype):
        out = run(*inputs, dtype, tile)
        assert not out.isnan().any()
        assert relative_error(out, expected) <= 1.05 * error


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("tower", TOWERS[:4], ids=str)
def test_tables_may_have_gaps(tower):
    """Halves of doubled tables, as models hand them over."""
    inputs = make(1100, tower, dtype=torch.bfloat16, table=torch.bfloat16)
    x, layer, cos, sin, heads = inputs
    doubled = [torch.cat([t, t], dim=1)[:, : t.shape[1]] for t in (cos, sin)]
    assert not doubled[0].is_contiguous() and reads(doubled[0])
    assert torch.equal(run(x, layer, *doubled, heads), run(*inputs))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "tokens"])
@pytest.mark.parametrize("tower", TOWERS[:4], ids=str)
def test_one_call_serves_all_layers_in_a_graph(tower, kind):
    on = {"dtype": torch.bfloat16, "table": torch.float32, "kind": kind}
    first, second = (make(1024, tower, **on, seed=seed) for seed in range(2))
    x, layer, cos, sin, heads = first
    layer = Layer(*(None if held is None else held.clone() for held in layer))
    x, cos, sin = x.clone(), cos.clone(), sin.clone()
    out = x.new_empty(len(x), len(layer.weight), dtype=torch.bfloat16)
    kernels = Projection(layer, heads, cos.dtype, out.dtype, 1, 132)
    call = kernels.prepare(x, cos, sin, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(layer)
    for inputs in (first, second, first):
        new = inputs[0], *inputs[1], *inputs[2:4]
        for held, values in zip((x, *layer, cos, sin), new, strict=True):
            if held is not None:
                held.copy_(values)
        graph.replay()
        assert torch.equal(out, run(*inputs, out.dtype))
    call(second[1])
    assert torch.equal(out, run(x, second[1], cos, sin, heads, out.dtype))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("tower", [*TOWERS[:4], TOWERS[8]], ids=str)
def test_rows_stay_apart(tower):
    inputs = make(1300, tower, dtype=torch.bfloat16, table=torch.float32)
    x, _, cos, _, heads = inputs
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
    x, layer, cos, sin, heads = inputs
    wide = torch.cat([x, x], dim=1)[:, : x.shape[1]]
    out = x.new_zeros(2000, len(layer.weight))
    kernel = compiled(layer, heads, cos.dtype, x.dtype, heads.tiles(x.dtype)[0])
    prepare(kernel, wide, cos, sin, out[:1500])(layer)
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
    x, layer, cos, sin, heads = inputs
    out = run(*inputs)
    assert out.numel() > 2**31
    for some in (slice(0, 64), slice(-64, None)):
        expected = exact(x[some], layer, cos[some], sin[some], heads)
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
    weight, bias = torch.zeros(768, 64).bfloat16(), torch.zeros(768).bfloat16()
    layers = [
        make_layer(kind, weight, added, 9)
        for kind in ("plain", "tokens")
        for added in (bias, None)
    ]
    for revision, interleaved, turns, table, layer in itertools.product(
        ("a", "b"), (False, True), (2, 4), (torch.float32, BF16), layers
    ):
        monkeypatch.setattr(quack_turn, "_revision", lambda now=revision: now)
        heads = Heads(128, turns, interleaved)
        for tile in heads.tiles(layer.weight.dtype):
            with pytest.raises(RuntimeError, match="compiled"):
                compiled(layer, heads, table, BF16, tile)
    assert len(keys) == len(set(keys)) == 96

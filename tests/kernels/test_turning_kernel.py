# SPDX-License-Identifier: Apache-2.0
"""What a QKV projection that turns q and k returns on a Hopper GPU."""

import pytest
import torch
from _turning_gemm import FP8, TOWERS, hopper, make_layer
from torch.nn.functional import linear

from cases import relative_error
from vllm_flashinfer_vit.gemms.epilogue_gemm import Layer
from vllm_flashinfer_vit.gemms.turning_gemm import (
    Heads,
    Kernels,
    build,
    compiled,
    fits,
    prepare,
    reads,
    turned,
)

pytestmark = pytest.mark.usefixtures("nan_empty")


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
    heads = Heads(head_dim, both - values, values, is_interleaved)
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
    from vllm_flashinfer_vit.gemms.scaled_mm import cutlass_op

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
    kernels = Kernels(layer, heads, cos.dtype, out.dtype, 1, 132)
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

# SPDX-License-Identifier: Apache-2.0
"""What an MLP's first layer with its activation writes on a Hopper GPU."""

import pytest
import torch
from _activating_gemm import BF16, TOWERS, act_of
from _turning_gemm import hopper, make_layer
from torch.nn.functional import gelu, linear, silu

from cases import relative_error
from vllm_flashinfer_vit.gemms.activating_gemm import (
    build,
    compiled,
    fits,
    prepare,
)
from vllm_flashinfer_vit.gemms.epilogue_gemm import FP8
from vllm_flashinfer_vit.kernels.formats import E4M3_MAX

pytestmark = pytest.mark.usefixtures("nan_empty")

GATED = [tower for tower in TOWERS if tower[0] == "swiglu"]


def make(rows, tower, *, kind="tokens", has_bias=True, seed=0):
    """x in e4m3 and a layer of a tower, with padding of zeros."""
    _, inputs, outputs, padded, _ = tower
    random = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, device="cuda")

    weight = torch.zeros(padded, inputs, device="cuda")
    weight[:outputs] = normal(outputs, inputs) / inputs**0.5
    # `make_layer`'s scales of rows and columns are 0.02 and 1 in the mean.
    bias = normal(outputs).to(BF16) if has_bias else None
    layer = make_layer(kind, weight.to(BF16), bias, rows)
    x = (50 * normal(rows, inputs)).clamp(-400, 400).to(FP8)
    return x, layer._replace(row_scales=layer.row_scales / 30)


def exact(x, layer, act):
    sums = linear(x.double(), layer.weight.double())
    sums *= layer.row_scales.double()[:, None] * layer.col_scales.double()
    sums = sums[:, : act.outputs]
    if layer.bias is not None:
        sums += layer.bias.double()
    if act.is_gated:
        gate, up = sums.chunk(2, dim=1)
        return silu(gate) * up
    if act.activation == "quick_gelu":
        return sums * torch.sigmoid(1.702 * sums)
    return gelu(sums, approximate="tanh" if act.activation == "tanh_gelu" else "none")


def scales_of(expected, rows):
    """Scales of rows: that of each one's largest value, and one for all."""
    largest = expected.abs().amax(1).float() / E4M3_MAX
    return largest if rows > 1 else largest.amax()[None]


def run(x, layer, act, scales=None, out=None):
    if out is None:
        out = x.new_zeros(len(x), act.columns, dtype=act.dtype)
    call = prepare(compiled(layer, act), x, out, layer, act)
    call(layer, scales)
    return out


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 1000, 4097])
@pytest.mark.parametrize("tower", TOWERS, ids=str)
@pytest.mark.parametrize("kind", ["tensor", "tokens", "rows"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_it_is_as_exact_as_two_passes(tower, rows, kind, has_bias):
    from vllm_flashinfer_vit.gemms.scaled_mm import cutlass_op
    from vllm_flashinfer_vit.kernels.act_quantize import act_quantize

    act = act_of(tower)
    x, layer = make(rows, tower, kind=kind, has_bias=has_bias)
    assert fits(layer, act, BF16)
    assert build(layer, act) is None
    expected = exact(x, layer, act)
    scales = scales_of(expected, rows)
    found = run(x, layer, act, scales)
    assert not found.float().isnan().any()
    values = x.new_empty(rows, len(layer.weight), dtype=BF16)
    row_scales = layer.row_scales[:, None].expand(rows, 1).contiguous()
    col_scales = layer.col_scales.expand(len(layer.weight)).contiguous()[None]
    cutlass_op()(values, x, layer.weight.t(), row_scales, col_scales, None)
    apart = torch.empty_like(found)
    own = scales[:, None].expand(rows, 1).contiguous()
    act_quantize(values, act.width, layer.bias, act.activation, apart, own)
    errors = [
        relative_error(rows8[:, : act.width].float() * by, expected)
        for rows8, by in ((found, scales[:, None]), (apart, own))
    ]
    assert errors[0] <= 1.02 * errors[1]
    assert (found[:, -(-act.width // 8) * 8 :].float() == 0).all()


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 1000, 4097])
@pytest.mark.parametrize("tower", GATED, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_swiglu_in_16_bits(tower, rows, dtype):
    from vllm_flashinfer_vit.gemms.scaled_mm import cutlass_op

    act = act_of(tower, dtype)
    x, layer = make(rows, tower)
    layer = layer._replace(bias=layer.bias.to(dtype))
    assert fits(layer, act, dtype)
    assert build(layer, act) is None
    found = run(x, layer, act)
    assert not found[:, : act.width].isnan().any()
    expected = exact(x, layer, act)
    # Its sums have as few bits as vLLM's GEMM has, which are then rounded once more.
    values = x.new_empty(rows, len(layer.weight), dtype=dtype)
    scales = layer.row_scales[:, None].contiguous(), layer.col_scales[None]
    cutlass_op()(values, x, layer.weight.t(), *scales, None)
    gate, up = (values[:, : act.outputs].double() + layer.bias).chunk(2, dim=1)
    error = relative_error((silu(gate) * up).to(dtype), expected)
    assert relative_error(found[:, : act.width], expected) <= 1.02 * error


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("tower", [TOWERS[1], TOWERS[4]], ids=str)
def test_what_is_beyond_the_range_ends_there(tower):
    act = act_of(tower)
    x, layer = make(300, tower)
    expected = exact(x, layer, act)
    scales = scales_of(expected, 300) / 4
    found = run(x, layer, act, scales)[:, : act.width].float() * scales[:, None]
    right = expected.clamp(-E4M3_MAX * scales[:, None], E4M3_MAX * scales[:, None])
    assert relative_error(found, right) < 0.04
    # One for all rows.
    one = scales.amax()[None]
    for_all, for_each = (run(x, layer, act, by) for by in (one, one.repeat(300)))
    assert torch.equal(for_all.view(torch.uint8), for_each.view(torch.uint8))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("tower", [TOWERS[0], TOWERS[1], TOWERS[4]], ids=str)
def test_one_call_serves_all_layers_in_a_graph(tower):
    act = act_of(tower)
    first, second = (make(1024, tower, seed=seed) for seed in range(2))
    x, layer = first[0].clone(), type(first[1])(*(x.clone() for x in first[1]))
    scales = scales_of(exact(*first, act), 1024)
    out = x.new_zeros(len(x), act.columns)
    call = prepare(compiled(layer, act), x, out, layer, act)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(layer, scales)
    for inputs in (first, second, first):
        new = inputs[0], *inputs[1]
        for held, values in zip((x, *layer), new, strict=True):
            held.copy_(values)
        graph.replay()
        assert torch.equal(out, run(*inputs, act, scales))
    call(second[1], scales)
    assert torch.equal(out, run(x, second[1], act, scales))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("tower", [TOWERS[1], TOWERS[4]], ids=str)
def test_rows_stay_apart(tower):
    act = act_of(tower)
    x, layer = make(1300, tower)
    scales = scales_of(exact(x, layer, act), 1300)
    before = run(x, layer, act, scales)
    again = run(x, layer, act, scales)
    assert torch.equal(before.view(torch.uint8), again.view(torch.uint8))
    x[1000] = float("nan")
    after = run(x, layer, act, scales)
    assert after[1000, : act.width].float().isnan().all()
    for some in (slice(0, 1000), slice(1001, None)):
        found, expected = (x[some].view(torch.uint8) for x in (after, before))
        assert torch.equal(found, expected)


@hopper
@pytest.mark.gpu
def test_other_columns_and_rows_are_left():
    tower = TOWERS[1]
    act = act_of(tower)
    x, layer = make(1500, tower)
    wide = torch.cat([x, x], dim=1)[:, : x.shape[1]]
    scales = scales_of(exact(x, layer, act), 1500)
    out = torch.full((2000, act.columns), 7.0, device="cuda").to(FP8)
    run(wide, layer, act, scales, out[:1500])
    width = len(layer.weight)
    assert torch.equal(out[:1500, :width], run(x, layer, act, scales)[:, :width])
    assert (out[1500:].float() == 7).all() and (out[:, width:].float() == 7).all()


@hopper
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tower", [TOWERS[0], TOWERS[4]], ids=str)
def test_more_than_int32_elements(tower):
    act = act_of(tower)
    rows = 2**31 // act.columns + 64
    x, layer = make(rows, tower, kind="tensor")
    scales = torch.full((1,), 0.02, device="cuda")
    out = run(x, layer, act, scales)
    assert out.numel() > 2**31
    for some in (slice(0, 64), slice(-64, None)):
        expected = exact(x[some], layer, act)
        found = out[some, : act.width].float() * scales
        assert relative_error(found, expected) < 0.04

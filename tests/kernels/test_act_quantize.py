# SPDX-License-Identifier: Apache-2.0
"""One kernel adds a bias, applies an activation and quantises rows to e4m3."""

import pytest
import torch
from _rows import DEVICE, LEAST, assert_quantized, distance, row_scales
from torch.nn.functional import gelu, silu

from vllm_flashinfer_vit.kernels.act_quantize import (
    MAX_WIDTH,
    act_quantize,
    parts_of,
    prepare,
)
from vllm_flashinfer_vit.kernels.act_quantize_ref import act_ref
from vllm_flashinfer_vit.kernels.row_scales_ref import quantize_rows_ref

ACTIVATIONS = ("swiglu", "quick_gelu", "tanh_gelu", "gelu", None)
# Triton's interpreter truncates when it converts to bf16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# Of Qwen2.5-VL, whose rows vLLM pads to 3424, of Qwen3-VL, what fills no part, and
# rows whose second part has no values.
WIDTHS = [(3420, 3424), (4304, 4304), (44, 48), (64, 64), (1, 16), (16, 24)]
SCALES = pytest.mark.parametrize("given", [None, 0.01], ids=["own", "one"])
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(params=ACTIVATIONS, ids=str)
def activation(request):
    return request.param


def make_inputs(
    rows, width, padded, activation, dtype=torch.float16, has_bias=True, seed=0
):
    """A GEMM's output with columns of NaN after those that count, a bias, and rows."""
    columns = width * (2 if activation == "swiglu" else 1)
    generator = torch.Generator().manual_seed(seed)
    values = torch.full((rows, columns + 24), float("nan"))
    values[:, :columns] = 2 * torch.randn(rows, columns, generator=generator)
    bias = torch.randn(columns, generator=generator).to(DEVICE, dtype)
    quantized = torch.full((rows, padded), float("nan")).to(torch.float8_e4m3fn)
    values = values.to(DEVICE, dtype)
    return values, bias if has_bias else None, quantized.to(DEVICE)


def exactly(values, width, bias, activation):
    columns = width * (2 if activation == "swiglu" else 1)
    x = values[:, :columns].double()
    if bias is not None:
        x = x + bias.double()
    if activation is None:
        return x
    if activation == "swiglu":
        gate, up = x.chunk(2, -1)
        return silu(gate) * up
    if activation == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return gelu(x, approximate="tanh" if activation == "tanh_gelu" else "none")


@SCALES
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "padded"), WIDTHS)
def test_act_quantize(width, padded, dtype, activation, has_bias, given):
    values, bias, rows = make_inputs(5, width, padded, activation, dtype, has_bias)
    scales = row_scales(5, given)
    act_quantize(values, width, bias, activation, rows, scales)
    exact = exactly(values, width, bias, activation)
    assert_quantized(rows, scales, exact, 16 * EPS)


@SCALES
def test_the_reference_is_as_exact(activation, given):
    values, bias, rows = make_inputs(5, 44, 48, activation)
    scales, expected_scales = row_scales(5, given), row_scales(5, given)
    act_quantize(values, 44, bias, activation, rows, scales)
    expected = torch.empty_like(rows)
    found = act_ref(values, 44, bias, activation)
    quantize_rows_ref(found, expected, expected_scales)
    assert_quantized(expected, expected_scales, found.double(), 0.0)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0)
    off = distance(rows.float(), expected.float())
    assert (off <= expected.float().abs() / 8 + LEAST).all()


def test_rows_of_any_stride(activation):
    values, bias, rows = make_inputs(6, 44, 48, activation)
    apart = values.repeat(1, 2)[::2]
    scales = row_scales(3, None)
    act_quantize(apart, 44, bias, activation, rows[:3], scales)
    expected, expected_scales = rows[3:], row_scales(3, None)
    act_quantize(values[::2].clone(), 44, bias, activation, expected, expected_scales)
    assert torch.equal(rows[:3].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_rows_stay_apart(activation):
    values, bias, rows = make_inputs(4, 44, 48, activation)
    scales = row_scales(4, None)
    act_quantize(values, 44, bias, activation, rows, scales)
    before = rows.view(torch.uint8).clone(), scales.clone()
    values[1, 3], values[2, 3] = float("nan"), float("inf")
    act_quantize(values, 44, bias, activation, rows, scales)
    for new, old in zip((rows.view(torch.uint8), scales), before, strict=True):
        assert torch.equal(new[::3], old[::3])
    if DEVICE == "cuda":
        # The interpreter has no NaN in e4m3.
        assert rows[1].isnan().any()
        assert rows[2].isnan().any()


def test_zeros_and_outliers(activation):
    values, _, rows = make_inputs(2, 44, 48, activation, torch.float32)
    values[0] = 0
    values[1, 5] = 3e4
    if activation == "swiglu":
        values[1, 5 + 44] = 2e3
    scales = row_scales(2, None)
    act_quantize(values, 44, None, activation, rows, scales)
    assert_quantized(rows, scales, exactly(values, 44, None, activation), 16 * EPS)
    assert not rows[0].float().any()
    assert rows[1, 5].float() == 448


def test_no_rows_are_no_error(activation):
    values, bias, rows = make_inputs(0, 44, 48, activation)
    act_quantize(values, 44, bias, activation, rows, row_scales(0, None))


@SCALES
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_settled_call(activation, has_bias, given):
    values, bias, rows = make_inputs(5, 44, 48, activation, has_bias=has_bias)
    call = prepare(values, 44, bias, activation, rows, row_scales(5, given))
    for seed in (1, 2):
        new, bias, _ = make_inputs(5, 44, 48, activation, has_bias=has_bias, seed=seed)
        values.copy_(new)
        # Another layer's.
        scales = row_scales(5, given and given * seed)
        call(bias, scales)
        expected, expected_scales = torch.empty_like(rows), scales.clone()
        act_quantize(values, 44, bias, activation, expected, expected_scales)
        assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scales, expected_scales)


def test_what_it_cannot_read():
    values, bias, rows = make_inputs(4, 64, 64, "swiglu")
    scales = row_scales(4, None)
    for changes, message in [
        ({"values": values[:, :127]}, r"\[T, 128 or more\]"),
        ({"values": values.t().contiguous().t()}, "contiguous columns"),
        ({"bias": bias[:64]}, r"bias must be \[128\]"),
        ({"bias": bias.repeat(2)[::2]}, "bias must be"),
        ({"rows": rows[:3]}, r"rows must be \[4, 64 to"),
        ({"rows": rows[:, :63]}, "rows must be"),
        ({"rows": rows.float()}, "rows must be e4m3"),
        ({"scales": scales[:3]}, r"one or \[4, 1\]"),
        ({"scales": scales.double()}, "fp32"),
        ({"scales": scales.flatten()}, r"one or \[4, 1\]"),
    ]:
        given = {"values": values, "bias": bias, "rows": rows, "scales": scales}
        given |= changes
        with pytest.raises(ValueError, match=message):
            act_quantize(**given, width=64, activation="swiglu")
    wide = torch.zeros(1, MAX_WIDTH + 1, device=DEVICE)
    with pytest.raises(ValueError, match=f"to {MAX_WIDTH}"):
        act_quantize(
            wide, wide.shape[1], None, "quick_gelu", wide.to(rows.dtype), scales[:1]
        )


def test_parts_hold_a_row_and_little_more():
    for columns in range(1, MAX_WIDTH + 1):
        parts = parts_of(columns)
        assert 1 <= len(parts) <= 3
        assert columns <= sum(parts) <= 1.15 * columns
        assert all(part > 0 and part & (part - 1) == 0 for part in parts)
    assert parts_of(4304) == [4096, 256]
    assert parts_of(3424) == [2048, 1024, 512]


@pytest.mark.gpu
@SCALES
def test_in_a_graph(activation, given):
    values, bias, rows = make_inputs(300, 3420, 3424, activation, torch.bfloat16)
    scales = row_scales(300, given)
    act_quantize(values, 3420, bias, activation, rows, scales)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare(values, 3420, bias, activation, rows, scales)(bias, scales)
    for seed in (1, 2):
        new, *_ = make_inputs(300, 3420, 3424, activation, torch.bfloat16, seed=seed)
        values.copy_(new)
        graph.replay()
        expected, expected_scales = torch.empty_like(rows), scales.clone()
        act_quantize(values, 3420, bias, activation, expected, expected_scales)
        assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scales, expected_scales)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_int32_elements():
    rows = 2**31 // 6848 + 64
    values = torch.ones(rows, 6848, dtype=torch.bfloat16, device="cuda")
    quantized = torch.empty(rows, 3424, dtype=torch.float8_e4m3fn, device="cuda")
    assert values.numel() > 2**31
    values[-1] = torch.linspace(-3, 3, 6848)
    scales = row_scales(rows, None)
    act_quantize(values, 3420, None, "swiglu", quantized, scales)
    exact = exactly(values[-2:], 3420, None, "swiglu")
    assert_quantized(quantized[-2:], scales[-2:], exact, 16 * EPS)

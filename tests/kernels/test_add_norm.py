# SPDX-License-Identifier: Apache-2.0
"""One kernel adds and normalizes as an addition and a LayerNorm do."""

import pytest
import torch
from torch.nn.functional import layer_norm

from cases import relative_error
from vllm_flashinfer_vit.kernels.add_norm import MAX_WIDTH, add_layer_norm
from vllm_flashinfer_vit.reference.add_norm import add_layer_norm_ref

pytestmark = pytest.mark.usefixtures("nan_empty")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter truncates when it converts to bf16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# Qwen3-VL's small and large towers, Qwen2-VL's, and what fills no block.
WIDTHS = [1024, 1152, 1280, 64, 100, 1]
EPS = 1e-6


def make_inputs(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0):
    """x with a massive activation and an offset, as residual streams have them, a
    branch, and a LayerNorm's weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + 3
    x[..., 0] *= 100
    branch = torch.randn(shape, generator=generator)
    weight = 1 + 0.1 * torch.randn(shape[-1], generator=generator)
    bias = 0.1 * torch.randn(shape[-1], generator=generator)
    return [tensor.to(DEVICE, dtype) for tensor in (x, branch, weight, bias)]


def assert_exact(inputs: list[torch.Tensor]) -> None:
    x, branch, weight, bias = inputs
    total, normed = add_layer_norm(*inputs, EPS)
    assert torch.equal(total, x + branch)
    assert (normed.dtype, normed.shape) == (x.dtype, x.shape)
    exact = layer_norm(
        total.double(), weight.shape, weight.double(), bias.double(), EPS
    )
    # Half a unit for the one rounding, of the norm itself in fp32.
    unit = torch.finfo(x.dtype).eps
    slack = 8 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert ((normed.double() - exact).abs() <= unit / 2 * exact.abs() + slack).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_layer_norm(width, dtype):
    assert_exact(make_inputs(7, 1, width, dtype=dtype))


def test_add_layer_norm_ref():
    inputs = make_inputs(5, 1152)
    for out, expected in zip(
        add_layer_norm(*inputs, EPS), add_layer_norm_ref(*inputs, EPS), strict=True
    ):
        assert relative_error(out, expected) < 1e-5


def test_add_layer_norm_of_fp32_parameters():
    x, branch, weight, bias = make_inputs(3, 1280)
    assert_exact([x, branch, weight.float(), bias.float()])


def test_add_layer_norm_of_equal_values():
    x = torch.full((2, 1152), 5.0, dtype=torch.float16, device=DEVICE)
    weight, bias = make_inputs(2, 1152)[2:]
    total, normed = add_layer_norm(x, x, weight, bias, EPS)
    assert torch.equal(total, 2 * x)
    assert torch.equal(normed, bias.expand(2, -1))


def test_add_layer_norm_keeps_rows_apart():
    inputs = make_inputs(4, 1152)
    before = add_layer_norm(*inputs, EPS)
    inputs[0][1] = float("nan")
    inputs[1][2] = float("inf")
    for new, old in zip(add_layer_norm(*inputs, EPS), before, strict=True):
        assert torch.equal(new[::3], old[::3])
    assert add_layer_norm(*inputs, EPS)[1][1].isnan().all()


def test_add_layer_norm_of_nothing():
    total, normed = add_layer_norm(*make_inputs(0, 1, 1152), EPS)
    assert total.shape == normed.shape == (0, 1, 1152)


def test_add_layer_norm_rejects_what_it_cannot_read():
    x, branch, weight, bias = make_inputs(4, 64)
    for bad, message in [
        ((x, branch[:3], weight, bias), "one shape and dtype"),
        ((x, branch.double(), weight, bias), "one shape and dtype"),
        ((x, branch, weight[:63], bias), r"must be \[64\]"),
        ((x, branch, weight, bias[:63]), r"must be \[64\]"),
        ((x.T.contiguous().T, branch, weight, bias), "contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            add_layer_norm(*bad, EPS)
    with pytest.raises(ValueError, match=f"1 to {MAX_WIDTH} values"):
        add_layer_norm(*make_inputs(1, MAX_WIDTH + 1), EPS)


@pytest.mark.gpu
def test_add_layer_norm_in_a_graph():
    inputs = make_inputs(300, 1, 1152, dtype=torch.bfloat16)
    add_layer_norm(*inputs, EPS)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = add_layer_norm(*inputs, EPS)
    new = make_inputs(300, 1, 1152, dtype=torch.bfloat16, seed=1)
    for held, values in zip(inputs, new, strict=True):
        held.copy_(values)
    graph.replay()
    for out, expected in zip(outs, add_layer_norm(*new, EPS), strict=True):
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.slow
def test_add_layer_norm_of_more_than_int32_elements():
    rows = 2**31 // 1152 + 64
    x = torch.ones(rows, 1152, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    x[-1] = torch.arange(1152)
    weight, bias = make_inputs(1, 1152, dtype=torch.bfloat16)[2:]
    total, normed = add_layer_norm(x, x, weight, bias, EPS)
    expected = add_layer_norm_ref(x[-64:], x[-64:], weight, bias, EPS)
    assert torch.equal(total[-64:], expected[0])
    assert relative_error(normed[-64:], expected[1]) < 4e-3
    assert torch.equal(normed[:64], bias.expand(64, -1))

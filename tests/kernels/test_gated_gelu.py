# SPDX-License-Identifier: Apache-2.0
"""One kernel multiplies the GELU of one layer's output by another's."""

import pytest
import torch

from vllm_flashinfer_vit.kernels.gated_gelu import gated_gelu
from vllm_flashinfer_vit.kernels.gated_gelu_ref import gated_gelu_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter truncates when it converts to bf16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def make_inputs(rows, width, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = 4 * torch.randn(2, rows, width, generator=generator)
    gate, up = drawn.to(DEVICE, dtype)
    return gate, up


def exact_of(gate, up):
    return torch.nn.functional.gelu(gate.double(), approximate="tanh") * up.double()


@pytest.mark.parametrize("call", [gated_gelu, gated_gelu_ref])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(5, 3072), (3, 4304), (1, 1), (0, 64)])
def test_gated_gelu(rows, width, dtype, call):
    gate, up = make_inputs(rows, width, dtype)
    exact = exact_of(gate, up)
    found = call(gate, up)
    assert found.data_ptr() == gate.data_ptr() and found.dtype == dtype
    # Of a product of two factors, each of which can be near 0.
    slack = 2e-6 * (1 + up.double().abs())
    unit = torch.finfo(dtype).eps
    smallest = torch.finfo(dtype).smallest_normal * unit
    bound = unit / 2 * exact.abs() + slack + smallest
    assert ((found.double() - exact).abs() <= bound).all()


def test_rows_of_any_stride():
    gate, up = make_inputs(6, 1500)
    expected = gated_gelu(gate.clone(), up)
    both = torch.cat([gate, up], dim=1)
    found = gated_gelu(*both.split(1500, dim=1))
    assert torch.equal(found, expected)
    assert torch.equal(both[:, 1500:], up)


def test_large_values():
    gate = torch.tensor([[-3e4, -50.0, 0.0, 50.0, 3e4]], device=DEVICE)
    found = gated_gelu(gate.clone(), torch.full_like(gate, 2.0))
    expected = torch.tensor([[0.0, 0.0, 0.0, 100.0, 6e4]], device=DEVICE)
    assert torch.equal(found.abs(), expected)


def test_the_same_bits_twice():
    gate, up = make_inputs(33, 1152)
    assert torch.equal(gated_gelu(gate.clone(), up), gated_gelu(gate.clone(), up))


@pytest.mark.parametrize("call", [gated_gelu, gated_gelu_ref])
def test_what_does_not_fit(call):
    gate, up = make_inputs(4, 64)
    for given in [(gate, up[:3]), (gate, up.float()), (gate[0], up[0])]:
        with pytest.raises(ValueError, match="one dtype"):
            call(*given)


def test_what_the_kernel_cannot_read():
    gate, up = make_inputs(4, 64)
    with pytest.raises(ValueError, match="columns must be contiguous"):
        gated_gelu(gate.T.contiguous().T, up)


@pytest.mark.gpu
def test_in_a_graph():
    gate, up = make_inputs(300, 4304, torch.bfloat16)
    gated_gelu(gate, up)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gated_gelu(gate, up)
    for seed in (1, 1, 2):
        new = make_inputs(300, 4304, torch.bfloat16, seed)
        gate.copy_(new[0])
        up.copy_(new[1])
        graph.replay()
        assert torch.equal(gate, gated_gelu(*new))


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_int32_elements():
    rows = 2**31 // 4304 + 64
    gate, up = make_inputs(64, 4304, torch.bfloat16)
    large = [torch.zeros(rows, 4304, dtype=up.dtype, device=DEVICE) for _ in range(2)]
    for place, small in zip(large, (gate, up), strict=True):
        place[-64:] = small
    assert large[0].numel() > 2**31
    found = gated_gelu(*large)
    assert torch.equal(found[-64:], gated_gelu(gate, up))
    assert not found[:-64].any()

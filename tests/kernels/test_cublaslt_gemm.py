# SPDX-License-Identifier: Apache-2.0
"""Settled GEMMs have the bits of PyTorch's own call of cuBLASLt.

test_cublaslt.py has what needs no GPU.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from vllm_flashinfer_vit.blocks.linear import BlockWeights, LtGemm, Weights
from vllm_flashinfer_vit.gemms import cublaslt
from vllm_flashinfer_vit.gemms.cublaslt import Problems

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.usefixtures("nan_empty"),
]

# Outputs and inputs: the projections and MLPs of Qwen2-VL, Qwen2.5-VL (padded) and
# Qwen3-VL.
SIZES = [
    (3840, 1280),
    (1280, 1280),
    (5120, 1280),
    (1280, 5120),
    (6912, 1280),
    (1280, 3456),
    (3456, 1152),
    (1152, 1152),
    (4304, 1152),
    (1152, 4304),
]
ROWS = [1, 7, 64, 256, 400, 1024, 4096, 8000]
DTYPES = [torch.bfloat16, torch.float16]


class Given(NamedTuple):
    """A layer's parameters, and how settled GEMMs take them."""

    weight: torch.Tensor
    bias: torch.Tensor
    lt: cublaslt.Layer


def make_layer(outputs: int, inputs: int, dtype, gelu: bool, seed: int = 0) -> Given:
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    weight, bias = random(outputs, inputs) * inputs**-0.5, random(outputs)
    return Given(weight, bias, cublaslt.Layer(weight, bias, gelu))


def make_x(rows: int, inputs: int, dtype, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, inputs, generator=generator, device="cuda").to(dtype)


def pytorchs(x: torch.Tensor, layer: Given, gelu: bool) -> torch.Tensor:
    if gelu:
        return torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
    return torch.addmm(layer.bias, x, layer.weight.t())


def settle(
    x: torch.Tensor, layer: Given, problems: Problems | None = None
) -> tuple[Callable[[cublaslt.Layer], None], torch.Tensor]:
    out = x.new_empty(len(x), len(layer.weight))
    problems = problems or Problems()
    call = problems.prepare(x, layer.lt, out)
    return call, out


def test_it_is_there() -> None:
    assert cublaslt.is_available()


@pytest.mark.parametrize("gelu", [False, True], ids=["bias", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_the_bits_are_pytorchs(outputs, inputs, dtype, gelu) -> None:
    layer = make_layer(outputs, inputs, dtype, gelu)
    problems = Problems()
    differing = []
    for rows in ROWS:
        x = make_x(rows, inputs, dtype)
        call, out = settle(x, layer, problems)
        call(layer.lt)
        if not torch.equal(out, pytorchs(x, layer, gelu)):
            differing.append(rows)
    assert not differing


@pytest.mark.parametrize("gelu", [False, True], ids=["bias", "gelu"])
def test_one_settled_call_serves_two_layers(gelu) -> None:
    layers = [make_layer(3456, 1152, torch.bfloat16, gelu, seed) for seed in (0, 1)]
    x = make_x(400, 1152, torch.bfloat16)
    call, out = settle(x, layers[0])
    for seed in (2, 3):
        x.copy_(make_x(400, 1152, torch.bfloat16, seed))
        for layer in layers:
            out.fill_(float("nan"))
            call(layer.lt)
            assert torch.equal(out, pytorchs(x, layer, gelu))


@pytest.mark.parametrize("gelu", [False, True], ids=["bias", "gelu"])
def test_in_a_graph(gelu) -> None:
    layers = [make_layer(4304, 1152, torch.bfloat16, gelu, seed) for seed in (0, 1)]
    x = make_x(1024, 1152, torch.bfloat16)
    problems = Problems()
    settle(x, layers[0], problems)[0](layers[0].lt)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call, out = settle(x, layers[0], problems)
        outs = []
        for layer in layers:
            call(layer.lt)
            outs.append(out.clone())
    del call
    for seed in (2, 3):
        x.copy_(make_x(1024, 1152, torch.bfloat16, seed))
        graph.replay()
        for layer, found in zip(layers, outs, strict=True):
            assert torch.equal(found, pytorchs(x, layer, gelu))


def test_on_a_side_stream() -> None:
    layer = make_layer(1280, 5120, torch.bfloat16, False)
    x = make_x(256, 5120, torch.bfloat16)
    new = make_x(256, 5120, torch.bfloat16, seed=2)
    problems = Problems()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        call, out = settle(x, layer, problems)
        # A launch on another stream would not wait for the new contents.
        torch.cuda._sleep(100_000_000)
        x.copy_(new)
        call(layer.lt)
    side.synchronize()
    assert torch.equal(out, pytorchs(new, layer, False))
    # Settled again on the first stream, with the algorithm that was found.
    call, out = settle(x, layer, problems)
    call(layer.lt)
    assert torch.equal(out, pytorchs(x, layer, False))
    assert len(problems._found) == 1


def test_weights_that_are_loaded_anew_or_moved() -> None:
    module = torch.nn.Linear(1152, 1152, device="cuda", dtype=torch.bfloat16)
    weights = BlockWeights()
    step = LtGemm(weights.add(Weights(module)), Problems())
    x = make_x(64, 1152, torch.bfloat16)
    out = x.new_empty(64, 1152)
    call = step.prepare(x, out)

    def assert_right() -> None:
        weights.refresh()
        call(step.layer)
        expected = torch.addmm(module.bias, x, module.weight.t())
        assert torch.equal(out, expected)

    with torch.no_grad():
        assert_right()
        first = step.layer
        module.weight.mul_(2)
        module.bias.add_(1)
        assert_right()
        assert step.layer is first
        module.weight.data = module.weight.detach() * 3
        assert_right()
        module.bias.data = module.bias.detach() + 2
        assert_right()
        assert step.layer is not first


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_on_a_second_device() -> None:
    for device in (0, 1):
        with torch.cuda.device(device):
            layer = make_layer(3456, 1152, torch.bfloat16, False)
            # Problems of one tower are on one device.
            x = make_x(400, 1152, torch.bfloat16)
            call, out = settle(x, layer)
            call(layer.lt)
            assert torch.equal(out, pytorchs(x, layer, False))
            assert out.device.index == device

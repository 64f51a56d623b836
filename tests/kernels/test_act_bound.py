# SPDX-License-Identifier: Apache-2.0
"""What bounds the outputs of first layers, on a GPU for e4m3."""

import pytest
import torch

from vllm_flashinfer_vit.blocks.act_bound import Bounds, factors_of, trial
from vllm_flashinfer_vit.gemms.epilogue_gemm import FP8, Layer

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
gpu = pytest.mark.skipif(not HAS_FP8, reason="needs a GPU for e4m3")
# Outputs, those with padding, inputs.
SIZES = [(4304, 4304, 1152), (5120, 5120, 1280), (2152, 2160, 1152), (1, 16, 16)]
BF16 = torch.bfloat16


def make(size, *, bias=BF16, num_scales=1, seed=0):
    outputs, padded, inputs = size
    random = torch.Generator("cuda").manual_seed(seed)
    weight = torch.zeros(padded, inputs, device="cuda")
    weight[:outputs] = 60 * torch.randn(
        outputs, inputs, generator=random, device="cuda"
    )
    scales = torch.rand(num_scales or padded, generator=random, device="cuda")
    added = None
    if bias is not None:
        added = torch.randn(outputs, generator=random, device="cuda").to(bias)
    return Layer(weight.clamp(-448, 448).to(FP8), added, scales, scales)


class Held:
    """A layer that may be another one later."""

    def __init__(self, layer):
        self.layer = layer

    @property
    def addresses(self):
        weight, bias, _, scales = self.layer
        added = 0 if bias is None else bias.data_ptr()
        return weight.data_ptr(), scales.data_ptr(), added

    def read(self):
        return self.layer


def compute(layers):
    """The factors of layers, by their places, and the tower's."""
    bounds = Bounds()
    for place, layer in enumerate(layers):
        bounds.add(place, Held(layer), 1)
    assert bounds.follow(1)
    return [bounds.factors(at) for at in range(len(layers))], bounds.prepare()


def assert_right(found, layer):
    torch.testing.assert_close(found, factors_of(layer), rtol=1e-5, atol=0)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("num_scales", [1, 0], ids=["one", "each"])
@pytest.mark.parametrize("bias", [None, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_factors(size, bias, num_scales):
    layers = [
        make(size, bias=bias, num_scales=num_scales, seed=seed) for seed in range(3)
    ]
    found, call = compute(layers)
    for _ in range(2):
        call()
        for now, layer in zip(found, layers, strict=True):
            assert_right(now, layer)
    assert len({one[0].item() for one in found}) == 3


@gpu
@pytest.mark.gpu
def test_layers_that_are_not_alike():
    layers = [make(SIZES[0]), make(SIZES[1], bias=None), make(SIZES[0], num_scales=0)]
    found, call = compute(layers)
    call()
    for now, layer in zip(found, layers, strict=True):
        assert_right(now, layer)


@gpu
@pytest.mark.gpu
def test_a_graph_reads_weights_where_and_as_they_are():
    layer, other = make(SIZES[0]), make(SIZES[0], seed=1)
    held = Layer(*(x.clone() for x in layer))
    bounds = Bounds()
    bounds.add(0, Held(held), 1)
    assert bounds.follow(1)
    bounds.prepare()()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # What is settled is for one stream.
        bounds.prepare()()
    for now in (layer, other, layer):
        for place, values in zip(held, now, strict=True):
            place.copy_(values)
        graph.replay()
        assert_right(bounds.factors(0), now)


@gpu
@pytest.mark.gpu
def test_layers_that_are_elsewhere():
    bounds, places = Bounds(), [Held(make(SIZES[0], seed=seed)) for seed in range(2)]
    for at, held in enumerate(places):
        bounds.add(at, held, 1)
    assert bounds.follow(1)
    call = bounds.prepare()
    places[1].layer = make(SIZES[0], seed=2)
    assert bounds.follow(1)
    call()
    for at, held in enumerate(places):
        assert_right(bounds.factors(at), held.layer)


@gpu
@pytest.mark.gpu
def test_a_capture_writes_no_table():
    bounds, held = Bounds(), Held(make(SIZES[0]))
    bounds.add(0, held, 1)
    for _ in range(2):
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
        with torch.cuda.graph(graph):
            x.add_(1)
            assert not bounds.follow(1)
        assert bounds.follow(1)
        held.layer = make(SIZES[0], seed=1)


@gpu
@pytest.mark.gpu
def test_a_trial():
    assert trial(Held(make(SIZES[0]))) is None

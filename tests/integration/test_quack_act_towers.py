# SPDX-License-Identifier: Apache-2.0
"""Towers in FP8 whose first layers run with their activation on a Hopper GPU.

Two blocks of known models, as wide as they are: eagerly and in CUDA graphs, at sizes
with and without it, beside the same tower without it and beside fp32.
"""

from collections.abc import Callable

import pytest
import torch
from _act_towers import GELUS, SECOND, firsts, larges, rebuild, seconds
from _blocks import without
from _fp8_layers import (
    GAIN,
    SCHEMES,
    InTiles,
    Kernel,
    layers_of,
    quantize_layer,
    weights_of,
)
from _models import noise
from _towers import true_tower

from cases import relative_error
from vllm_flashinfer_vit.blocks import fp8_methods
from vllm_flashinfer_vit.choices.clock import capture
from vllm_flashinfer_vit.gemms import epilogue_gemm
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = pytest.mark.gpu

# 1024 patches, several images whose last tile is not full, and a few.
SIZES = [[[1, 32, 32]], [[1, 24, 60], [1, 2, 2], [1, 32, 32]], [[1, 16, 10]]]
LARGE, SMALL = SIZES[1], SIZES[2]
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    if not epilogue_gemm.is_available():
        pytest.skip("needs a Hopper GPU and QuACK 0.6")
    # Tests' layers have kernels of a class of their own.
    monkeypatch.setattr(fp8_methods, "can_launch", lambda layer, kernel: True)


def build(family: str, scheme: str, *off: str) -> Tower:
    """Return a tower of the same weights each time, without what is `off`."""
    # Layers that vLLM builds for FP8 are not padded in 16 bits.
    with without("aligned", *off):
        tower = true_tower(family)
    with torch.device("cuda"):
        for name, layer in layers_of(tower):
            # The output shows what MLPs do, and attention has no scores like dice.
            layer.weight.data.mul_(GAIN if ".mlp." in name else 1)
            kernel = InTiles if SECOND.get(family, "none") in name else Kernel
            quantize_layer(layer, scheme, kernel)
        if scheme == "static" and family not in GELUS:
            # A product's values are as many times as large.
            for layer in seconds(tower):
                layer.input_scale.data.mul_(16)
        rebuild(tower)
    assert all(larges(tower)) is any(larges(tower)) is ("quack_act" not in off)
    return tower


def in_fp32(family: str, tower: Tower) -> Tower:
    """Return stock's tower with the weights that a quantised tower's stand for."""
    stock = true_tower(family, "TORCH_SDPA", torch.float32)
    given = dict(layers_of(tower))
    for name, layer in layers_of(stock):
        layer.weight.data.copy_(weights_of(given[name]))
    return stock


def encode(tower: Tower, grids: list[list[int]]) -> torch.Tensor:
    rows = sum(t * h * w for t, h, w in grids)
    return tower.encode(noise(rows, tower.spec.patch_dim), grids)


def grow(tower: Tower, by: float) -> None:
    """Make what activations get so many times as large, where graphs read weights."""
    for layer in firsts(tower):
        layer.weight_scale.data.mul_(by)
    by = by if tower.spec.family in GELUS else by * by
    for layer in seconds(tower):
        layer.weight_scale.data.div_(by)
        if layer.input_scale is not None:
            layer.input_scale.data.mul_(by)


class Graph:
    """A tower's CUDA graph for some grids, and its eager mode."""

    def __init__(self, tower: Tower, grids: list[list[int]]) -> None:
        rows = sum(t * h * w for t, h, w in grids)
        self.pixels = noise(rows, tower.spec.patch_dim).to(tower.device, tower.dtype)
        metadata = tower.visual.prepare_encoder_metadata(grids)

        def run() -> torch.Tensor:
            return tower.visual(self.pixels, None, encoder_metadata=dict(metadata))

        self.run: Callable[[], torch.Tensor] = run
        self.replay = capture(run)

    def check(self) -> torch.Tensor:
        """Compare both, bit for bit, and return the output."""
        found, expected = self.replay().clone(), self.run().clone()
        assert torch.equal(found, expected)
        assert torch.equal(self.replay(), found)
        return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
class TestTowers:
    def test_no_less_exact_than_in_a_pass_of_its_own(
        self, family: str, scheme: str, nan_empty: None
    ) -> None:
        tower, apart = build(family, scheme), build(family, scheme, "quack_act")
        exact = in_fp32(family, tower)
        for grids in (LARGE, SMALL, LARGE):
            found, expected = encode(tower, grids), encode(apart, grids)
            right = encode(exact, grids)
            error = relative_error(expected, right)
            assert relative_error(found, right) <= 1.03 * error < 0.15
            assert torch.equal(encode(tower, grids), found)
            if grids is SMALL:
                assert torch.equal(found, expected)
            else:
                assert not torch.equal(found, expected)

    def test_graphs_of_several_sizes_in_turns(
        self, family: str, scheme: str, nan_empty: None
    ) -> None:
        """Those of other sizes share the bounds' memory, and weights change."""
        tower = build(family, scheme)
        with tower.running(), torch.inference_mode():
            graphs = [Graph(tower, grids) for grids in SIZES]
            for by in (1.0, 32.0, 1 / 32):
                grow(tower, by)
                for gain in (1.0, -3.0):
                    for graph in (*graphs, graphs[0]):
                        graph.pixels.mul_(gain)
                        assert graph.check().isfinite().all()

    def test_weights_that_grow_are_bounded_anew(self, family: str, scheme: str) -> None:
        """Bounds of what they were would cut off what is 32 times as large."""
        tower, apart = build(family, scheme), build(family, scheme, "quack_act")
        before = encode(tower, LARGE)
        for one in (tower, apart):
            grow(one, 32.0)
        right = encode(in_fp32(family, tower), LARGE)
        found, expected = encode(tower, LARGE), encode(apart, LARGE)
        assert relative_error(found, before) > 0.01
        assert relative_error(found, right) <= 1.03 * relative_error(expected, right)

    def test_two_towers_in_turns(self, family: str, scheme: str) -> None:
        first, second = build(family, scheme), build(family, scheme)
        grow(second, 8.0)
        alone = [encode(tower, LARGE) for tower in (first, second)]
        for _ in range(2):
            for tower, expected in zip((first, second), alone, strict=True):
                assert torch.equal(encode(tower, LARGE), expected)

    def test_an_image_of_nan_stays_alone(self, family: str, scheme: str) -> None:
        """It is the first: FlashAttention reads on past the end of a sequence."""
        tower = build(family, scheme)
        rows = sum(t * h * w for t, h, w in LARGE)
        first = LARGE[0][1] * LARGE[0][2]
        pixels = noise(rows, tower.spec.patch_dim)
        right = tower.encode(pixels, LARGE)
        broken = pixels.clone()
        broken[:first] = float("nan")
        found = tower.encode(broken, LARGE)
        # Four patches make a token.
        others = slice(first // 4, None)
        assert torch.equal(found[others], right[others])
        assert found[: first // 4].isnan().all()
        assert torch.equal(tower.encode(pixels, LARGE), right)

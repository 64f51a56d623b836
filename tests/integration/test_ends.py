# SPDX-License-Identifier: Apache-2.0
"""What runs before and after the blocks: vLLM's bits, past the Python of its layers."""

from typing import Any

import pytest
import torch
from _blocks import SPECS, build, noted, other_method, outputs, without
from _models import noise
from _towers import cpu_only
from vllm import envs
from vllm.lora.layers import ColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA
from vllm.model_executor.layers.utils import default_unquantized_gemm

from vllm_flashinfer_vit.blocks import layers as block_layers
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = cpu_only


# GLM's merger is another one.
FAMILIES = [family for family in SPECS if family != "glm4v"]


@pytest.fixture(params=FAMILIES)
def tower(request: pytest.FixtureRequest) -> Tower:
    return build(request.param)


def ends(of: Tower) -> list[Any]:
    """The linear layers of the tower's mergers, and its projection of patches."""
    mergers = [m for name, m in of.visual.named_modules() if "merger" in name]
    layers = [m for m in mergers if hasattr(m, "quant_method")]
    assert len(layers) == (6 if of.spec.family == "qwen3_vl" else 2)
    return [*layers, of.visual.get_submodule("patch_embed.proj")]


def of_stock(tower: Tower) -> torch.Tensor:
    family = tower.spec.family
    with without(f"{family}-patch-embed", f"{family}-merger"):
        stock = build(family)
        with noted(ends(stock)) as seen:
            out = outputs(stock)
        assert len(set(seen)) == len(ends(stock))
    return out


@pytest.mark.usefixtures("direct")
def test_gives_the_same_bits_past_the_layers(tower: Tower) -> None:
    with noted(ends(tower)) as seen:
        out = outputs(tower)
    assert seen == []
    assert torch.equal(out, of_stock(tower))


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("place", [0, 1])
def test_layers_with_another_method_run_it(tower: Tower, place: int) -> None:
    layers = ends(tower)
    layers[place].quant_method = other_method(layers[place], "")
    with noted(layers) as seen:
        outputs(tower)
    assert seen == [0, 1]


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("place", [0, 1])
def test_adapters_are_run(
    tower: Tower, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM puts them around a merger's layers once the weights are loaded."""
    cls = (ColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA)[place]
    # Without what a request would bring.
    monkeypatch.setattr(cls, "forward", lambda adapter, x: adapter.base_layer(x))
    expected, layer = outputs(tower), ends(tower)[place]
    (path,) = (name for name, m in tower.visual.named_modules() if m is layer)
    with tower.running():
        adapter = cls(layer)
    tower.visual.set_submodule(path, adapter)
    with noted([adapter]) as seen:
        out = outputs(tower)
    assert seen == [0]
    assert torch.equal(out, expected)


def test_another_gemm_that_was_chosen_is_not_passed_by(tower: Tower) -> None:
    layer = ends(tower)[0]
    layer.quant_method._gemm_impl = default_unquantized_gemm
    assert block_layers._has_default_gemm(layer)
    layer.quant_method._gemm_impl = lambda *_: None
    assert not block_layers._has_default_gemm(layer)


@pytest.mark.usefixtures("direct")
def test_towers_of_other_backends_are_left_alone(tower: Tower) -> None:
    assert tower.spec.family
    other = build(tower.spec.family, backend="TORCH_SDPA")
    with noted(ends(other)) as seen:
        outputs(other)
    assert sorted(seen) == [*range(len(ends(other)))]


@pytest.mark.usefixtures("direct")
def test_batch_invariance_is_left_to_vllm(
    tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    invariant = build(tower.spec.family)
    with noted(ends(invariant)) as seen:
        outputs(invariant)
    assert len(seen) == len(ends(invariant))


@pytest.mark.usefixtures("direct")
def test_new_weights_are_read(tower: Tower) -> None:
    before = outputs(tower)
    for layer in ends(tower):
        layer.weight.data = layer.weight.data.clone() * 1.5
    after = outputs(tower)
    assert not torch.equal(before, after)
    assert not torch.isnan(after).any()


def test_on_a_cpu_mergers_run_vllms_own_layers(tower: Tower) -> None:
    layers = ends(tower)
    with noted(layers) as seen:
        outputs(tower)
    assert sorted(seen) == [*range(len(layers) - 1)]


def test_a_convolution_with_overlaps_is_left_to_vllm(tower: Tower) -> None:
    proj = tower.visual.get_submodule("patch_embed.proj")
    embed: Any = tower.visual.get_submodule("patch_embed")
    x = noise(8, tower.spec.patch_dim)
    expected = embed(x)
    proj.enable_linear = False
    with noted([proj]) as seen:
        out = embed(x)
    assert seen == [0]
    torch.testing.assert_close(out, expected)

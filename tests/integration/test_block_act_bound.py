# SPDX-License-Identifier: Apache-2.0
"""The bounds of activations: whose they are, and that they are of the weights now."""

import pytest
import torch
from _act_towers import (
    GELUS,
    MIN_ROWS,
    TOLERANCE,
    Calls,
    assert_as_exact,
    expected_factors,
    factors,
    firsts,
    larges,
    pretend_activating,
    rebuild,
    requantize,
    served_bf16,
)
from _blocks import (
    blocks,
    image,
    log_of,
    outputs,
    programs,
)
from _fp8_layers import (
    in_16_bits,
)
from _towers import cpu_only
from torch import nn

from cases import relative_error
from vllm_flashinfer_vit.blocks import act_bound, quack_act
from vllm_flashinfer_vit.blocks.act_bound import Bounds, factors_of
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = cpu_only


@pytest.fixture
def calls(fp8: None, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return pretend_activating(monkeypatch)


@pytest.mark.parametrize("family", GELUS)
def test_older_factors_would_cut_off(
    family: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test of weights that are loaded in place would show."""
    tower = served_bf16(family, "tensor")
    outputs(tower)
    for layer in firsts(tower):
        layer.weight_scale.data.mul_(64)
    exact = outputs(in_16_bits(family, tower))
    assert relative_error(outputs(tower), exact) < TOLERANCE["tensor"]
    monkeypatch.setattr(act_bound, "factors_of", lambda layer: factors_of(layer) / 64)
    assert relative_error(outputs(tower), exact) > 0.2


def test_each_block_has_factors_of_its_own(calls: Calls) -> None:
    tower = served_bf16("qwen2_vl", "channel")
    for place, layer in enumerate(firsts(tower)):
        layer.weight_scale.data.mul_(1 + place)
    outputs(tower)
    found = factors(tower)
    assert len({one.data_ptr() for one in found}) == len(blocks(tower)) == len(found)
    for layer, one in zip(firsts(tower), found, strict=True):
        assert torch.equal(one, expected_factors(layer))
    assert len({one[0].item() for one in found}) == len(found)


@pytest.mark.parametrize("name", ["weight", "weight_scale", "bias"])
@pytest.mark.parametrize("family", GELUS)
def test_a_parameter_that_is_another_tensor_bounds_at_once(
    family: str, name: str, calls: Calls
) -> None:
    """As trainers make it, which call nothing afterwards."""
    tower = served_bf16(family, "tensor")
    outputs(tower)
    for layer in firsts(tower):
        old = getattr(layer, name).detach()
        # Within the range of e4m3.
        new = (old.float() / 2).to(old.dtype)
        setattr(layer, name, nn.Parameter(new, requires_grad=False))
    outputs(tower)
    for layer, now in zip(firsts(tower), factors(tower), strict=True):
        assert torch.equal(now, expected_factors(layer))


@pytest.mark.parametrize("family", GELUS)
def test_a_bound_that_cannot_be_computed(
    family: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(act_bound, "trial", lambda layer: "no compiler")
    lines = log_of(quack_act, monkeypatch)
    assert not any(larges(served_bf16(family, "tensor")))
    assert any("applies that: no compiler" in line for line in lines)
    # Scales that are given need none.
    assert all(larges(served_bf16(family, "static")))


@pytest.mark.parametrize("family", GELUS)
def test_nothing_is_made_while_weights_are_loaded(family: str, calls: Calls) -> None:
    """What an engine makes then has no contents after it slept deeply."""
    tower = served_bf16(family, "tensor")
    bounds = programs(tower)[0]._tower.bounds
    assert bounds._memory is None
    outputs(tower)
    assert bounds._memory is not None


def move(tower: Tower) -> None:
    """Put the weights of all first layers elsewhere, larger ones."""
    for layer in firsts(tower):
        scale = 64 * layer.weight_scale.detach()
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)


@pytest.mark.parametrize("family", GELUS)
def test_all_layers_are_found_as_a_pass_begins(
    family: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small passes ask for no bounds, and old weights may be gone after them."""
    count: list[object] = []
    compute = Bounds._compute

    def noting(self: Bounds) -> None:
        # A trial has one layer.
        if len(self._layers) > 1:
            count.append([self._addresses[at] for at in self._layers])
        compute(self)

    monkeypatch.setattr(Bounds, "_compute", noting)
    tower = served_bf16(family, "tensor")
    outputs(tower)
    move(tower)
    image(tower, MIN_ROWS - 4)
    outputs(tower)
    now = [
        (one.weight.data_ptr(), one.weight_scale.data_ptr(), one.bias.data_ptr())
        for one in firsts(tower)
    ]
    # Once in each large pass, at once with what is where now.
    assert len(count) == 2 and count[1] == now
    assert_as_exact(outputs(tower), tower)


@pytest.mark.parametrize("family", GELUS)
def test_passes_in_and_out_of_inference_mode(family: str, calls: Calls) -> None:
    tower = served_bf16(family, "tensor")
    with torch.inference_mode():
        outputs(tower)
    move(tower)
    with torch.no_grad():
        found = outputs(tower)
    assert_as_exact(found, tower)


def test_a_block_that_needs_no_bound_any_more(calls: Calls) -> None:
    tower = served_bf16("qwen2_vl", "tensor")
    outputs(tower)
    bounds = programs(tower)[0]._tower.bounds
    assert set(bounds._layers) == set(range(len(programs(tower))))
    (group,) = bounds._groups.values()
    first, second = group.table.tolist()
    assert (first[-1], second[-1]) == (0, 1)
    requantize(tower, "block", "blocks.1.mlp.fc1")
    assert 1 not in bounds._layers and 0 in bounds._layers
    assert_as_exact(outputs(tower), tower)
    # A graph reads two entries of it, as before.
    assert group.table.tolist() == [first, first]


def test_tables_stay_where_graphs_read_them(calls: Calls) -> None:
    tower = served_bf16("qwen2_vl", "tensor")
    outputs(tower)
    bounds = programs(tower)[0]._tower.bounds
    (before,) = bounds._groups.values()
    memory = bounds._memory
    rebuild(tower)
    outputs(tower)
    (after,) = bounds._groups.values()
    assert after.table is before.table and bounds._memory is memory


@pytest.mark.parametrize("is_static_first", [False, True])
def test_layers_with_given_scales_need_no_bound(
    is_static_first: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound that fails is no reason to leave their kernel out, nor the other way."""
    monkeypatch.setattr(act_bound, "trial", lambda layer: "no compiler")
    tower = served_bf16("qwen2_vl", "tensor")
    place = 0 if is_static_first else 1
    requantize(tower, "static", f"blocks.{place}.mlp.fc2")
    # All are tried anew.
    programs(tower)[0]._tower.trials.clear()
    for one in programs(tower):
        one.build()
    assert [large is not None for large in larges(tower)[:2]] == [
        is_static_first,
        not is_static_first,
    ]


@pytest.mark.parametrize("family", GELUS)
def test_bounds_pay_from_more_rows_on(
    family: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller passes neither compute them nor run the kernel that needs them."""
    monkeypatch.setattr(quack_act, "MIN_ROWS", MIN_ROWS - 8)
    towers = [served_bf16(family, scheme) for scheme in ("tensor", "static")]
    calls.clear()
    needs_bound, static = (len(programs(tower)) for tower in towers)
    for tower in towers:
        image(tower, MIN_ROWS - 4)
    assert len(calls) == static
    assert programs(towers[0])[0]._tower.bounds._memory is None
    image(towers[0], MIN_ROWS)
    assert len(calls) == static + needs_bound


def test_a_ranks_part_of_a_layer_has_its_outputs_alone(calls: Calls) -> None:
    tower = served_bf16("qwen2_vl", "tensor")
    for layer in firsts(tower):
        # As where two ranks share it.
        layer.output_size = 2 * layer.output_size_per_partition
    rebuild(tower)
    found = larges(tower)
    assert all(found)
    assert [one.act.outputs for one in found if one] == [
        layer.output_size_per_partition for layer in firsts(tower)
    ]

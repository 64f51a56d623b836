# SPDX-License-Identifier: Apache-2.0
"""MLPs in FP8 whose first GEMM applies the activation: whose, and the results.

A plain stand-in computes on the CPU what QuACK's kernel computes on a Hopper GPU.
"""

from typing import Any

import pytest
import torch
from _act_towers import (
    BF16,
    GELUS,
    MIN_ROWS,
    ROWS,
    SECOND,
    TOLERANCE,
    Calls,
    apart,
    assert_as_exact,
    expected_factors,
    factors,
    firsts,
    larges,
    pretend_activating,
    rebuild,
    requantize,
    seconds,
    served_bf16,
)
from _blocks import (
    SPECS,
    allow_lora,
    build,
    image,
    log_of,
    outputs,
    programs,
)
from _fp8_layers import (
    SCHEMES,
    in_16_bits,
    layers_of,
    quantize_layer,
    served,
    weights_of,
)
from _models import noise
from _towers import cpu_only
from torch import nn

from cases import relative_error, values
from vllm_flashinfer_vit.blocks import quack_act
from vllm_flashinfer_vit.blocks.fp8_mlp import Fp8Mlp
from vllm_flashinfer_vit.gemms import activating_gemm, epilogue_gemm
from vllm_flashinfer_vit.gemms.epilogue_gemm import FP8
from vllm_flashinfer_vit.kernels import add_norm_ref
from vllm_flashinfer_vit.kernels.formats import Bound

pytestmark = cpu_only

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
MORE = tuple(name for name in SPECS if name not in FAMILIES)


@pytest.fixture
def calls(fp8: None, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return pretend_activating(monkeypatch)


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> list[Bound]:
    """The bounds that norms compute, in order."""
    seen: list[Bound] = []
    write = add_norm_ref.write_bound

    def noting(normed: torch.Tensor, bound: Bound) -> None:
        write(normed, bound)
        seen.append(Bound(bound.factors, bound.scales.clone()))

    monkeypatch.setattr(add_norm_ref, "write_bound", noting)
    return seen


@pytest.mark.parametrize("scheme", values(["tensor", "static"], ["channel"]))
@pytest.mark.parametrize("family", values(FAMILIES, MORE))
class TestActivating:
    def test_large_batches_get_it(
        self, family: str, scheme: str, calls: Calls, bounds: list[Bound]
    ) -> None:
        tower = served_bf16(family, scheme)
        # A trial and the kernel itself, for all blocks.
        act, again = calls.compiled
        assert again == act
        assert len(calls) == 1 and len(calls[0].out) == 16
        one = programs(tower)[0]
        assert "; from 200 rows on QuACK activates" in one.steps[one.spec.first]
        is_dynamic = scheme != "static"
        assert act.dtype == (BF16 if act.is_gated and is_dynamic else FP8)
        assert act.is_gated is (family not in GELUS)
        calls.clear()
        found = outputs(tower)
        count = len(programs(tower))
        assert [(call.act, len(call.out)) for call in calls] == count * [(act, ROWS)]
        # One settled call serves all blocks.
        assert len(calls.prepared) == 1 and not calls.compiled
        # No more bounds are computed than kernels need.
        has_bound = act.quantizes and is_dynamic
        assert len(bounds) == len(factors(tower)) == (count if has_bound else 0)
        for call, bound in zip(calls, bounds, strict=False):
            assert call.scales is not None
            assert torch.equal(call.scales, bound.scales.flatten())
        other = apart(family, scheme)
        calls.clear()
        bounds.clear()
        expected = outputs(other)
        assert not calls and not bounds and not any(larges(other))
        assert not torch.equal(found, expected)
        exact = outputs(in_16_bits(family, tower))
        assert relative_error(found, expected) < TOLERANCE[scheme]
        assert relative_error(found, exact) < TOLERANCE[scheme]
        errors = (relative_error(x, exact) for x in (found, expected))
        assert next(errors) < 1.1 * next(errors)

    def test_rows_decide(
        self, family: str, scheme: str, calls: Calls, bounds: list[Bound]
    ) -> None:
        tower, other = served_bf16(family, scheme), apart(family, scheme)
        for rows in (MIN_ROWS - 4, MIN_ROWS, MIN_ROWS - 4):
            calls.clear()
            bounds.clear()
            found, expected = image(tower, rows), image(other, rows)
            is_large = rows == MIN_ROWS
            assert len(calls) == is_large * len(programs(tower))
            has_bound = any(one and one.bounds for one in larges(tower))
            assert len(bounds) == is_large * has_bound * len(programs(tower))
            assert torch.equal(found, expected) is not is_large
            assert relative_error(found, expected) < TOLERANCE[scheme]

    def test_a_pass_that_is_kept(
        self, family: str, scheme: str, calls: Calls, bounds: list[Bound]
    ) -> None:
        """Its settled calls and buffers are used again, its scales are not."""
        tower, other = served_bf16(family, scheme), apart(family, scheme)
        calls.clear()
        places = set()
        for gain, shape in enumerate(([1, 16, 20], [1, 20, 16], [1, 16, 20]), 1):
            pixels = gain * noise(320, tower.spec.patch_dim)
            found = tower.encode(pixels, [shape])
            expected = other.encode(pixels, [shape])
            assert relative_error(found, expected) < TOLERANCE[scheme]
            places |= {call.out.data_ptr() for call in calls}
        assert len(calls) == 3 * len(programs(tower))
        assert len(calls.prepared) == len(places) == 1
        of_passes = {bound.scales.sum().item() for bound in bounds}
        assert len(of_passes) == len(bounds) == 3 * len(factors(tower))

    def test_memory_that_holds_nothing(
        self, family: str, scheme: str, calls: Calls, nan_empty: None
    ) -> None:
        tiled = SECOND.get(family, "no layer")
        tower = served_bf16(family, scheme, tiled=tiled)
        exact = outputs(in_16_bits(family, tower))
        calls.clear()
        for _ in range(2):
            assert relative_error(outputs(tower), exact) < TOLERANCE[scheme]
        (act,) = {call.act for call in calls}
        if act.quantizes and family in SECOND:
            assert (act.width, act.columns) == (44, 128)
        for call in calls:
            assert (call.out[:, act.width :].float() == 0).all()
            assert call.out[:, : act.width].float().isfinite().all()

    def test_weights_that_are_loaded_elsewhere(
        self, family: str, scheme: str, calls: Calls
    ) -> None:
        tower = served_bf16(family, scheme)
        before, held = outputs(tower), factors(tower)
        addresses = [one.data_ptr() for one in held]
        old = [one.clone() for one in held]
        for _, layer in layers_of(tower):
            layer.weight = nn.Parameter(-1.5 * weights_of(layer), requires_grad=False)
            if layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias + 1, requires_grad=False)
            quantize_layer(layer, scheme)
        calls.clear()
        found = outputs(tower)
        assert [one.data_ptr() for one in factors(tower)] == addresses
        for layer, now, then in zip(firsts(tower), held, old, strict=False):
            assert torch.equal(now, expected_factors(layer))
            assert not torch.equal(now, then)
        assert len(calls) == len(programs(tower))
        assert relative_error(found, before) > 0.5
        assert_as_exact(found, tower)

    def test_weights_that_are_loaded_in_place(
        self, family: str, scheme: str, calls: Calls
    ) -> None:
        """A graph reads the factors where they were; older ones would cut off."""
        tower = served_bf16(family, scheme)
        outputs(tower)
        held = factors(tower)
        addresses = [one.data_ptr() for one in held]
        gain = 64 if held else 4
        for layer in firsts(tower):
            layer.weight_scale.data.mul_(gain)
        for layer in seconds(tower):
            layer.weight_scale.data.div_(gain)
            if layer.input_scale is not None:
                layer.input_scale.data.mul_(gain)
        calls.clear()
        found = outputs(tower)
        assert [one.data_ptr() for one in factors(tower)] == addresses
        for layer, now in zip(firsts(tower), held, strict=False):
            assert torch.equal(now, expected_factors(layer))
        assert len(calls) == len(programs(tower))
        assert_as_exact(found, tower)


@pytest.mark.parametrize("family", SPECS)
def test_scales_that_are_given_are_read_where_the_layer_has_them(
    family: str, calls: Calls
) -> None:
    tower = served_bf16(family, "static")
    before = outputs(tower)
    for place, layer in enumerate(seconds(tower)):
        layer.input_scale.data.mul_(1 + place)
    calls.clear()
    in_place = outputs(tower)
    for call, layer in zip(calls, seconds(tower), strict=True):
        assert call.scales is not None
        assert torch.equal(call.scales, layer.input_scale.view(1))
    assert not torch.equal(before, in_place)
    for layer in seconds(tower):
        scale = layer.input_scale.data / 1000
        layer.input_scale = nn.Parameter(scale, requires_grad=False)
    calls.clear()
    found = outputs(tower)
    for call, layer in zip(calls, seconds(tower), strict=True):
        assert call.scales is not None
        assert torch.equal(call.scales, layer.input_scale.view(1))
    assert relative_error(found, before) > 0.1


@pytest.mark.parametrize("scheme", ["tensor", "static"])
@pytest.mark.parametrize("family", SPECS)
def test_sums_and_norms_by_kernels_of_their_own(
    family: str, scheme: str, calls: Calls
) -> None:
    tower = served_bf16(family, scheme, off=("add_norm",))
    calls.clear()
    found = outputs(tower)
    assert len(calls) == len(programs(tower))
    exact = outputs(in_16_bits(family, tower))
    assert relative_error(found, exact) < TOLERANCE[scheme]


@pytest.mark.parametrize(
    "left_out", values(["blocks.1."], ["blocks.0.", "blocks.0.mlp."])
)
@pytest.mark.parametrize("scheme", values(["tensor"], ["channel", "static"]))
@pytest.mark.parametrize("family", values(FAMILIES, MORE))
def test_blocks_that_are_not_all_in_fp8(
    family: str, scheme: str, left_out: str, calls: Calls, bounds: list[Bound]
) -> None:
    tower = served_bf16(family, scheme, left_out)
    place = int(left_out.split(".")[1])
    assert [large is None for large in larges(tower)] == [
        at == place for at in range(len(programs(tower)))
    ]
    exact = outputs(in_16_bits(family, tower))
    for _ in range(2):
        calls.clear()
        bounds.clear()
        found = outputs(tower)
        assert len(calls) == len(programs(tower)) - 1
        assert len(bounds) == len(factors(tower))
        assert relative_error(found, exact) < TOLERANCE[scheme]


@pytest.mark.parametrize("left_out", ["mlp.", "fc1", "fc2"])
def test_mlps_with_a_layer_in_16_bits(left_out: str, calls: Calls) -> None:
    tower = served_bf16("qwen3_vl", "channel", left_out)
    assert not any(larges(tower)) and not calls.compiled


@pytest.mark.parametrize("other", values(["tensor", "static"], ["channel"]))
@pytest.mark.parametrize("scheme", values(["tensor", "static"], ["channel"]))
@pytest.mark.parametrize("family", values(["qwen3_vl"], ["qwen2_5_vl"]))
def test_blocks_with_scales_of_several_kinds(
    family: str, scheme: str, other: str, calls: Calls
) -> None:
    tower = served_bf16(family, scheme)
    requantize(tower, other, "blocks.1.")
    assert all(larges(tower))
    exact = outputs(in_16_bits(family, tower))
    for _ in range(2):
        calls.clear()
        found = outputs(tower)
        assert len(calls) == len(programs(tower))
        assert relative_error(found, exact) < TOLERANCE["static"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", SECOND)
def test_blocks_may_differ_in_what_is_padded(
    family: str, scheme: str, calls: Calls, nan_empty: None
) -> None:
    tower = served_bf16(family, scheme, tiled=f"blocks.1.{SECOND[family]}")
    exact = outputs(in_16_bits(family, tower))
    for _ in range(2):
        calls.clear()
        assert relative_error(outputs(tower), exact) < TOLERANCE[scheme]
        assert len(calls) == len(programs(tower))


@pytest.mark.parametrize("family", values(FAMILIES, MORE))
class TestWhoGetsNone:
    def test_a_setting(self, family: str, calls: Calls) -> None:
        tower = apart(family, "tensor")
        assert not any(larges(tower)) and not calls.compiled
        assert all(isinstance(one._mlp, Fp8Mlp) for one in programs(tower))

    def test_without_quack(
        self, family: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(epilogue_gemm, "is_available", lambda: False)
        assert not any(larges(served_bf16(family, "tensor")))

    def test_adapters(
        self, family: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allow_lora(True, monkeypatch)
        assert not any(larges(served_bf16(family, "tensor")))
        assert not calls.compiled

    @pytest.mark.parametrize(
        ("dtype", "has_one"),
        [(torch.float32, False), (torch.float16, True), (BF16, True)],
        ids=str,
    )
    def test_other_dtypes(
        self, family: str, dtype: torch.dtype, has_one: bool, calls: Calls
    ) -> None:
        tower = served(family, "channel", dtype=dtype)
        assert all(larges(tower)) is any(larges(tower)) is has_one
        assert not outputs(tower).isnan().any()

    @pytest.mark.parametrize("name", ["first", "second"])
    def test_scales_of_blocks(self, family: str, name: str, calls: Calls) -> None:
        sizes = {"mlp_ratio": 2, "intermediate_size": 64, "out_hidden_size": 64}
        known = {key: value for key, value in sizes.items() if key in SPECS[family]}
        # Without padding, which such layers do not have.
        tower = served_bf16(family, "tensor", **known)
        assert all(larges(tower))
        requantize(tower, "block", getattr(programs(tower)[0].spec, name))
        kinds = {type(one._mlp) for one in programs(tower)}
        assert kinds == {Fp8Mlp} and not any(larges(tower))
        calls.clear()
        found = outputs(tower)
        assert not calls
        exact = outputs(in_16_bits(family, tower, **known))
        assert relative_error(found, exact) < 0.05

    @pytest.mark.parametrize("scheme", ["tensor", "static"])
    def test_results_that_are_wrong(
        self,
        family: str,
        scheme: str,
        calls: Calls,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        said = log_of(quack_act, monkeypatch)
        right = activating_gemm.prepare

        def prepare(kernel: Any, x: Any, out: torch.Tensor, *rest: Any) -> Any:
            launch = right(kernel, x, out, *rest)

            def negated(*given: Any) -> None:
                launch(*given)
                out.copy_(-out.float())

            return negated

        monkeypatch.setattr(activating_gemm, "prepare", prepare)
        tower = served_bf16(family, scheme)
        path = programs(tower)[0].spec.first
        assert len(set(said)) == 1 and path in said[0]
        assert "its results are wrong" in said[0]
        assert "QuACK" not in programs(tower)[0].steps[path]
        # It is tried once, for all blocks.
        assert len(calls) == len(calls.compiled) == 1
        calls.clear()
        found = outputs(tower)
        assert not calls and torch.equal(found, outputs(apart(family, scheme)))


def test_parts_of_a_row_that_are_not_numbers_stay_in_it(calls: Calls) -> None:
    """An image of NaN leaves others of its batch, and of the next one, as they are."""
    tower = served_bf16("qwen3_vl", "channel", tiled=SECOND["qwen3_vl"])
    grids = [[1, 12, 20], [1, 6, 4]]
    pixels = noise(ROWS, tower.spec.patch_dim)
    right = tower.encode(pixels, grids)
    broken = pixels.clone()
    broken[240:] = float("nan")
    found = tower.encode(broken, grids)
    assert torch.equal(found[:60], right[:60])
    assert found[60:].isnan().all()
    assert torch.equal(tower.encode(pixels, grids), right)


def test_a_tower_in_16_bits_has_none(calls: Calls) -> None:
    assert not any(larges(build("qwen2_vl", dtype=BF16)))
    assert not calls.compiled


@pytest.mark.parametrize("family", GELUS)
def test_second_layers_that_are_alike_read_rows_of_their_own(
    family: str, calls: Calls
) -> None:
    """Of two blocks, one has its activation in the GEMM, and one in a pass."""
    sizes = {"mlp_ratio": 2, "intermediate_size": 64}
    known = {key: value for key, value in sizes.items() if key in SPECS[family]}
    tower = served_bf16(family, "tensor", **known)
    first = programs(tower)[0].spec.first
    requantize(tower, "block", f"blocks.1.{first}")
    assert [large is None for large in larges(tower)[:2]] == [False, True]
    found = outputs(tower)
    assert relative_error(found, outputs(in_16_bits(family, tower, **known))) < 0.05


def test_layers_with_and_without_a_bias_have_kernels_of_their_own(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = served_bf16("qwen2_vl", "tensor")
    firsts(tower)[1].bias = None
    rebuild(tower)
    used: list[object] = []
    right = activating_gemm.prepare

    def prepare(kernel: Any, *rest: Any) -> Any:
        used.append(kernel)
        return right(rest[-1], *rest)

    monkeypatch.setattr(activating_gemm, "prepare", prepare)
    for large in larges(tower):
        assert large is not None
        large.kernel = object()  # type: ignore[assignment]
    outputs(tower)
    assert len(set(used)) == len(larges(tower))

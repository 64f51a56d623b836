# SPDX-License-Identifier: Apache-2.0
"""Towers whose first layers in FP8 run with their activation, by a plain stand-in."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from _blocks import (
    outputs,
    programs,
)
from _fp8_layers import (
    in_16_bits,
    layers_of,
    quantize_layer,
    served,
    weights_of,
)
from torch import nn

from cases import relative_error
from vllm_flashinfer_vit.blocks import quack_act
from vllm_flashinfer_vit.blocks.act_bound import factors_of
from vllm_flashinfer_vit.blocks.quack_act import QuackAct
from vllm_flashinfer_vit.gemms import activating_gemm, epilogue_gemm, turning_gemm
from vllm_flashinfer_vit.gemms.activating_gemm import Act
from vllm_flashinfer_vit.gemms.epilogue_gemm import Layer, project
from vllm_flashinfer_vit.kernels.act_quantize_ref import act_ref
from vllm_flashinfer_vit.kernels.formats import E4M3_MAX
from vllm_flashinfer_vit.towers.tower import Tower

BF16 = torch.bfloat16
# Patches in `outputs`, and the fewest that are many enough here.
ROWS, MIN_ROWS = 264, 200
# Their MLPs have a GELU, and the others' SwiGLU.
GELUS = ("qwen2_vl", "qwen3_vl")
# The second layers of those whose inputs are no whole tiles.
SECOND = {"qwen2_5_vl": "mlp.down_proj", "qwen3_vl": "mlp.linear_fc2"}
# Rows of e4m3 are off by 2 to 3 percent, of a scale for all by more.
TOLERANCE = {"tensor": 0.05, "channel": 0.05, "static": 0.08}


class Call(NamedTuple):
    """A launch of the stand-in: what it was for, its output, and scales of that."""

    act: Act
    out: torch.Tensor
    scales: torch.Tensor | None


class Calls(list[Call]):
    """Launches, and what was compiled and settled before."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[Act] = []
        self.prepared: list[Act] = []

    def clear(self) -> None:
        super().clear()
        self.compiled.clear()
        self.prepared.clear()


def pretend_activating(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Pretend that there is a Hopper GPU; collect what runs with its activation."""
    seen = Calls()

    def compiled(like: Layer, act: Act) -> Act:
        seen.compiled.append(act)
        return act

    def prepare(
        kernel: Act, x: torch.Tensor, out: torch.Tensor, like: Layer, act: Act
    ) -> Callable[[Layer, torch.Tensor | None], None]:
        assert kernel == act
        seen.prepared.append(act)
        written = act.written(out, len(like.weight))

        def launch(layer: Layer, out_scales: torch.Tensor | None) -> None:
            assert (out_scales is None) is not act.quantizes
            sums = project(x, layer)
            width = act.width if act.is_gated else sums.shape[1]
            found = act_ref(sums, width, None, act.activation)
            scales = None
            if out_scales is not None:
                scales = out_scales.clone()
                assert scales.shape in ((1,), (len(x),))
                found = (found / scales[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
            found = nn.functional.pad(found, (0, written.shape[1] - width))
            written.copy_(found.to(out.dtype))
            seen.append(Call(act, out, scales))

        return launch

    monkeypatch.setattr(epilogue_gemm, "is_available", lambda: True)
    monkeypatch.setattr(activating_gemm, "compiled", compiled)
    monkeypatch.setattr(activating_gemm, "prepare", prepare)
    # Projections that turn q and k have tests of their own.
    monkeypatch.setattr(turning_gemm, "fits", lambda *args: False)
    for name in ("MIN_ROWS", "MIN_ROWS_BOUNDED"):
        monkeypatch.setattr(quack_act, name, MIN_ROWS)
    return seen


def served_bf16(family: str, scheme: str, *args: Any, **kwargs: Any) -> Tower:
    return served(family, scheme, *args, dtype=BF16, **kwargs)


def apart(family: str, scheme: str, *args: Any, **kwargs: Any) -> Tower:
    """Return the same tower with the activation in a pass of its own."""
    return served_bf16(family, scheme, *args, off=("quack_act",), **kwargs)


def larges(tower: Tower) -> list[QuackAct | None]:
    """Return what runs first layers with their activation, by block."""
    return [getattr(one._mlp, "_large", None) for one in programs(tower)]


def factors(tower: Tower) -> list[torch.Tensor]:
    found = [large for large in larges(tower) if large is not None]
    return [one.bounds.factors(one.place) for one in found if one.bounds is not None]


def firsts(tower: Tower) -> list[Any]:
    """Return the MLPs' first layers, by block."""
    return [one._part(one.spec.first) for one in programs(tower)]


def seconds(tower: Tower) -> list[Any]:
    return [one._part(one.spec.second) for one in programs(tower)]


def expected_factors(layer: Any) -> torch.Tensor:
    """Return what a first layer's parameters make, read anew."""
    scale = layer.weight_scale.flatten()
    return factors_of(Layer(layer.weight.t(), layer.bias, None, scale))


def rebuild(tower: Tower) -> None:
    """Do what vLLM has done after it loaded weights."""
    for one in programs(tower):
        one.build()


def assert_as_exact(found: torch.Tensor, tower: Tower) -> None:
    """Compare with activations in passes of their own, which the tower keeps then."""
    for one in programs(tower):
        one._mlp._large = None  # type: ignore[union-attr]
        one._tower.forget()
    exact = outputs(in_16_bits(tower.spec.family or "", tower))
    expected = outputs(tower)
    assert not torch.equal(found, expected)
    assert relative_error(found, exact) < 1.1 * relative_error(expected, exact)


def requantize(tower: Tower, scheme: str, part: str) -> None:
    """Give layers with `part` in their names FP8 weights of another scheme."""
    for name, layer in layers_of(tower):
        if part in name:
            weight = weights_of(layer).to(BF16)
            layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
            quantize_layer(layer, scheme)
    rebuild(tower)

# SPDX-License-Identifier: Apache-2.0
"""Kernels that no profiling of vLLM runs are compiled as weights are loaded."""

from typing import Any

import pytest
import torch
from _act_towers import GELUS, MIN_ROWS, Calls, pretend_activating, served_bf16
from _blocks import SPECS, image, outputs
from _fp8_layers import SCHEMES
from _towers import cpu_only

from cases import values
from vllm_flashinfer_vit.blocks import fp8_linear, norms
from vllm_flashinfer_vit.kernels.formats import Bound

pytestmark = cpu_only

MORE = tuple(name for name in SPECS if name not in GELUS)


@pytest.fixture
def calls(fp8: None, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return pretend_activating(monkeypatch)


def likeness(argument: Any) -> object:
    """Return what a kernel is compiled for, of what it is settled for."""
    if isinstance(argument, torch.Tensor):
        is_one = argument.numel() == 1 and argument.dim() < 2
        return argument.dtype, "one" if is_one else argument.shape[-1]
    if isinstance(argument, Bound):
        return "a bound"
    if isinstance(argument, norms.Norm):
        return argument.eps, argument.is_layer_norm
    return tuple(map(likeness, argument)) if isinstance(argument, tuple) else argument


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> set[object]:
    """What Triton would have compiled."""
    seen: set[object] = set()

    def note(module: Any, name: str) -> None:
        settle = getattr(module, name)

        def noting(*args: Any) -> Any:
            seen.add((name, *map(likeness, args)))
            return settle(*args)

        monkeypatch.setattr(module, name, noting)

    note(norms, "prepare")
    note(fp8_linear, "prepare_rows")
    return seen


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", values(GELUS, MORE))
def test_small_passes_find_their_kernels(
    family: str, scheme: str, calls: Calls, settled: set[object]
) -> None:
    """Large ones, as vLLM's profiling is, run others."""
    tower = served_bf16(family, scheme)
    outputs(tower)
    assert calls
    found = set(settled)
    for rows in (MIN_ROWS - 4, 4):
        image(tower, rows)
    assert settled == found

# SPDX-License-Identifier: Apache-2.0
"""What loading a model leaves in memory that vLLM's sleep mode takes away."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _layers import build
from _models import engine
from _towers import DEVICE
from vllm.config import ModelConfig

from vllm_flashinfer_vit.engine import layer as layers
from vllm_flashinfer_vit.engine.sleep import may_sleep

pytestmark = pytest.mark.usefixtures("plain_kernel", "on_device")

NAMES = ("enable_sleep_mode", "enable_cumem_allocator")


@pytest.mark.parametrize("name", NAMES)
def test_who_may_sleep(name: str) -> None:
    assert name in {field.name for field in fields(ModelConfig)}
    for value in (True, False):
        model = SimpleNamespace(**{name: value})
        assert may_sleep(SimpleNamespace(model_config=model)) is value
    # A tower outside an engine has no model.
    assert not may_sleep(SimpleNamespace(model_config=None))


@pytest.mark.parametrize("sleeps", [True, False])
def test_workspaces_of_test_runs_do_not_outlive_loading(
    sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made anew where memory stays; later loads leave those of graphs."""
    tower = engine("FLASHINFER", device=DEVICE)
    model = tower.vllm_config.model_config
    monkeypatch.setattr(model, "enable_sleep_mode", sleeps, raising=False)
    layer: Any = build(tower)
    done: list[str] = []
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: done.append("forget"), raising=False)
    platform = SimpleNamespace(is_cuda=lambda: True)
    monkeypatch.setattr(layers, "current_platform", platform)
    layer.program = SimpleNamespace(build=lambda: done.append("build"))
    layer._warm_up = SimpleNamespace(run=lambda layer: done.append("warm up"))
    first, later = (["build", "warm up", "forget"], ["build", "warm up"])
    layer.process_weights_after_loading(torch.float32)
    assert done == (first if sleeps else later)
    done.clear()
    layer.process_weights_after_loading(torch.float32)
    assert done == later

# SPDX-License-Identifier: Apache-2.0
"""Batches that no encoder graph holds: how the model is asked, and what is counted."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _towers import cpu_only

from vllm_flashinfer_vit.engine.counting import Counting
from vllm_flashinfer_vit.engine.metrics import Metrics
from vllm_flashinfer_vit.graphs.padded import PaddedManager
from vllm_flashinfer_vit.graphs.sizes import (
    ReplayError,
    ReplayMissingError,
    ReplayPixelsError,
    ReplaySizeError,
)

pytestmark = cpu_only


@pytest.fixture
def manager(metrics: Metrics) -> Any:
    config = SimpleNamespace(compilation_config=SimpleNamespace(), model_config=None)
    made: Any = PaddedManager.__new__(PaddedManager)
    made.counting, made.strict = Counting(config), False
    return made


@pytest.mark.parametrize(
    ("path", "named"), [("default", {}), ("videos", {"path": "videos"})]
)
def test_a_path_is_named_to_models_that_have_several(
    path: str, named: dict[str, str], manager: Any
) -> None:
    asked: list[tuple[Any, ...]] = []

    def forward(inputs: Any, **given: str) -> torch.Tensor:
        asked.append((inputs, given, torch.is_inference_mode_enabled()))
        return torch.ones(1)

    manager.model = SimpleNamespace(encoder_eager_forward=forward)
    inputs = {"pixel_values": torch.zeros(1)}
    assert manager._run_eager(inputs, path, ReplaySizeError("why")) == 1
    assert asked == [(inputs, named, True)]


@pytest.mark.parametrize(
    "kind", [ReplayMissingError, ReplayPixelsError, ReplaySizeError]
)
def test_each_reason_has_its_counter_and_its_error(
    kind: type[ReplayError], manager: Any, metrics: Metrics
) -> None:
    forward = {"encoder_eager_forward": lambda inputs: torch.ones(1)}
    manager.model = SimpleNamespace(**forward)
    with manager.counting.step():
        manager._run_eager({}, "default", kind("why"))
    assert metrics.totals["fallbacks", kind.kind] == 1
    manager.strict = True
    with pytest.raises(kind, match="why, or unset"):
        manager._run_eager({}, "default", kind("why"))

# SPDX-License-Identifier: Apache-2.0
"""An engine with layers in FP8, as its worker sees it."""

from types import SimpleNamespace
from typing import Any

from vllm_flashinfer_vit.fp8.policy import Policy
from vllm_flashinfer_vit.fp8.state import EngineScales

NAME = "visual.blocks.3.attn.attn"
NAMES = (NAME, NAME.replace("3", "4"))
STEP = SimpleNamespace(scheduled_encoder_inputs={"request": [0]})


def engine_config() -> SimpleNamespace:
    """Return what an engine's layers and its worker have in common."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model="some/model"),
        compilation_config=SimpleNamespace(),
    )


class Engine:
    """An engine of such layers."""

    def __init__(self, policy: Policy, names: tuple[str, ...] = NAMES) -> None:
        self.config = engine_config()
        self.policy = policy
        layers = EngineScales.of(self.config)
        enrolled = [layers.enroll(name, 72, policy) for name in names]
        self.states = [state for state in enrolled if state is not None]
        # As its layers do.
        self.layers = layers

    def step(self, scheduler_output: Any = STEP) -> None:
        found = EngineScales.find(self.config)
        assert found is not None
        found.after_step(scheduler_output)

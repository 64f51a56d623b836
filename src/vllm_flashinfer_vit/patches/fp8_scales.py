# SPDX-License-Identifier: Apache-2.0
"""FP8 scales: what an engine does before and after real images reach the encoder.

A layer cannot tell a dummy image from a real one, and a captured graph runs no Python;
the worker can, and does.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm_flashinfer_vit.patches.patch import Patch


def _forget_dummies(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_flashinfer_vit.fp8.state import EngineScales

    @functools.wraps(original)
    def compile_or_warm_up_model(self: Any) -> Any:
        result = original(self)
        if (engine := EngineScales.find(self.vllm_config)) is not None:
            engine.forget_dummies()
        return result

    return compile_or_warm_up_model


def _count_passes(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_flashinfer_vit.fp8.state import EngineScales

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        result = original(self, scheduler_output)
        if (engine := EngineScales.find(self.vllm_config)) is not None:
            engine.after_step(scheduler_output)
        return result

    return execute_model


PATCHES = (
    Patch(
        name="fp8-forget-dummies",
        target="vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
        why="dynamic scales would start from the images of profiling and warm-up",
        remove_when="vLLM tells layers that a pass is a dummy one",
        parameters=("self",),
        stands_for=(),
        replace=_forget_dummies,
    ),
    Patch(
        name="fp8-save-scales",
        target="vllm.v1.worker.gpu_worker:Worker.execute_model",
        why="a graph's replay runs no Python that could count passes and save scales",
        remove_when="vLLM calls back after an encoder pass",
        parameters=("self", "scheduler_output"),
        stands_for=(),
        replace=_count_passes,
    ),
)

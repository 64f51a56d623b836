# SPDX-License-Identifier: Apache-2.0
"""When an engine's steps with images begin and end, and when it ends, for counters.

A layer cannot tell a request's image from one of profiling; the worker can. What is
counted stands in `engine.metrics`, and where in `engine.counting`.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm_flashinfer_vit.patches.patch import Patch

_WRAPPER = "vllm.v1.worker.worker_base:WorkerWrapperBase"


def _count_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_flashinfer_vit.engine.counting import Counting

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        # Most steps have no images.
        if not getattr(scheduler_output, "scheduled_encoder_inputs", None):
            return original(self, scheduler_output)
        counting = Counting.find(self.vllm_config)
        if counting is None:
            return original(self, scheduler_output)
        with counting.step():
            return original(self, scheduler_output)

    return execute_model


def _say_last(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_flashinfer_vit.engine.counting import Counting

    @functools.wraps(original)
    def shutdown(self: Any) -> None:
        # Before it has a worker, it asks that one for what it lacks, without end.
        config = vars(self).get("vllm_config")
        counting = None if config is None else Counting.find(config)
        if counting is not None:
            counting.end()
        original(self)

    return shutdown


PATCHES = (
    Patch(
        name="counters",
        target=f"{_WRAPPER}.execute_model",
        why="nothing is counted for operators: layers cannot tell requests from "
        "warm-up",
        remove_when="vLLM calls back after an encoder pass",
        parameters=("self", "scheduler_output"),
        stands_for=(),
        replace=_count_steps,
        compiled=False,
    ),
    Patch(
        name="counters-at-end",
        target=f"{_WRAPPER}.shutdown",
        why="what was counted after the last line of the log is lost at shutdown",
        remove_when="vLLM calls plugins when an engine ends",
        parameters=("self",),
        stands_for=(),
        replace=_say_last,
        compiled=False,
    ),
)

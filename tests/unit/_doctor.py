# SPDX-License-Identifier: Apache-2.0
"""A machine, a plugin and settings as `doctor` judges them, and its text."""

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from _stacks import STACK
from rich.console import Console

from vllm_flashinfer_vit.commands.doctor import Report, diagnose
from vllm_flashinfer_vit.commands.doctor_text import render
from vllm_flashinfer_vit.machine.problems import stack_problems
from vllm_flashinfer_vit.machine.stack import Stack

PATCH = {
    "name": "qwen9-fused",
    "target": "vllm.model_executor.models.qwen9:Attention.forward",
    "why": "stock is slow",
    "remove_when": "stock is fast",
    "stands_for": ["vllm.model_executor.models.qwen9:Attention.forward"],
    "state": "not applied",
}
PLUGIN = {"active": True, "patches": [PATCH]}
NO_GPU = replace(STACK, gpus=(), driver=None)


def judge(
    stack: Stack = STACK,
    plugin: Mapping[str, Any] = PLUGIN,
    plugin_error: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Report:
    stack = replace(stack, problems=tuple(stack_problems(stack)))
    return diagnose(stack, plugin, plugin_error, env or {})


def text_of(report: Report, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    render(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]

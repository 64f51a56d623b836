# SPDX-License-Identifier: Apache-2.0
"""`tune` on this GPU, and without one: kernels that compute, a clock that is told."""

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _stacks import STACK
from rich.console import Console

from vllm_flashinfer_vit.choices.clock import GraphClock, Run
from vllm_flashinfer_vit.choices.table import Table, file_name, read, write
from vllm_flashinfer_vit.commands import tune as tuning
from vllm_flashinfer_vit.commands import tune_options
from vllm_flashinfer_vit.commands.tune import Options, build_table
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.machine.probe import probe
from vllm_flashinfer_vit.ops import attention as ops

CPU = torch.device("cpu")


class ToldClock:
    """Says the times that it is told by kernel and length."""

    def __init__(self, times: Mapping[str, Callable[[int], float]]) -> None:
        self.times = times
        self.cells: list[tuple[int, ...]] = []

    def prepare(self, run: Run) -> Run:
        return run

    def median_us(self, runs: Mapping[str, Run]) -> dict[str, float]:
        outputs = [run() for run in runs.values()]
        self.cells.append(tuple(outputs[0].shape))
        tokens = outputs[0].shape[0]
        return {kernel: self.times[kernel](tokens) for kernel in runs}


CLOCK = {"flash_attn": lambda tokens: 10.0, "cudnn": lambda tokens: tokens / 4.0}


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """Return GPU kernels by name, each replaced by plain PyTorch."""
    replaced = dict.fromkeys(("flash_attn", "cudnn", "triton_window"), attention_ref)

    def prepare(name: str) -> Callable[..., Any]:
        # Whether padding has to be cleared is nothing to plain PyTorch.
        return lambda *args, **_: functools.partial(replaced[name], *args)

    monkeypatch.setattr(ops, "_prepare_kernel", prepare)
    return replaced


def use_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be no more than FlashAttention and cuDNN to measure."""
    monkeypatch.setattr(tuning, "candidates", lambda *_: (["flash_attn", "cudnn"], []))


def measure_fewer(
    monkeypatch: pytest.MonkeyPatch, effort: str = "FULL", **sizes: Sequence[int]
) -> None:
    """Let an effort measure no more than these lengths, counts or rows."""
    full = getattr(tune_options, effort)
    monkeypatch.setattr(tune_options, effort, full._replace(**sizes))


def has_gpu(monkeypatch: pytest.MonkeyPatch, name: str = "NVIDIA H200") -> None:
    """Let CUDA have a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def on_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tune` run on a machine that has a GPU, on the CPU."""
    times = {**CLOCK, "triton_window": lambda tokens: 99.0}
    monkeypatch.setattr(tuning, "probe", lambda: STACK)
    has_gpu(monkeypatch)
    monkeypatch.setattr(tuning, "GraphClock", lambda device: ToldClock(times))
    monkeypatch.setattr(
        tuning,
        "build_table",
        lambda options, stack, clock, device, console: build_table(
            options, stack, clock, CPU, console
        ),
    )


def measured_here(options: Options, folder: Path) -> Table:
    """Measure on this machine's GPU, and check that a file keeps all of it.

    Args:
        options: What to measure, all of which must run.
        folder: For the file.
    """
    device, stack = torch.device("cuda:0"), probe()
    console = Console(file=io.StringIO())
    table = build_table(options, stack, GraphClock(device), device, console)
    gpu = stack.gpus[0].name
    write(table, folder / file_name(gpu))
    assert read(folder, gpu) == table
    assert table.left_out == ()
    return table

# SPDX-License-Identifier: Apache-2.0
"""The choices of a process: what its log says of them, and when there are none."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from _stacks import ADA, HOPPER, STACK

from vllm_flashinfer_vit.choices import resolve, usable
from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.resolve import choices_here
from vllm_flashinfer_vit.choices.usable import NotServedError
from vllm_flashinfer_vit.machine.stack import Gpu, Stack
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's, CUDA; other tests of this process may have run it on the CPU."""
    platform = SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False)
    monkeypatch.setattr(resolve, "current_platform", platform)
    return platform


@pytest.mark.parametrize(("fp8", "kernel"), [(False, "triton"), (True, "triton_fp8")])
def test_measurements_with_other_versions_are_said(
    fp8: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    logger = SimpleNamespace(info_once=lambda text, *args: said.append(text % args))
    stack = replace(STACK, vllm="0.30.0", triton="3.8.0")
    monkeypatch.setattr(resolve, "logger", logger)
    monkeypatch.setattr(resolve, "attempt", lambda kernel, head_dim, dtype: None)
    monkeypatch.setattr(resolve, "probe", lambda libraries: stack)
    compared = mock.Mock(wraps=resolve.other_versions)
    monkeypatch.setattr(resolve, "other_versions", compared)
    assert len(choices_here(80, torch.bfloat16, None, None, fp8=fp8)) > 1
    measured = FP8_DTYPE if fp8 else torch.bfloat16
    compared.assert_called_once_with(stack, measured, 80, None)
    (line,) = said
    assert (
        "other versions: vllm 0.25.1 (here 0.30.0), triton 3.6.0 (here 3.8.0)" in line
    )
    # A kernel that is forced follows from no measurement.
    choices_here(80, torch.bfloat16, kernel, None, fp8=fp8)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    choices_here(80, torch.bfloat16, None, None, fp8=fp8)
    assert said == [line]


def test_another_cudnn_is_said_where_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    logger = SimpleNamespace(info_once=lambda text, *args: said.append(text % args))
    monkeypatch.setattr(resolve, "logger", logger)
    whole = replace(STACK, cudnn_backend=92400)

    def probe(libraries: bool = True) -> Stack:
        return (
            whole if libraries else replace(STACK, cudnn_backend=None, inspected=None)
        )

    monkeypatch.setattr(resolve, "probe", probe)
    monkeypatch.setattr(usable, "probe", probe)
    classes = {
        "bfloat16/80": (tuned.Class(None, "cudnn"),),
        "bfloat16/64": (tuned.Class(None, "flash_attn"),),
    }
    table = tuned.Table({"gpu": HOPPER.name, **STACK.versions}, classes)
    tuned.write(table, tmp_path / tuned.file_name(HOPPER.name))
    choices_here(64, torch.bfloat16, None, tmp_path)
    assert said == []
    choices_here(80, torch.bfloat16, None, tmp_path)
    (line,) = said
    assert "other versions: cudnn 9.19.0 (here 9.24.0)." in line


def test_a_kernel_that_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(kernel: str, head_dim: int, dtype: torch.dtype) -> str | None:
        return "it computes nonsense" if kernel == "flash_attn_4" else None

    said: list[str] = []
    logger = SimpleNamespace(warning_once=lambda text, *args: said.append(text % args))
    monkeypatch.setattr(resolve, "logger", logger)
    monkeypatch.setattr(resolve, "attempt", attempt)
    monkeypatch.setattr(resolve, "probe", lambda libraries: STACK)
    assert choices_here(80, torch.bfloat16, None, None)
    (line,) = said
    assert "does not use the kernel flash_attn_4: it computes nonsense" in line


@pytest.mark.parametrize("fp8", [False, True])
def test_cuda_without_a_gpu_in_nvml_is_not_served_by_plain_pytorch(
    fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "probe", lambda libraries: replace(STACK, gpus=()))
    with pytest.raises(
        NotServedError, match="NVML shows this process no GPU; .*doctor"
    ):
        choices_here(80, torch.bfloat16, None, None, fp8=fp8)
    reference = "reference_fp8" if fp8 else "reference"
    (choice,) = choices_here(80, torch.bfloat16, reference, None, fp8=fp8)
    assert choice.kernel == reference


@pytest.mark.parametrize("fp8", [False, True])
def test_vllm_on_the_cpu_leaves_a_gpu_alone(
    fp8: bool, platform: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.is_cuda, platform.is_cpu = (lambda: False), (lambda: True)
    without_libraries = replace(STACK, inspected=None)
    monkeypatch.setattr(resolve, "probe", lambda libraries: without_libraries)
    monkeypatch.setattr(usable, "probe", lambda: STACK)
    *_, last = choices_here(80, torch.bfloat16, None, None, fp8=fp8)
    assert last.kernel == ("reference_fp8" if fp8 else "reference")
    for kernel in ("triton", "cudnn"):
        forced = f"{kernel}_fp8" if fp8 else kernel
        with pytest.raises(NotServedError, match=f"{forced}: it needs an NVIDIA GPU"):
            choices_here(80, torch.bfloat16, forced, None, fp8=fp8)


@pytest.mark.parametrize(
    ("gpu", "fp8", "kernel"),
    [
        (HOPPER, False, "triton"),
        (HOPPER, True, "hopper_fp8"),
        (ADA, True, "triton_fp8"),
    ],
)
def test_one_kernel_serves_all_lengths_where_bits_must_not_depend_on_the_batch(
    gpu: Gpu,
    fp8: bool,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolve, "attempt", lambda kernel, **_: None)
    monkeypatch.setattr(resolve, "probe", lambda libraries: replace(STACK, gpus=(gpu,)))
    assert len(choices_here(80, torch.bfloat16, None, None, fp8=fp8)) > 1
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    (choice,) = choices_here(80, torch.bfloat16, None, None, fp8=fp8)
    assert choice[:2] == (kernel, None)
    assert choice.many is None
    assert choice.reason.startswith("VLLM_BATCH_INVARIANT is set")
    # What a user forces stays.
    forced = "triton_fp8" if fp8 else "flash_attn"
    (choice,) = choices_here(80, torch.bfloat16, forced, None, fp8=fp8)
    assert choice.kernel == forced


def test_such_a_kernel_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(kernel: str, head_dim: int, dtype: torch.dtype) -> str | None:
        return "it computes nonsense" if kernel == "hopper_fp8" else None

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(resolve, "attempt", attempt)
    monkeypatch.setattr(resolve, "probe", lambda libraries: STACK)
    (choice,) = choices_here(80, torch.bfloat16, None, None, fp8=True)
    assert choice.kernel == "triton_fp8"


def test_a_head_dim_without_such_a_kernel_is_not_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(resolve, "probe", lambda libraries: STACK)
    with pytest.raises(NotServedError, match="triton: .*head dim"):
        choices_here(160, torch.bfloat16, None, None)

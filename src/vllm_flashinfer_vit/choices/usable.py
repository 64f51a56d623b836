# SPDX-License-Identifier: Apache-2.0
"""Which of a table's kernels this machine can run, and what serves in their place."""

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_flashinfer_vit.choices import lookup
from vllm_flashinfer_vit.choices.lookup import Choice, fp8_ranges
from vllm_flashinfer_vit.kernels.catalog import KERNELS, fp8_names
from vllm_flashinfer_vit.kernels.formats import dtype_name
from vllm_flashinfer_vit.machine.probe import probe
from vllm_flashinfer_vit.machine.stack import Stack, Verdict
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE, judge

if TYPE_CHECKING:
    import torch


class NotServedError(ValueError):
    """FLASHINFER or FP8 was asked for, and nothing in this package can serve it."""


def kernel_verdict(
    kernel: str, stack: Stack, head_dim: int, dtype: "torch.dtype | str"
) -> Verdict:
    """Judge whether a kernel can run on a machine.

    Args:
        kernel: The kernel's name.
        stack: What the machine has.
        head_dim: Head dim in elements.
        dtype: A torch dtype or its name, `bfloat16`.
    """
    return judge(KERNELS[kernel].needs, stack, head_dim, dtype_name(dtype))


def usable_choices(
    stack: Stack,
    head_dim: int,
    dtype: "torch.dtype | str",
    forced: str | None = None,
    tuned_dir: Path | None = None,
    *,
    fp8: bool = False,
    invariant: bool = False,
    attempt: Callable[[str], str | None] = lambda kernel: None,
) -> tuple[tuple[Choice, ...], dict[str, str]]:
    """Drop from a GPU's table of choices what this machine cannot run.

    Where a kernel cannot run, the others' measurements choose again. Without any, its
    record's fallback takes its place; where one of a class's two kernels cannot run,
    the other serves all of it. The fallback of an FP8 kernel does so, too, where the
    others' measurements would leave FP8, which was asked for.

    Args:
        stack: What the machine has. If its libraries were left out, they are inspected
            where a choice runs on cuDNN.
        head_dim: Head dim in elements.
        dtype: A torch dtype or its name.
        forced: The kernel that the user forces, or None.
        tuned_dir: Folder of the user's measurements, or None to ignore them.
        fp8: The layer is one with FP8 attention. What is left may have no FP8 kernel.
        invariant: Whether an image's bits must not depend on the others of a batch, as
            by `VLLM_BATCH_INVARIANT`: one kernel serves every length then, unless one
            is forced or there is no GPU.
        attempt: Runs a kernel once whose record asks for that, and which should run by
            all that is known; says what went wrong, or None.

    Returns:
        The choices that are left, none if nothing can serve, and by each kernel that
        was dropped a text that names it and says why, with its remedy.

    Raises:
        TableError: A file of measured choices cannot be used.
    """
    if invariant and forced is None and stack.gpus:
        return _invariant_choices(stack, head_dim, dtype, tuned_dir, fp8, attempt)
    look_up = lookup.fp8_choices_for if fp8 else lookup.choices_for
    choices = look_up(stack, dtype, head_dim, tuned_dir)
    if forced is not None:
        choices = lookup.forced(choices, forced)
    refusals: dict[str, str] = {}
    passed: set[str] = set()
    while pending := [name for name in _names(choices) if name not in passed]:
        kernel = pending[0]
        record = KERNELS[kernel]
        if stack.inspected is None and record.needs.on_cudnn:
            # The GPUs stay those that the caller has judged by, none on the CPU.
            stack = replace(probe(), gpus=stack.gpus)
        is_fp8 = fp8 and record.is_fp8
        verdict = kernel_verdict(
            kernel, stack, head_dim, FP8_DTYPE if is_fp8 else dtype
        )
        if verdict.ok and record.needs_trial and (error := attempt(kernel)):
            verdict = Verdict(False, error)
        if verdict.ok:
            passed.add(kernel)
            continue
        remedy = f" ({verdict.remedy})" if verdict.remedy else ""
        refusals[kernel] = f"{kernel}: {verdict.reason}{remedy}"
        if kernel == forced:
            choices = ()
            break
        again = lookup.measured_without(
            frozenset(refusals), stack, dtype, head_dim, tuned_dir, fp8=fp8
        )
        if forced is not None and again:
            again = lookup.forced(again, forced)
        if again and (fp8_ranges(again) or not fp8_ranges(choices)):
            choices = again
        elif record.fallback and record.fallback not in refusals:
            choices = lookup.replaced(choices, kernel, record.fallback)
        else:
            choices = lookup.without(choices, kernel)
    return choices, refusals


def _invariant_choices(
    stack: Stack,
    head_dim: int,
    dtype: "torch.dtype | str",
    tuned_dir: Path | None,
    fp8: bool,
    attempt: Callable[[str], str | None],
) -> tuple[tuple[Choice, ...], dict[str, str]]:
    refusals: dict[str, str] = {}
    for name, kernel in KERNELS.items():
        if not kernel.is_batch_invariant or kernel.is_fp8 != fp8:
            continue
        choices, refused = usable_choices(
            stack, head_dim, dtype, name, tuned_dir, fp8=fp8, attempt=attempt
        )
        refusals |= refused
        if choices:
            reason = "VLLM_BATCH_INVARIANT is set: its bits do not depend on the batch"
            return tuple(c._replace(reason=reason) for c in choices), refusals
    return (), refusals


def _names(choices: Sequence[Choice]) -> list[str]:
    return [kernel for choice in choices for kernel in choice.kernels]


def serves_fp8(choices: Sequence[Choice], refusals: Container[str]) -> bool:
    """Whether FP8 layers can be had by what `usable_choices` returned for them.

    Choices without an FP8 kernel will do where FP8 pays nowhere, not where every FP8
    kernel was refused.
    """
    refused = any(kernel in refusals for kernel in fp8_names())
    return bool(fp8_ranges(choices) or (choices and not refused))

# SPDX-License-Identifier: Apache-2.0
"""What `doctor` says of the choices of kernels on this machine."""

import os
from collections.abc import Mapping
from typing import Any

from vllm_flashinfer_vit.choices.gemm_table import GemmLayer
from vllm_flashinfer_vit.choices.gemms import measured_gemms
from vllm_flashinfer_vit.choices.lookup import is_measured, other_versions
from vllm_flashinfer_vit.choices.table import TableError, file_name, key
from vllm_flashinfer_vit.choices.usable import serves_fp8, usable_choices
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS, fp8_names
from vllm_flashinfer_vit.machine.stack import Problem, Stack
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE, HALF_DTYPES
from vllm_flashinfer_vit.settings import ENV_KERNEL, ENV_TUNED_DIR, Settings


def examine_choices(
    stack: Stack, settings: Settings | None, env: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[Problem], list[str]]:
    """Look up what serves each head dim and dtype.

    Args:
        stack: What the machine has.
        settings: The settings in force, or None if they are invalid.
        env: The environment to judge.

    Returns:
        A row for each class of calls, what is wrong, and what is worth knowing.
    """
    # As vLLM reads it.
    invariant = env.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
    try:
        rows, problems, notes = _choices(stack, settings, invariant)
        fp8_rows, fp8_note = _fp8_choices(stack, settings, invariant)
        of_tables = [
            *([] if invariant else _version_notes(stack, settings)),
            _unmeasured_note(stack, settings),
        ]
    except TableError as error:
        # Every look-up reads the same files.
        return [], [Problem(str(error), None, True)], []
    if settings is not None and settings.kernel in fp8_names():
        text = (
            f"{ENV_KERNEL}={settings.kernel} forces FP8 attention: an engine without "
            "--mm-encoder-attn-dtype fp8 stops with an error"
        )
        if fp8_note is None:
            notes.append(f"{text}.")
        else:
            problems.append(Problem(text, f"unset {ENV_KERNEL}", True))
    single = filter(None, [fp8_note, *of_tables, _tuned_dir_note(stack, settings, env)])
    return rows + fp8_rows, problems, [*notes, *single]


def gemm_rows(stack: Stack, settings: Settings | None) -> list[dict[str, Any]]:
    """Return a row for each class of rows of a layer in FP8 whose GEMMs are measured.

    Args:
        stack: What the machine has.
        settings: The settings in force, or None if they are invalid.
    """
    disabled = settings.disabled_patches if settings else frozenset()
    if not disabled.isdisjoint(("fp8_linear", "fp8_gemm")):
        return []
    try:
        found = measured_gemms(stack, settings.tuned_dir if settings else None)
    except TableError:
        # A problem of the choices already.
        return []
    rows = []
    for name, choice in found.items():
        layer = GemmLayer.of_key(name)
        rows += [
            {**layer._asdict(), **part._asdict(), "reason": choice.reason}
            for part in choice.classes
        ]
    return rows


def _choices(
    stack: Stack, settings: Settings | None, invariant: bool
) -> tuple[list[dict[str, Any]], list[Problem], list[str]]:
    """Return the rows of layers without FP8, with problems and notes."""
    forced = settings.kernel if settings else None
    if forced in fp8_names():
        # What else an engine with FP8 attention runs is not forced.
        forced = None
    rows: list[dict[str, Any]] = []
    problems = []
    refusals: dict[str, str] = {}
    unserved: dict[str, list[tuple[int, str]]] = {}
    for dtype in HALF_DTYPES:
        for head_dim in sorted(HEAD_DIMS):
            usable, refused = usable_choices(
                stack,
                head_dim,
                dtype,
                forced,
                settings.tuned_dir if settings else None,
                invariant=invariant,
            )
            refusals.update(refused)
            rows += [
                {"head_dim": head_dim, "dtype": dtype, **choice._asdict()}
                for choice in usable
            ]
            if not usable:
                why = "; ".join(_by_reason(refused))
                unserved.setdefault(why, []).append((head_dim, dtype))
    for why, cases in unserved.items():
        head_dims = ", ".join(str(d) for d in dict.fromkeys(d for d, _ in cases))
        dtypes = " and ".join(dict.fromkeys(dtype for _, dtype in cases))
        what = f"nothing serves {dtypes} with head dims {head_dims}: {why}"
        problems.append(Problem(what, None, True))
    notes = []
    if stack.capability is not None and forced is None and rows:
        notes = [
            f"Would serve on this GPU, but cannot run here: {text}."
            for text in _by_reason(refusals)
        ]
    return rows, problems, notes


def _fp8_choices(
    stack: Stack, settings: Settings | None, invariant: bool
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows of FP8 layers, and why there are none for some head dims."""
    forced = settings.kernel if settings else None
    if forced is not None and forced not in fp8_names():
        names = ", ".join(sorted(fp8_names()))
        return [], (
            f"{ENV_KERNEL}={forced} makes --mm-encoder-attn-dtype fp8 an error: use "
            f"one of {names} with that."
        )
    rows: list[dict[str, Any]] = []
    refusals: dict[str, str] = {}
    for head_dim in sorted(HEAD_DIMS):
        usable, refused = usable_choices(
            stack,
            head_dim,
            HALF_DTYPES[-1],
            forced,
            settings.tuned_dir if settings else None,
            fp8=True,
            invariant=invariant,
        )
        if not serves_fp8(usable, refused):
            refusals.update(refused)
            continue
        rows += [
            {"head_dim": head_dim, "dtype": FP8_DTYPE, **choice._asdict()}
            for choice in usable
        ]
    if rows or not refusals:
        return rows, None
    return rows, (
        "--mm-encoder-attn-dtype fp8 is an error on this machine: "
        f"{'; '.join(_by_reason(refusals))}."
    )


def _by_reason(refusals: Mapping[str, str]) -> list[str]:
    """Name each reason of `usable_choices` once, after its kernels."""
    kernels: dict[str, list[str]] = {}
    for kernel, text in refusals.items():
        kernels.setdefault(text.removeprefix(f"{kernel}: "), []).append(kernel)
    return [f"{', '.join(names)}: {reason}" for reason, names in kernels.items()]


def _version_notes(stack: Stack, settings: Settings | None) -> list[str]:
    """Return what `other_versions` says, each text once, and what it is of."""
    if settings is None or settings.kernel is not None:
        return []
    served_by: dict[str | None, list[str]] = {}
    for dtype in (*HALF_DTYPES, FP8_DTYPE):
        for head_dim in sorted(HEAD_DIMS):
            text = other_versions(stack, dtype, head_dim, settings.tuned_dir)
            served_by.setdefault(text, []).append(key(dtype, head_dim))
    return [
        text if len(served_by) == 1 else f"{text} (For {', '.join(names)}.)"
        for text, names in served_by.items()
        if text is not None
    ]


def _unmeasured_note(stack: Stack, settings: Settings | None) -> str | None:
    """Say how to measure a GPU of which there is no file."""
    if not stack.gpus or settings is None or settings.kernel is not None:
        return None
    if is_measured(stack.gpus[0].name, settings.tuned_dir):
        return None
    return (
        f"Nobody measured these kernels on {stack.gpus[0].name}. `vllm-flashinfer-vit "
        "tune --quick` does in two to three minutes; without --quick it measures more."
    )


def _tuned_dir_note(
    stack: Stack, settings: Settings | None, env: Mapping[str, str]
) -> str | None:
    if settings is None or ENV_TUNED_DIR not in env or not stack.gpus:
        return None
    path = settings.tuned_dir / file_name(stack.gpus[0].name)
    if os.path.exists(path):
        return None
    return (
        f"{ENV_TUNED_DIR} is set, and {path} does not exist; the choices are those of "
        "the package until `vllm-flashinfer-vit tune` makes it."
    )

# SPDX-License-Identifier: Apache-2.0
"""The `doctor` command: what this machine can run, why not the rest, how to mend it."""

import difflib
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.metadata import entry_points
from threading import Event
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.blocks.spec import OPTIMISATIONS
from vllm_flashinfer_vit.choices.usable import kernel_verdict
from vllm_flashinfer_vit.commands.doctor_choices import examine_choices, gemm_rows
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS, KERNELS
from vllm_flashinfer_vit.machine.child import run_isolated
from vllm_flashinfer_vit.machine.probe import probe
from vllm_flashinfer_vit.machine.stack import Problem, Stack
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE, HALF_DTYPES
from vllm_flashinfer_vit.machine.versions import check_vllm, newer_note, runner_note
from vllm_flashinfer_vit.patches import platform
from vllm_flashinfer_vit.settings import (
    ENV_DISABLE_PATCHES,
    ENV_STRICT,
    PREFIX,
    Settings,
    bad_values,
    disabled_patches,
    unknown_variables,
)

SCHEMA = "vllm-flashinfer-vit/doctor/2"
COMMAND = "vllm-flashinfer-vit doctor"

DTYPES = (*HALF_DTYPES, "float32", FP8_DTYPE)

ENTRY_POINT_GROUP = "vllm.general_plugins"
ENTRY_POINT = "flashinfer_vit"
ENV_PLUGINS = "VLLM_PLUGINS"


@dataclass(frozen=True)
class Report:
    """What `doctor` found.

    Attributes:
        stack: What is installed.
        settings: The settings in force, or None if they are invalid.
        entry_point: The plugin's entry point as vLLM sees it, or None.
        kernels: A row for each kernel, head dim and dtype; see `to_json`.
        choices: A row for each class of calls; see `to_json`.
        gemms: A row for each class of rows of layers in FP8; see `to_json`.
        patches: A row for each patch; see `to_json`.
        optimisations: A row for each of `OPTIMISATIONS`; see `to_json`.
        problems: What is wrong.
        notes: What is worth knowing, though nothing is wrong.
    """

    stack: Stack
    settings: Settings | None
    entry_point: str | None
    kernels: tuple[dict[str, Any], ...]
    choices: tuple[dict[str, Any], ...]
    gemms: tuple[dict[str, Any], ...]
    patches: tuple[dict[str, Any], ...]
    optimisations: tuple[dict[str, str], ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether FLASHINFER can serve on this machine."""
        return not any(problem.fatal for problem in self.problems)

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        if self.ok:
            rows = [row for row in self.choices if row["dtype"] != FP8_DTYPE]
            kernels = (row[name] for row in rows for name in ("kernel", "many"))
            names = " and ".join(dict.fromkeys(filter(None, kernels)))
            return f"FLASHINFER can serve on this machine, by {names}."
        count = sum(problem.fatal for problem in self.problems)
        # Others are wrong, too, and keep nothing from running.
        why = "one problem prevents" if count == 1 else f"{count} problems prevent"
        return f"FLASHINFER cannot serve on this machine: {why} it, see above."

    def to_json(self) -> dict[str, Any]:
        """Return the document that `doctor --json` prints; `SCHEMA` names its shape."""
        stack = {
            name: value
            for name, value in vars(self.stack).items()
            if name not in ("problems", "gpus", "inspected")
        }
        stack["gpus"] = [gpu._asdict() for gpu in self.stack.gpus]
        return {
            "schema": SCHEMA,
            "made_by": {"command": f"{COMMAND} --json", "version": __version__},
            "ok": self.ok,
            "summary": self.summary,
            "stack": stack,
            "settings": self.settings and self.settings.to_json(),
            "plugin": {"group": ENTRY_POINT_GROUP, "entry_point": self.entry_point},
            "kernels": list(self.kernels),
            "choices": list(self.choices),
            "gemms": list(self.gemms),
            "patches": list(self.patches),
            "optimisations": list(self.optimisations),
            "problems": [problem._asdict() for problem in self.problems],
            "notes": list(self.notes),
        }


def examine(console: Console, env: Mapping[str, str] = os.environ) -> Report:
    """Examine this machine; whatever could crash runs in child processes.

    Args:
        console: Where to show what takes time: importing torch and vLLM, half a minute
            on a busy machine.
        env: The environment to judge.
    """
    work: dict[str, Callable[[Event], Any]] = {
        "cuDNN and FlashInfer": lambda stop: probe(isolated=True, stop=stop),
        "vLLM with the plugin": lambda stop: _run_plugin(env, stop),
    }
    found = _together(work, console)
    plugin, error = found["vLLM with the plugin"]
    return diagnose(found["cuDNN and FlashInfer"], plugin, error, env)


def _together(
    work: Mapping[str, Callable[[Event], Any]], console: Console
) -> dict[str, Any]:
    """Do several things at once, and show those that are not done.

    Each is handed what is set when its result is not waited for any more.
    """
    if not console.is_terminal:
        console.print(f"Importing {', and '.join(work)}; this can take half a minute.")
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    progress = Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=not console.is_terminal,
    )
    stop = Event()
    with progress, ThreadPoolExecutor(len(work)) as pool:
        pending: dict[str, Future[Any]] = {}
        try:
            for name, function in work.items():
                task = progress.add_task(f"Importing {name}", total=1)
                pending[name] = pool.submit(function, stop)
                pending[name].add_done_callback(
                    lambda _, task=task: progress.advance(task)  # type: ignore[misc]
                )
            # Python notices an interrupt that came as it began to wait when that ends.
            while wait(pending.values(), timeout=1.0).not_done:
                pass
            return {name: future.result() for name, future in pending.items()}
        finally:
            # Interrupted, the pool would wait for children that got no signal.
            stop.set()


def diagnose(
    stack: Stack,
    plugin: Mapping[str, Any],
    plugin_error: str | None,
    env: Mapping[str, str],
) -> Report:
    """Judge what was found.

    Args:
        stack: What the machine has.
        plugin: What `report_plugin` emitted.
        plugin_error: Why it did not finish, or None.
        env: The environment to judge.
    """
    problems = [*stack.problems, *bad_values(env), *unknown_variables(env)]
    notes: list[str] = []
    settings = None if bad_values(env) else Settings.from_env(env)
    disabled = disabled_patches(env)
    entry_point = _entry_point()
    problems += _entry_point_problems(entry_point, env)
    patches = tuple(plugin.get("patches", ()))
    if stack.vllm is not None:
        problems += _plugin_problems(stack, plugin, plugin_error, patches, disabled)
    choices, choice_problems, choice_notes = examine_choices(stack, settings, env)
    problems += choice_problems
    notes += choice_notes
    if stack.capability is None:
        notes.append(
            "No GPU: the reference kernel (plain PyTorch) serves `encode` and tests, "
            "much slower than a GPU."
        )
    if stack.vllm is not None and check_vllm(stack.vllm) is None:
        notes += filter(None, [newer_note(stack.vllm), runner_note(stack.vllm, env)])
    return Report(
        stack=stack,
        settings=settings,
        entry_point=entry_point,
        kernels=tuple(_kernel_rows(stack)),
        choices=tuple(choices),
        gemms=tuple(gemm_rows(stack, settings)),
        patches=patches,
        optimisations=tuple(_optimisation_rows(disabled, plugin.get("unfit", {}))),
        problems=tuple(dict.fromkeys(problems)),
        notes=tuple(notes),
    )


def report_plugin(emit: Callable[[dict[str, Any]], object]) -> None:
    """Activate the plugin in this process, which is a child's, and tell the outcome.

    Neither vLLM's models nor its workers are imported, which takes seconds.

    Args:
        emit: Called with `active` (whether vLLM's selection and layer are replaced),
            `patches` (a row for each patch) and `unfit` (why an optimisation cannot be
            had with these libraries, by its name).
    """
    from vllm_flashinfer_vit import register
    from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform

    use_cpu_platform()
    try:
        register()
        from vllm_flashinfer_vit.engine.selection import (
            layer_is_registered,
            selection_is_wrapped,
        )

        emit({"active": selection_is_wrapped() and layer_is_registered()})
    finally:
        emit({"patches": _rows_of_patches(), "unfit": _unfit_optimisations()})


def _rows_of_patches() -> list[dict[str, Any]]:
    from vllm_flashinfer_vit.plugin import all_patches

    disabled = disabled_patches()
    return [
        {
            "name": patch.name,
            "target": patch.target,
            "why": patch.why,
            "remove_when": patch.remove_when,
            "stands_for": [*patch.stands_for, *patch.helpers],
            "state": patch.state(disabled),
        }
        for patch in all_patches()
    ]


def _unfit_optimisations() -> dict[str, str]:
    from vllm_flashinfer_vit.models import gemma4

    reason = gemma4.unread()
    return {} if reason is None else {"gemma4_blocks": reason}


def _run_plugin(
    env: Mapping[str, str], stop: Event
) -> tuple[dict[str, Any], str | None]:
    # A bad value is reported elsewhere; strict raises what is only logged otherwise.
    child = {
        name: value
        for name, value in env.items()
        if not name.startswith(PREFIX) or name == ENV_DISABLE_PATCHES
    }
    child |= {ENV_STRICT: "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return run_isolated("report_plugin", module=__name__, env=child, stop=stop)


def _entry_point() -> str | None:
    found = entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT)
    return next((point.value for point in found), None)


def _entry_point_problems(
    entry_point: str | None, env: Mapping[str, str]
) -> list[Problem]:
    if entry_point is None:
        return [
            Problem(
                f"vLLM cannot see the plugin: no entry point {ENTRY_POINT} in "
                f"{ENTRY_POINT_GROUP}",
                "in a clone: pip install --force-reinstall --no-deps .",
                True,
            )
        ]
    allowed = env.get(ENV_PLUGINS)
    if allowed is None or ENTRY_POINT in allowed.split(","):
        return []
    names = ",".join([*filter(None, allowed.split(",")), ENTRY_POINT])
    return [
        Problem(
            f"{ENV_PLUGINS}={allowed!r} keeps vLLM from loading {ENTRY_POINT}",
            f"export {ENV_PLUGINS}={shlex.quote(names)}",
            True,
        )
    ]


def _plugin_problems(
    stack: Stack,
    plugin: Mapping[str, Any],
    error: str | None,
    patches: Iterable[Mapping[str, Any]],
    disabled: frozenset[str],
) -> list[Problem]:
    problems = []
    if error is not None:
        problems.append(
            Problem(
                f"activating the plugin in a process of its own {error}",
                f"{ENV_STRICT}=1 python -c "
                "'import vllm_flashinfer_vit as p; p.register()' shows the whole error",
                True,
            )
        )
    elif not plugin.get("active"):
        problems.append(
            Problem(
                "the plugin was loaded, but its attention layer is not in place",
                f"{ENV_STRICT}=1 makes vLLM say why when it starts",
                True,
            )
        )
    # What serves is selected by that of the platform; it is what the package is.
    vital = "select-cuda" if stack.gpus else "select-cpu"
    for row in patches:
        state, _, why = row["state"].partition(": ")
        if state == "unavailable":
            problems.append(Problem(why, None, row["name"] == vital))
    names = {row["name"] for row in patches}
    # A plugin that was not activated names no patches.
    disabled = disabled if names else frozenset()
    names.update(OPTIMISATIONS)
    # Without them nothing is served: engines do not take their names.
    names -= {patch.name for patch in platform.PATCHES}
    for name in sorted(disabled - names):
        near = difflib.get_close_matches(name, names, n=1)
        good = f"perhaps {near[0]} was meant" if near else ", ".join(sorted(names))
        problems.append(
            Problem(
                f"{ENV_DISABLE_PATCHES} names {name!r}, which is no patch or "
                "optimisation that can be left out",
                f"use only names of patches and optimisations: {good}",
                True,
            )
        )
    return problems


def _optimisation_rows(
    disabled: frozenset[str], unfit: Mapping[str, str]
) -> list[dict[str, str]]:
    states = {name: f"unavailable: {reason}" for name, reason in unfit.items()}
    states |= {name: "disabled" for name in disabled}
    return [
        {"name": name, "what": what, "state": states.get(name, "enabled")}
        for name, what in OPTIMISATIONS.items()
    ]


def _kernel_rows(stack: Stack) -> list[dict[str, Any]]:
    return [
        {
            "kernel": kernel,
            "head_dim": head_dim,
            "dtype": dtype,
            **kernel_verdict(kernel, stack, head_dim, dtype)._asdict(),
        }
        for kernel in KERNELS
        for dtype in DTYPES
        for head_dim in sorted(HEAD_DIMS)
    ]

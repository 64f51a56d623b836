# SPDX-License-Identifier: Apache-2.0
"""The `doctor` command: what this machine can run, why not the rest, how to mend it."""

import importlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from packaging.version import Version
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.choices.lookup import FP8_DTYPE, Choice
from vllm_flashinfer_vit.choices.table import TableError
from vllm_flashinfer_vit.machine.support import (
    HALF_DTYPES,
    Problem,
    Stack,
    format_cudnn,
    kernel_verdict,
    probe,
    run_isolated,
    serves_fp8,
    usable_choices,
)
from vllm_flashinfer_vit.settings import (
    ENV_DISABLE_PATCHES,
    ENV_FIX_GRAPH_PADDING,
    ENV_FP8_SCALES,
    ENV_FP8_SKIP_LAYERS,
    ENV_KERNEL,
    ENV_STRICT,
    ENV_TUNED_DIR,
    FP8_KERNELS,
    KERNEL_NAMES,
    Settings,
)

SCHEMA = "vllm-flashinfer-vit/doctor/1"
COMMAND = "vllm-flashinfer-vit doctor"

# CLIP and Qwen's text-like towers, SigLIP and Qwen3-VL, Qwen2-VL and Qwen2.5-VL, and
# two larger ones.
HEAD_DIMS = (64, 72, 80, 96, 128)
DTYPES = (*HALF_DTYPES, "float32", FP8_DTYPE)

ENTRY_POINT_GROUP = "vllm.general_plugins"
ENTRY_POINT = "flashinfer_vit"
ENV_PLUGINS = "VLLM_PLUGINS"
ENV_V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True)
class Report:
    """What `doctor` found.

    Attributes:
        stack: What is installed.
        settings: The settings in force, or None if they are invalid.
        entry_point: The plugin's entry point as vLLM sees it, or None.
        kernels: A row for each kernel, head dim and dtype; see `to_json`.
        choices: A row for each class of calls; see `to_json`.
        patches: A row for each patch; see `to_json`.
        problems: What is wrong.
        notes: What is worth knowing, though nothing is wrong.
    """

    stack: Stack
    settings: Settings | None
    entry_point: str | None
    kernels: tuple[dict[str, Any], ...]
    choices: tuple[dict[str, Any], ...]
    patches: tuple[dict[str, Any], ...]
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
        return f"FLASHINFER cannot serve on this machine: {count} problem(s) above."

    def to_json(self) -> dict[str, Any]:
        """Return the document that `doctor --json` prints; `SCHEMA` names its shape."""
        stack = {
            name: value
            for name, value in vars(self.stack).items()
            if name not in ("problems", "gpus", "inspected")
        }
        stack["gpus"] = [gpu._asdict() for gpu in self.stack.gpus]
        settings = self.settings and {
            "kernel": self.settings.kernel or "auto",
            "strict": self.settings.strict,
            "disabled_patches": sorted(self.settings.disabled_patches),
            "tuned_dir": str(self.settings.tuned_dir),
            "fp8_scales": self.settings.fp8_scales or "auto",
            "fp8_skip_layers": sorted(self.settings.fp8_skip_layers),
            "fix_graph_padding": self.settings.fix_graph_padding,
        }
        return {
            "schema": SCHEMA,
            "made_by": {"command": f"{COMMAND} --json", "version": __version__},
            "ok": self.ok,
            "summary": self.summary,
            "stack": stack,
            "settings": settings,
            "plugin": {"group": ENTRY_POINT_GROUP, "entry_point": self.entry_point},
            "kernels": list(self.kernels),
            "choices": list(self.choices),
            "patches": list(self.patches),
            "problems": [problem._asdict() for problem in self.problems],
            "notes": list(self.notes),
        }


def examine(env: Mapping[str, str] = os.environ) -> Report:
    """Examine this machine; whatever could crash runs in child processes.

    Args:
        env: The environment to judge.
    """
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(_run_plugin, env)
        stack = probe(isolated=True)
        plugin, plugin_error = pending.result()
    return diagnose(stack, plugin, plugin_error, env)


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
    problems = list(stack.problems)
    notes: list[str] = []
    settings = None
    try:
        settings = Settings.from_env(env)
    except ValueError as error:
        variable = str(error).partition("=")[0]
        problems.append(Problem(str(error), f"unset {variable}", True))
    entry_point = _entry_point()
    problems += _entry_point_problems(entry_point, env)
    patches = tuple(plugin.get("patches", ()))
    if stack.vllm is not None:
        problems += _plugin_problems(plugin, plugin_error, patches, settings)
    forced = settings.kernel if settings else None
    tuned_dir = settings.tuned_dir if settings else None
    choices = []
    refusals: dict[str, None] = {}
    for dtype in HALF_DTYPES:
        for head_dim in HEAD_DIMS:
            try:
                usable, refused = usable_choices(
                    stack, head_dim, dtype, forced, tuned_dir
                )
            except TableError as error:
                problems.append(Problem(str(error), None, True))
                continue
            refusals.update(dict.fromkeys(refused.values()))
            choices += [
                {"head_dim": head_dim, "dtype": dtype, **choice._asdict()}
                for choice in usable
            ]
            if not usable:
                what = f"nothing serves head dim {head_dim} in {dtype}"
                problems.append(
                    Problem(f"{what}: {'; '.join(refused.values())}", None, True)
                )
    fp8_choices, fp8_note = _fp8_choices(stack, settings)
    choices += fp8_choices
    notes += filter(None, [fp8_note])
    if stack.capability is None:
        notes.append(
            "No GPU: the reference kernel (plain PyTorch) serves `encode` and tests, "
            "much slower than a GPU."
        )
    elif forced is None:
        notes += [
            f"Chosen otherwise, but cannot run here: {text}." for text in refusals
        ]
    if stack.vllm is not None and (note := runner_note(stack.vllm, env)):
        notes.append(note)
    return Report(
        stack=stack,
        settings=settings,
        entry_point=entry_point,
        kernels=tuple(_kernel_rows(stack)),
        choices=tuple(choices),
        patches=patches,
        problems=tuple(dict.fromkeys(problems)),
        notes=tuple(notes),
    )


def _fp8_choices(
    stack: Stack, settings: Settings | None
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows of FP8 layers, and why there are none for some head dims."""
    forced = settings.kernel if settings else None
    rows: list[dict[str, Any]] = []
    refusals: dict[str, None] = {}
    for head_dim in HEAD_DIMS:
        try:
            usable, refused = usable_choices(
                stack,
                head_dim,
                HALF_DTYPES[-1],
                forced if forced in FP8_KERNELS else None,
                settings.tuned_dir if settings else None,
                fp8=True,
            )
        except TableError:
            # Reported for the other dtypes already.
            continue
        if not serves_fp8(usable, refused):
            refusals.update(dict.fromkeys(refused.values()))
            continue
        rows += [
            {"head_dim": head_dim, "dtype": FP8_DTYPE, **choice._asdict()}
            for choice in usable
        ]
    if rows or not refusals:
        return rows, None
    return rows, (
        "--mm-encoder-attn-dtype fp8 is an error on this machine: "
        f"{'; '.join(refusals)}."
    )


def runner_note(vllm: str, env: Mapping[str, str]) -> str | None:
    """Say if this vLLM's model runner would ignore encoder CUDA graphs.

    Args:
        vllm: vLLM's version.
        env: The environment to judge.
    """
    minor = Version(vllm).release[:2]
    if minor >= (0, 28):
        return None
    # The V2 runner has no encoder CUDA graphs before 0.28, and is the default from
    # 0.25 on for models that are not mixtures of experts.
    asked = env.get(ENV_V2_RUNNER, "").strip().lower()
    by_default = minor >= (0, 25)
    if asked in ("0", "false") or (not asked and not by_default):
        return None
    who = "its default for dense models" if not asked else f"set by {ENV_V2_RUNNER}"
    return (
        f"vLLM {vllm} ignores cudagraph_mm_encoder with the V2 model runner ({who}); "
        f"set {ENV_V2_RUNNER}=0 for encoder CUDA graphs."
    )


def report_plugin(emit: Callable[[dict[str, Any]], object]) -> None:
    """Activate the plugin in this process, which is a child's, and tell the outcome.

    Args:
        emit: Called with `active` (whether vLLM's selection and layer are replaced) and
            `patches` (a row for each patch).
    """
    from vllm_flashinfer_vit import register
    from vllm_flashinfer_vit.patches import all_patches
    from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform

    use_cpu_platform()
    register()
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.platforms import current_platform

    layer = op_registry_oot.get("MMEncoderAttention")
    selection = current_platform.get_vit_attn_backend
    emit(
        {
            "active": hasattr(selection, "__wrapped__")
            and getattr(layer, "__module__", None) == "vllm_flashinfer_vit.engine.layer"
        }
    )
    rows: list[dict[str, Any]] = []
    disabled = Settings.from_env().disabled_patches
    for patch in all_patches():
        error = None
        try:
            importlib.import_module(patch.target.partition(":")[0])
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        state = patch.state(disabled)
        rows.append(
            {
                "name": patch.name,
                "target": patch.target,
                "why": patch.why,
                "vllm_range": list(patch.vllm_range),
                "remove_when": patch.remove_when,
                "state": f"not applied: {error}" if error else state,
            }
        )
        emit({"patches": rows})


def render(report: Report, console: Console) -> None:
    """Print a report for people."""
    console.print(f"[bold]vllm-flashinfer-vit {__version__}[/bold]")
    for title, content in (
        ("Installed", _stack_table(report.stack)),
        ("What this machine can run, by head dim", _kernel_table(report)),
        ("Which kernel serves FLASHINFER", _choice_table(report)),
        ("Plugin and settings", _settings_table(report)),
        ("Patches", _patch_table(report)),
        ("Problems", _problem_list(report)),
        ("Notes", Group(*(Text(f"- {note}") for note in report.notes))),
    ):
        if title in ("Problems", "Notes") and not getattr(report, title.lower()):
            continue
        console.print(f"\n[bold]{title}[/bold]")
        console.print(content)
    console.print()
    console.print(report.summary, style="bold green" if report.ok else "bold red")


def _run_plugin(env: Mapping[str, str]) -> tuple[dict[str, Any], str | None]:
    # Strict raises what is only logged otherwise; a bad value is reported elsewhere.
    child = {key: value for key, value in env.items() if key != ENV_KERNEL}
    child |= {ENV_STRICT: "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return run_isolated("report_plugin", module=__name__, env=child)


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
                "pip install --force-reinstall --no-deps vllm-flashinfer-vit",
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
            f"export {ENV_PLUGINS}={names}",
            True,
        )
    ]


def _plugin_problems(
    plugin: Mapping[str, Any],
    error: str | None,
    patches: tuple[dict[str, Any], ...],
    settings: Settings | None,
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
                f"{ENV_STRICT}=1 makes vLLM say why at start",
                True,
            )
        )
    for row in patches:
        if row["state"].startswith("unavailable"):
            problems.append(Problem(row["state"].partition(": ")[2]))
    names = {row["name"] for row in patches}
    disabled = settings.disabled_patches if settings and names else frozenset()
    for name in sorted(disabled - names):
        problems.append(
            Problem(
                f"{ENV_DISABLE_PATCHES} names {name!r}, which is no patch",
                f"use only names of the list of patches: {', '.join(sorted(names))}",
                True,
            )
        )
    return problems


def _kernel_rows(stack: Stack) -> list[dict[str, Any]]:
    return [
        {
            "kernel": kernel,
            "head_dim": head_dim,
            "dtype": dtype,
            **kernel_verdict(kernel, stack, head_dim, dtype)._asdict(),
        }
        for kernel in KERNEL_NAMES
        for dtype in DTYPES
        for head_dim in HEAD_DIMS
    ]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _stack_table(stack: Stack) -> Table:
    torch_cuda = f" (CUDA {stack.torch_cuda})" if stack.torch_cuda else ""
    wheels = ", ".join(f"{k} {v}" for k, v in stack.cudnn_wheels.items())
    table = _table("what", "version")
    rows = [
        ("Python", stack.python),
        ("vLLM", stack.vllm),
        ("torch", stack.torch and f"{stack.torch}{torch_cuda}"),
        ("Triton", stack.triton),
        ("FlashInfer", stack.flashinfer),
        ("cudnn-frontend", stack.cudnn_frontend),
        ("QuACK", stack.quack),
        ("cuDNN wheel", wheels or None),
        (
            "cuDNN loaded",
            stack.cudnn_backend
            and f"{format_cudnn(stack.cudnn_backend)} ({_paths(stack)})",
        ),
        ("vLLM's FlashAttention", ", ".join(map(str, stack.flash_attn)) or None),
        ("NVIDIA driver", stack.driver),
        *(("GPU", _gpu_text(gpu)) for gpu in stack.gpus),
    ]
    for name, value in rows:
        table.add_row(name, value or "none")
    if not stack.gpus:
        table.add_row("GPU", "none")
    return table


def _paths(stack: Stack) -> str:
    return ", ".join(stack.cudnn_libraries) or "path unknown"


def _gpu_text(gpu: Any) -> str:
    major, minor = gpu.capability
    gib = gpu.memory_bytes / 2**30
    return f"{gpu.name}, compute capability {major}.{minor}, {gib:.0f} GiB"


def _kernel_table(report: Report) -> RenderableType:
    table = _table("kernel", "dtype", *map(str, HEAD_DIMS))
    reasons: dict[str, str] = {}
    cells: dict[tuple[str, str], list[str]] = {}
    for row in report.kernels:
        # That FP8 kernels take FP8 and others do not says no more than their names.
        if (row["kernel"] in FP8_KERNELS) != (row["dtype"] == FP8_DTYPE):
            continue
        mark = "yes"
        if not row["ok"]:
            # One number for each distinct reason, explained below the table.
            key = f"{row['kernel']}: {row['reason']}"
            mark = reasons.setdefault(key, f"no ({len(reasons) + 1})")
        cells.setdefault((row["kernel"], row["dtype"]), []).append(mark)
    for (kernel, dtype), marks in cells.items():
        table.add_row(kernel, dtype, *marks)
    return Group(table, *(Text(f"{mark} {key}") for key, mark in reasons.items()))


def _choice_table(report: Report) -> RenderableType:
    classes: dict[Choice, list[tuple[int, str]]] = {}
    for row in report.choices:
        choice = Choice(*(row[name] for name in Choice._fields))
        classes.setdefault(choice, []).append((row["head_dim"], row["dtype"]))
    if not classes:
        return Text("none")
    table = _table("head dims", "dtypes", "longest sequence", "kernel", "why")
    for choice, served in classes.items():
        head_dims = ", ".join(str(d) for d in dict.fromkeys(d for d, _ in served))
        dtypes = ", ".join(dict.fromkeys(dtype for _, dtype in served))
        length = "any" if choice.max_len is None else f"up to {choice.max_len}"
        table.add_row(head_dims, dtypes, length, choice.served_by, choice.reason)
    return table


def _settings_table(report: Report) -> Table:
    table = _table("what", "value")
    table.add_row("entry point", report.entry_point or "none")
    settings = report.settings
    if settings is None:
        table.add_row("settings", "invalid, see the problems")
        return table
    table.add_row(ENV_KERNEL, settings.kernel or "auto")
    table.add_row(ENV_STRICT, str(int(settings.strict)))
    disabled = ", ".join(sorted(settings.disabled_patches))
    table.add_row(ENV_DISABLE_PATCHES, disabled or "none")
    table.add_row(ENV_TUNED_DIR, str(settings.tuned_dir))
    table.add_row(ENV_FP8_SCALES, settings.fp8_scales or "auto")
    skipped = ", ".join(sorted(settings.fp8_skip_layers))
    table.add_row(ENV_FP8_SKIP_LAYERS, skipped or "none")
    table.add_row(ENV_FIX_GRAPH_PADDING, str(int(settings.fix_graph_padding)))
    return table


def _patch_table(report: Report) -> RenderableType:
    if not report.patches:
        return Text("unknown: the plugin could not be activated")
    table = _table("name", "vLLM", "state", "why")
    table.columns[0].no_wrap = True
    for row in report.patches:
        first, last = row["vllm_range"]
        table.add_row(row["name"], f"{first} to {last}", row["state"], row["why"])
    text = "Model patches are applied when the first FLASHINFER layer is built."
    return Group(table, Text(text))


def _problem_list(report: Report) -> Group:
    lines = []
    for problem in report.problems:
        lines.append(Text(f"- {problem.what}", style="red" if problem.fatal else ""))
        if problem.remedy is not None:
            lines.append(Text(f"  mend it: {problem.remedy}"))
    return Group(*lines)

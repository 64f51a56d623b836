# SPDX-License-Identifier: Apache-2.0
"""The report of `doctor` for people, in 80 columns: each reason stands in it once."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.choices.gemm_table import GemmClass
from vllm_flashinfer_vit.choices.gemms import in_words
from vllm_flashinfer_vit.choices.lookup import Choice
from vllm_flashinfer_vit.commands.doctor import Report
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS, KERNELS
from vllm_flashinfer_vit.machine.stack import Gpu, Problem, Stack
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE
from vllm_flashinfer_vit.machine.versions import format_cudnn
from vllm_flashinfer_vit.settings import VARIABLES, Settings

# When `blocks/attach.py` and `blocks/layers.py` leave steps to vLLM.
OWN_STEPS = (
    "A block runs as vLLM's own, without these, if it is compiled "
    "(compile_mm_encoder), if its norms are of an unknown class, or if "
    "VLLM_BATCH_INVARIANT is set; the log says so. A linear layer runs as vLLM's own "
    "if it is quantized otherwise than in FP8 by CUTLASS, can get LoRA adapters, or is "
    "gathered over ranks; in 16 bits also if it is summed over them."
)


def render(report: Report, console: Console) -> None:
    """Print a report for people."""
    console.print(f"[bold]vllm-flashinfer-vit {__version__}[/bold]")
    sections: dict[str, RenderableType | None] = {
        "Installed": _stack_table(report.stack),
        "Kernels that this machine can run": _kernel_table(report.kernels),
        "Kernels that it cannot run, by reason": _refusals(report.kernels),
        "Which kernel serves FLASHINFER, by longest sequence in tokens": _choice_list(
            report.choices
        ),
        "GEMMs of linear layers in FP8, where they were measured": _gemm_list(
            report.gemms
        ),
        "Plugin and settings": _settings_table(report.entry_point, report.settings),
        "Patches": _patch_table(report.patches),
        "What blocks of vision towers do beside vLLM's steps": _optimisation_table(
            report.optimisations
        ),
        "Problems": _problem_list(report.problems),
        "Notes": _bullets(Text(note) for note in report.notes),
    }
    for title, content in sections.items():
        if content is not None:
            console.print(f"\n[bold]{title}[/bold]")
            console.print(content)
    console.print()
    console.print(report.summary, style="bold green" if report.ok else "bold red")


def plain_table(*columns: str) -> Table:
    """Return an empty table without a frame, whose cells are folded."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _grid() -> Table:
    """Return a table of names and values, which continue below where they begin."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _bullets(items: Iterable[RenderableType]) -> Table | None:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for item in items:
        grid.add_row("-", item)
    return grid if grid.row_count else None


def _stack_table(stack: Stack) -> Table:
    torch_cuda = f" (CUDA {stack.torch_cuda})" if stack.torch_cuda else ""
    wheels = ", ".join(f"{k} {v}" for k, v in stack.cudnn_wheels.items())
    loaded = stack.cudnn_backend and format_cudnn(stack.cudnn_backend)
    rows = [
        ("Python", stack.python),
        ("vLLM", stack.vllm),
        ("torch", stack.torch and f"{stack.torch}{torch_cuda}"),
        ("Triton", stack.triton),
        ("FlashInfer", stack.flashinfer),
        ("cudnn-frontend", stack.cudnn_frontend),
        ("QuACK", stack.quack),
        ("cuda-bindings", stack.cuda_bindings),
        ("cuDNN wheel", wheels),
        ("cuDNN loaded", loaded),
        *(("  from", path) for path in stack.cudnn_libraries),
        ("vLLM's FlashAttention", ", ".join(map(str, stack.flash_attn))),
        ("NVIDIA driver", stack.driver),
        *(("GPU", _gpu_text(gpu)) for gpu in stack.gpus),
    ]
    if not stack.gpus:
        rows.append(("GPU", None))
    grid = _grid()
    for name, value in rows:
        grid.add_row(name, Text(value or "none"))
    return grid


def _gpu_text(gpu: Gpu) -> str:
    major, minor = gpu.capability
    text = f"{gpu.name}, compute capability {major}.{minor}"
    if gpu.memory_bytes is None:
        return text
    return f"{text}, {gpu.memory_bytes / 2**30:.0f} GiB"


def _told(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out that FP8 kernels take FP8 and others do not, as their names say it."""
    return [
        row
        for row in rows
        if KERNELS[row["kernel"]].is_fp8 == (row["dtype"] == FP8_DTYPE)
    ]


def _kernel_table(rows: Iterable[dict[str, Any]]) -> RenderableType:
    head_dims: dict[tuple[str, str], list[int]] = {}
    for row in _told(rows):
        if row["ok"]:
            served = head_dims.setdefault((row["kernel"], row["dtype"]), [])
            served.append(row["head_dim"])
    lines: dict[tuple[str, str], list[str]] = {}
    for (kernel, dtype), served in head_dims.items():
        lines.setdefault((kernel, _listed(served)), []).append(dtype)
    if not lines:
        return Text("none")
    table = plain_table("kernel", "dtypes", "head dims")
    for (kernel, listed), dtypes in lines.items():
        table.add_row(kernel, ", ".join(dtypes), listed)
    return table


def _refusals(rows: Iterable[dict[str, Any]]) -> Table | None:
    refused: dict[tuple[str, str | None], dict[str, list[int]]] = {}
    for row in _told(rows):
        if not row["ok"]:
            kernels = refused.setdefault((row["reason"], row["remedy"]), {})
            kernels.setdefault(row["kernel"], []).append(row["head_dim"])
    items = []
    for (reason, remedy), kernels in refused.items():
        names = (
            name if set(dims) == set(HEAD_DIMS) else f"{name} ({_listed(dims)})"
            for name, dims in kernels.items()
        )
        items.append(Text(f"{reason}: {', '.join(names)}{_advice(remedy)}"))
    return _bullets(items)


def _listed(head_dims: Iterable[int]) -> str:
    return ", ".join(str(head_dim) for head_dim in dict.fromkeys(head_dims))


def _advice(remedy: str | None) -> str:
    return f"\ntry: {remedy}" if remedy is not None else ""


def _choice_list(rows: Iterable[Mapping[str, Any]]) -> RenderableType:
    layers: dict[tuple[str, int], list[Choice]] = {}
    for row in rows:
        choice = Choice(*(row[name] for name in Choice._fields))
        layers.setdefault((row["dtype"], row["head_dim"]), []).append(choice)
    if not layers:
        return Text("none")
    marks: dict[str, str] = {}
    alike: dict[tuple[Choice, ...], dict[str, list[int]]] = {}
    for (dtype, head_dim), choices in layers.items():
        alike.setdefault(tuple(choices), {}).setdefault(dtype, []).append(head_dim)
        for choice in choices:
            marks.setdefault(choice.reason, f" ({len(marks) + 1})")
    if len(marks) == 1:
        marks = dict.fromkeys(marks, "")
    parts: list[RenderableType] = []
    for classes, served in alike.items():
        parts += [Text(line) for line in _served(served)]
        grid = _grid()
        for choice in classes:
            length = "longer" if len(classes) > 1 else "any"
            if choice.max_len is not None:
                length = f"up to {choice.max_len}"
            grid.add_row(f"  {length}", f"{choice.served_by}{marks[choice.reason]}")
        parts.append(grid)
    reasons = (f"{mark} {reason}".strip() for reason, mark in marks.items())
    return Group(*parts, *map(Text, reasons))


def _gemm_list(rows: Iterable[Mapping[str, Any]]) -> RenderableType | None:
    """Name layers with the same GEMMs together; None if nothing was measured."""
    layers: dict[tuple[str, str, str], list[GemmClass]] = {}
    reasons: dict[str, None] = {}
    for row in rows:
        sizes = f"{row['inputs']}x{row['outputs']}"
        classes = layers.setdefault((row["dtype"], row["scales"], sizes), [])
        classes.append(GemmClass(row["max_rows"], row["gemm"]))
        reasons[row["reason"]] = None
    if not layers:
        return None
    alike: dict[tuple[str, str, str], list[str]] = {}
    for (dtype, scales, sizes), classes in layers.items():
        named = alike.setdefault((dtype, scales, in_words(tuple(classes))), [])
        named.append(sizes)
    table = plain_table("dtype", "scales", "inputs x outputs", "GEMM")
    for (dtype, scales, gemms), named in alike.items():
        table.add_row(dtype, scales, ", ".join(named), gemms)
    text = "Layers of other sizes or scales run by CUTLASS."
    return Group(table, *map(Text, (*reasons, text)))


def _served(head_dims: Mapping[str, list[int]]) -> list[str]:
    """Name dtypes that have head dims in common on one line."""
    dtypes: dict[str, list[str]] = {}
    for dtype, dims in head_dims.items():
        dtypes.setdefault(_listed(dims), []).append(dtype)
    return [f"{', '.join(names)}; head dims {dims}" for dims, names in dtypes.items()]


def _settings_table(entry_point: str | None, settings: Settings | None) -> Table:
    grid = _grid()
    grid.add_row("entry point", entry_point or "none")
    if settings is None:
        grid.add_row("settings", "invalid, see the problems")
        return grid
    values = settings.to_json()
    for variable in VARIABLES:
        value = values[variable.field]
        if isinstance(value, bool):
            value = int(value)
        elif isinstance(value, list):
            value = ", ".join(value) or "none"
        grid.add_row(variable.name, Text(str(value)))
    return grid


def _patch_table(patches: Iterable[Mapping[str, Any]]) -> RenderableType:
    grid = _grid()
    for row in patches:
        state, _, why = row["state"].partition(": ")
        grid.add_row(row["name"], f"{state}, see the problems" if why else state)
    if not grid.row_count:
        return Text("unknown: the plugin could not be activated")
    text = (
        "Model patches are applied when the first FLASHINFER layer is built. --json "
        "says why each exists."
    )
    return Group(grid, Text(text))


def _optimisation_table(rows: Iterable[Mapping[str, Any]]) -> Group:
    grid = _grid()
    for row in rows:
        what = row["what"] if row["state"] == "enabled" else row["state"]
        grid.add_row(row["name"], Text(what))
    return Group(grid, Text(OWN_STEPS))


def _problem_list(problems: Iterable[Problem]) -> Table | None:
    return _bullets(
        Text(problem.what, style="red" if problem.fatal else "").append(
            _advice(problem.remedy), style="default"
        )
        for problem in problems
    )

# SPDX-License-Identifier: Apache-2.0
"""The `tune` command: times every kernel on this GPU and derives its table of choices.

What is timed is the layer's whole op, from views of the QKV projection and the rotary
tables to the output: replays of a CUDA graph on a cold L2 cache, kernels taking turns,
medians. A kernel that is too far from fp32 is not timed. `docs/choices.md` says how
classes follow from the times.

FP8 layers have entries of their own, `float8_e4m3fn/<head dim>`. There all kernels are
compared on bf16 inputs, and quantising counts, so that a class begins where FP8 pays.

GEMMs of linear layers in FP8 are timed likewise, see `choices.measure_gemms`.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.clock import Clock, GraphClock
from vllm_flashinfer_vit.choices.compare import GpuLostError, check_gpu
from vllm_flashinfer_vit.choices.derive import (
    TuneError,
    derive_classes,
    derive_gemm_classes,
)
from vllm_flashinfer_vit.choices.gemm_table import (
    GemmClass,
    GemmMeasurement,
)
from vllm_flashinfer_vit.choices.measure import (
    Cell,
    candidates,
    grid,
    measure,
)
from vllm_flashinfer_vit.choices.measure_gemms import gemm_candidates, measure_gemms
from vllm_flashinfer_vit.choices.table import Measurement, Table
from vllm_flashinfer_vit.choices.trial import attempt
from vllm_flashinfer_vit.commands.tune_options import Options
from vllm_flashinfer_vit.kernels.formats import dtype_name
from vllm_flashinfer_vit.machine import files
from vllm_flashinfer_vit.machine.probe import probe
from vllm_flashinfer_vit.machine.stack import Stack
from vllm_flashinfer_vit.ops.plan import Class
from vllm_flashinfer_vit.settings import Settings

_Row = TypeVar("_Row")
_Class = TypeVar("_Class")


@dataclass(frozen=True)
class Report:
    """A written table.

    Attributes:
        path: Where it is.
        table: What was measured.
    """

    path: Path
    table: Table


def run(options: Options, console: Console) -> Report:
    """Measure on the first GPU and write the table; nothing is written on failure.

    The file is locked meanwhile: a second run with it, on another GPU, say, would lose
    what this one adds, and ends at once.

    Args:
        options: What to measure.
        console: For the progress bar.

    Raises:
        TuneError: There is no GPU, or CUDA begins with another one; an option is not
            valid or could not act, the file is of another stack than what is to be
            added or would lose a part that is not measured, nothing was measured, or a
            kernel ended all work on the GPU.
        TableError: The file that is to be added to cannot be used.
        FileError: The file cannot be written, another run is making it, or it was named
            and holds something else; that is said before anything is measured.
    """
    options.check()
    stack = probe()
    if not stack.gpus or not torch.cuda.is_available():
        raise TuneError(
            "tune needs an NVIDIA GPU and this process sees none; "
            "`vllm-flashinfer-vit doctor` says more"
        )
    gpu_name = stack.gpus[0].name
    _check_order(gpu_name)
    path = options.output
    if path is None:
        path = Settings.from_env().tuned_dir / tuned.file_name(gpu_name)
    _make_folder(path)
    with files.locked(path):
        older = tuned.read_file(path, gpu_name) if options.add else None
        if older is not None:
            _check_alike(older, path, stack, options)
        if not options.add:
            _check_replaced(path, gpu_name, options)
        device = torch.device("cuda:0")
        try:
            table = build_table(options, stack, GraphClock(device), device, console)
        except GpuLostError as error:
            raise TuneError(f"{error}; nothing was written to {path}") from error
        if older is not None:
            table = tuned.added(older, table)
        tuned.write(table, path)
    return Report(path, table)


def _check_order(gpu_name: str) -> None:
    """Check that CUDA's first GPU, which is measured, is the one that the file names.

    Args:
        gpu_name: The product name of NVML's first GPU.

    Raises:
        TuneError: It is another one, and the order can be made the same.
    """
    measured = torch.cuda.get_device_name(0)
    # CUDA adds the part of a GPU that a process has: `NVIDIA H200 MIG 1g.18gb`. Names
    # of other GPUs begin alike, as that of an L4 and of an L40.
    is_same = measured == gpu_name or measured.startswith(f"{gpu_name} MIG ")
    if not is_same and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise TuneError(
            f"CUDA's first GPU is {measured}, and NVML's, by which files are named, is "
            f"{gpu_name}: export CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )


def _check_alike(older: Table, path: Path, stack: Stack, options: Options) -> None:
    """Check that a run can be added to a table: same versions, same effort.

    Raises:
        TuneError: It cannot.
    """
    here = _made_by(stack, options.command())
    differing = [
        f"{name} {older.made_by.get(name, 'unknown')} and not "
        f"{here.get(name, 'unknown')}"
        for name in dict.fromkeys((*here, *older.made_by))
        if name != "command" and older.made_by.get(name) != here.get(name)
    ]
    if ("--quick" in str(older.made_by.get("command")).split()) != options.quick:
        differing.append(f"tune {'without ' if options.quick else 'with '}--quick")
    if differing:
        given = "--add" if options.only is None else "--add and --only"
        raise TuneError(
            f"{path} was measured with {', '.join(differing)}: measure all of it again "
            f"without {given}, or name another file with --output"
        )


def _check_replaced(path: Path, gpu_name: str, options: Options) -> None:
    """Check that a run replaces no file but of choices, and none with another part.

    Raises:
        FileError: The file was named, and holds something else.
        TuneError: A run of one part would replace a file that has the other.
    """
    if options.output is not None:
        # One in the user's folder is replaced if it is damaged, as engines advise.
        files.check_replaceable(path, "choices", tuned.check_kind)
    if options.only is None:
        return
    try:
        older = tuned.read_file(path, gpu_name)
    except tuned.TableError:
        # No engine could use it either.
        return
    if older is None:
        return
    is_attention = options.only == "attention"
    if older.gemms if is_attention else older.classes:
        raise TuneError(
            f"{path} has choices of {'GEMMs' if is_attention else 'attention'}, which "
            f"--only {options.only} would delete: give --add to keep them, or name "
            "another file with --output"
        )


def _make_folder(path: Path) -> None:
    """Make the folder of a table's file, if there is none.

    Raises:
        FileError: It cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.FileError(
            f"{path} cannot be written: {error}; choose another with --output"
        ) from error


def build_table(
    options: Options,
    stack: Stack,
    clock: Clock,
    device: torch.device,
    console: Console,
) -> Table:
    """Measure each dtype and head dim and derive its classes.

    Args:
        options: What to measure.
        stack: What the machine has.
        clock: The clock.
        device: Where to measure.
        console: For the progress bar.

    Raises:
        TuneError: Nothing could be measured, or not within the time limit; or GEMMs
            were asked for, and none runs.
        GpuLostError: A kernel ended all work on the GPU.
    """
    effort = options.effort
    until = time.monotonic() + effort.time_limit_s
    measurements: list[Measurement] = []
    classes: dict[str, tuple[Class, ...]] = {}
    gemm_rows: list[GemmMeasurement] = []
    gemms: dict[str, tuple[GemmClass, ...]] = {}
    left_out: list[str] = []
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    layers = options.layers()
    launched = gemm_candidates(stack) if layers else ()
    if layers and not launched:
        layers = []
        reason = (
            "no GEMM of layers in FP8 runs on this GPU: that takes compute capability "
            "8.9 and vLLM's op for it"
        )
        if options.only == "gemms" or options.gemms is not None:
            option = "--gemms" if options.only is None else "--only gemms"
            raise TuneError(f"{reason}; leave out {option}")
        left_out.append(reason)

    def add(
        name: str,
        measured: Callable[[Callable[[object], None]], tuple[list[_Row], list[str]]],
        derive: Callable[[Sequence[_Row]], tuple[_Class, ...]],
        rows: list[_Row],
        entries: dict[str, tuple[_Class, ...]],
    ) -> None:
        """Measure an entry of the table, or say why it has none."""
        try:
            found, failures = measured(functools.partial(advance, name))
            left_out.extend(f"{name}: {failure}" for failure in failures)
            entries[name] = derive(found)
            rows += found
        except TuneError as error:
            left_out.append(f"{name}: {error}")

    def check_time() -> None:
        if time.monotonic() > until:
            raise TuneError(
                f"the time limit of {effort.time_limit_s:g} s passed before all of "
                "it was measured, so that nothing of it counts; raise --time-limit"
            )

    def tried(kernel: str, head_dim: int, dtype: torch.dtype) -> str | None:
        # It compiles the kernel, for seconds.
        check_time()
        if error := attempt(kernel, head_dim, dtype):
            check_gpu(kernel, error, device)
        return error

    def attention(
        dtype: torch.dtype,
        head_dim: int,
        cells: Sequence[Cell],
        show: Callable[[object], None],
    ) -> tuple[list[Measurement], list[str]]:
        kernels, refused = candidates(stack, dtype, head_dim, tried)
        rows, failures = measure(dtype, head_dim, kernels, cells, clock, device, show)
        return rows, refused + failures

    with bar, torch.inference_mode():
        plans = [
            (dtype, head_dim, grid(head_dim, effort.lengths, effort.counts))
            for dtype, head_dim in options.combinations()
        ]
        total = sum(len(cells) for *_, cells in plans)
        total += len(layers) * len(effort.rows)
        task = bar.add_task("", total=total)

        def advance(name: str, cell: object) -> None:
            check_time()
            bar.update(task, advance=1, description=f"{name}, {cell}")

        for dtype, head_dim, cells in plans:
            name = tuned.key(dtype_name(dtype), head_dim)
            measured = functools.partial(attention, dtype, head_dim, cells)
            add(name, measured, derive_classes, measurements, classes)
        for dtype, layer in layers:
            how = layer, dtype, launched, effort.rows, clock, device
            times = functools.partial(measure_gemms, *how)
            add(layer.key, times, derive_gemm_classes, gemm_rows, gemms)
    if not classes and not gemms:
        raise TuneError(f"no choice could be measured: {'; '.join(left_out)}")
    return Table(
        _made_by(stack, options.command()),
        classes,
        tuple(measurements),
        tuple(left_out),
        gemms,
        tuple(gemm_rows),
    )


def _made_by(stack: Stack, command: str) -> dict[str, Any]:
    gpu = stack.gpus[0]
    return {
        "command": command,
        "version": __version__,
        "gpu": gpu.name,
        "capability": ".".join(map(str, gpu.capability)),
        "driver": stack.driver or "unknown",
        **stack.versions,
    }

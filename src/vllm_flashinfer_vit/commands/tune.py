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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
from vllm_flashinfer_vit.choices.derive import (
    TuneError,
    derive_classes,
    derive_gemm_classes,
)
from vllm_flashinfer_vit.choices.gemm_table import (
    GemmClass,
    GemmLayer,
    GemmMeasurement,
)
from vllm_flashinfer_vit.choices.measure import (
    COUNTS,
    LENGTHS,
    candidates,
    dtype_name,
    grid,
    measure,
)
from vllm_flashinfer_vit.choices.measure_gemms import (
    ROWS,
    SIZES,
    gemm_candidates,
    measure_gemms,
)
from vllm_flashinfer_vit.choices.table import Measurement, Table
from vllm_flashinfer_vit.choices.trial import attempt
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS
from vllm_flashinfer_vit.kernels.gemms import SCALES
from vllm_flashinfer_vit.machine import files
from vllm_flashinfer_vit.machine.probe import probe
from vllm_flashinfer_vit.machine.stack import Stack
from vllm_flashinfer_vit.ops.plan import Class
from vllm_flashinfer_vit.settings import Settings

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


class TimeIsUpError(RuntimeError):
    """The time limit passed."""


class Effort(NamedTuple):
    """How much is measured, where no option says it.

    Attributes:
        dtypes: Keys of `DTYPES`.
        lengths: Longest sequences, ascending, in tokens.
        counts: Numbers of sequences.
        time_limit_s: Seconds until what is not measured yet is left out.
        rows: Numbers of rows of GEMMs, ascending.
    """

    dtypes: Sequence[str]
    lengths: Sequence[int]
    counts: Sequence[int]
    time_limit_s: float
    rows: Sequence[int] = ROWS


FULL = Effort(tuple(DTYPES), LENGTHS, COUNTS, 600.0)
# A quarter of the batches of a head dim. Towers run in bf16 unless told otherwise, and
# few kernels win for a range of lengths that is shorter than a doubling.
QUICK = Effort(
    ("bf16",),
    (64, 128, 256, 512, 1024, 2048, 4096, 16384),
    (1, 16, 256),
    120.0,
    (512, 1024, 4096, 16384),
)

PARTS = ("attention", "gemms")


@dataclass(frozen=True)
class Options:
    """What to measure, and where the table goes.

    Attributes:
        dtypes: Keys of `DTYPES`, comma-separated; None for the effort's.
        head_dims: Head dims in elements, comma-separated.
        output: The table's file; None for this GPU's file in the user's folder.
        time_limit_s: Seconds until what is not measured yet is left out; None for the
            effort's.
        quick: Whether the effort is `QUICK`.
        add: Whether what the file has of other dtypes, head dims and layers stays.
        gemms: Sizes of layers in FP8, inputs x outputs, comma-separated.
        only: One of `PARTS`, None for all.
    """

    dtypes: str | None = None
    head_dims: str = ",".join(map(str, HEAD_DIMS))
    output: Path | None = None
    time_limit_s: float | None = None
    quick: bool = False
    add: bool = False
    gemms: str = ",".join(f"{inputs}x{outputs}" for inputs, outputs in SIZES)
    only: str | None = None

    @property
    def effort(self) -> Effort:
        """What is measured, options included."""
        effort = QUICK if self.quick else FULL
        if self.dtypes is not None:
            names = (name.strip() for name in self.dtypes.split(","))
            effort = effort._replace(dtypes=tuple(names))
        if self.time_limit_s is not None:
            effort = effort._replace(time_limit_s=self.time_limit_s)
        return effort

    def combinations(self) -> list[tuple[torch.dtype, int]]:
        """Return dtypes and head dims in the order in which they are measured.

        Raises:
            TuneError: A name or number is not valid.
        """
        names = self._dtypes()
        dims = [text.strip() for text in self.head_dims.split(",")]
        for text in dims:
            if not text.isdecimal() or int(text) % 8 or not 8 <= int(text) <= 256:
                raise TuneError(
                    f"--head-dims has {text!r}: use multiples of 8 from 8 to 256"
                )
        if self.only not in (None, "attention"):
            return []
        return [
            (DTYPES[name], int(text)) for name in names for text in dict.fromkeys(dims)
        ]

    def layers(self) -> list[tuple[torch.dtype, GemmLayer]]:
        """Return the layers in FP8 whose GEMMs are measured, by the output's dtype.

        Raises:
            TuneError: A name or size is not valid.
        """
        if self.only is not None and self.only not in PARTS:
            raise TuneError(f"--only has {self.only!r}: use {' or '.join(PARTS)}")
        sizes: dict[tuple[int, int], None] = {}
        for text in (text.strip() for text in self.gemms.split(",")):
            inputs, _, outputs = text.partition("x")
            if not (_is_padded_size(inputs) and _is_padded_size(outputs)):
                raise TuneError(
                    f"--gemms has {text!r}: use inputs x outputs with vLLM's padding, "
                    "such as 1152x3456, multiples of 16 up to 65536"
                )
            sizes[int(inputs), int(outputs)] = None
        # Those of FP8 attention say nothing of what a layer returns.
        names = [name for name in self._dtypes() if name != "fp8"]
        if self.only == "gemms" and not names:
            raise TuneError("--only gemms needs bf16 or fp16 in --dtypes")
        if self.only == "attention":
            return []
        return [
            (DTYPES[name], GemmLayer(dtype_name(DTYPES[name]), *size, scales))
            for name in names
            for size in sizes
            for scales in SCALES
        ]

    def _dtypes(self) -> list[str]:
        names = list(dict.fromkeys(self.effort.dtypes))
        for name in names:
            if name not in DTYPES:
                raise TuneError(f"--dtypes has {name!r}: use {' or '.join(DTYPES)}")
        return names

    def command(self) -> str:
        """Return the command that measures the same again."""
        text = (
            f"vllm-flashinfer-vit tune{' --quick' if self.quick else ''}"
            f"{' --add' if self.add else ''} "
            f"--dtypes {','.join(self.effort.dtypes)}"
        )
        if self.only is not None:
            text += f" --only {self.only}"
        if self.only != "gemms":
            text += f" --head-dims {self.head_dims.replace(' ', '')}"
        if self.only != "attention" and self.gemms != Options.gemms:
            text += f" --gemms {self.gemms.replace(' ', '')}"
        return text


def _is_padded_size(text: str) -> bool:
    """Whether a size is one that FP8 weights have in vLLM."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= 5
    return is_number and int(text) % 16 == 0 and 16 <= int(text) <= 65536


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

    Args:
        options: What to measure.
        console: For the progress bar.

    Raises:
        TuneError: There is no GPU, an option is not valid, the file is of another stack
            than what is to be added, or nothing was measured.
        TableError: The file that is to be added to cannot be used.
        FileError: The file cannot be written; that is said before anything is measured.
    """
    options.combinations()
    options.layers()
    stack = probe()
    if not stack.gpus or not torch.cuda.is_available():
        raise TuneError(
            "tune needs an NVIDIA GPU and this process sees none; "
            "`vllm-flashinfer-vit doctor` says more"
        )
    gpu_name = stack.gpus[0].name
    path = options.output
    if path is None:
        path = Settings.from_env().tuned_dir / tuned.file_name(gpu_name)
    _check_writable(path)
    older = tuned.read_file(path, gpu_name) if options.add else None
    if older is not None:
        _check_alike(older, path, stack, options)
    device = torch.device("cuda:0")
    table = build_table(options, stack, GraphClock(device), device, console)
    if older is not None:
        table = tuned.added(older, table)
    tuned.write(table, path)
    return Report(path, table)


def _check_alike(older: Table, path: Path, stack: Stack, options: Options) -> None:
    """Check that a run can be added to a table: same versions, same effort.

    Raises:
        TuneError: It cannot.
    """
    here = _made_by(stack, options.command())
    differing = [
        f"{name} {older.made_by.get(name, 'unknown')} and not {value}"
        for name, value in here.items()
        if name != "command" and older.made_by.get(name) != value
    ]
    if ("--quick" in str(older.made_by.get("command")).split()) != options.quick:
        differing.append(f"tune {'without ' if options.quick else 'with '}--quick")
    if differing:
        raise TuneError(
            f"{path} was measured with {', '.join(differing)}: measure all of it again "
            "without --add, or name another file with --output"
        )


def _check_writable(path: Path) -> None:
    """Check that the table can be written, and make its folder.

    Raises:
        FileError: It cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.FileError(
            f"{path} cannot be written: {error}; choose another with --output"
        ) from error
    files.check(path)


def build_table(
    options: Options,
    stack: Stack,
    clock: Clock,
    device: torch.device,
    console: Console,
    lengths: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
) -> Table:
    """Measure each dtype and head dim and derive its classes.

    Args:
        options: What to measure.
        stack: What the machine has.
        clock: The clock.
        device: Where to measure.
        console: For the progress bar.
        lengths: Longest sequences to measure, ascending, in tokens; None for the
            effort's.
        counts: Numbers of sequences to measure; None for the effort's.

    Raises:
        TuneError: Nothing could be measured, or not within the time limit.
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
    if options.only == "gemms" and not launched:
        raise TuneError("no GEMM of layers in FP8 runs on this GPU")
    with bar, torch.inference_mode():
        batches = lengths or effort.lengths, counts or effort.counts
        plans = [(*c, grid(c[1], *batches)) for c in options.combinations()]
        total = sum(len(cells) for *_, cells in plans)
        if launched:
            total += len(layers) * len(effort.rows)
        task = bar.add_task("", total=total)

        def advance(name: str, cell: object) -> None:
            if time.monotonic() > until:
                raise TimeIsUpError(
                    f"the time limit of {effort.time_limit_s:g} s passed before all of "
                    "it was measured, so that nothing of it counts; raise --time-limit"
                )
            bar.update(task, advance=1, description=f"{name}, {cell}")

        for dtype, head_dim, cells in plans:
            name = tuned.key(dtype_name(dtype), head_dim)
            show = functools.partial(advance, name)
            try:
                kernels, refused = candidates(stack, dtype, head_dim, attempt)
                rows, failures = measure(
                    dtype, head_dim, kernels, cells, clock, device, show
                )
                left_out += [f"{name}: {reason}" for reason in refused + failures]
                classes[name] = derive_classes(rows)
                measurements += rows
            except (TimeIsUpError, TuneError) as error:
                left_out.append(f"{name}: {error}")
        for dtype, layer in layers if launched else ():
            show_rows = functools.partial(advance, layer.key)
            try:
                found, failures = measure_gemms(
                    layer, dtype, launched, effort.rows, clock, device, show_rows
                )
                left_out += [f"{layer.key}: {reason}" for reason in failures]
                gemms[layer.key] = derive_gemm_classes(found)
                gemm_rows += found
            except (TimeIsUpError, TuneError) as error:
                left_out.append(f"{layer.key}: {error}")
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

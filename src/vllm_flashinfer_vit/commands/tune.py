# SPDX-License-Identifier: Apache-2.0
"""The `tune` command: times every kernel on this GPU and derives its table of choices.

What is timed is the layer's whole op, from views of the QKV projection and the rotary
tables to the output: replays of a CUDA graph on a cold L2 cache, kernels taking turns,
medians. A kernel that is too far from fp32 is not timed. `docs/choices.md` says how
classes follow from the times.

FP8 layers have entries of their own, `float8_e4m3fn/<head dim>`. There all kernels are
compared on bf16 inputs, and quantising counts, so that a class begins where FP8 pays.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table as TextTable

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.table import Class, Measurement, Table
from vllm_flashinfer_vit.machine.support import (
    Stack,
    format_cudnn,
    kernel_verdict,
    probe,
)
from vllm_flashinfer_vit.settings import (
    FP8_KERNELS,
    KERNEL_NAMES,
    SERVES_UP_TO,
    KernelName,
    ScaleMethod,
    Settings,
)

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
# Head dims of the Qwen towers first: they are measured if the time runs out.
HEAD_DIMS = (80, 72, 64, 96, 128)
TIME_LIMIT_S = 600.0

LENGTHS = (16, 32, 64, 96, 128, 192, 256, 400, 512, 768, *(2**i for i in range(10, 17)))
COUNTS = (1, 4, 16, 64, 256, 1024)
NUM_HEADS = 16
# Larger batches than these only repeat what smaller ones say.
MAX_TOKENS = 2**17
MAX_FLOPS = 4e12

# Relative errors far above those of kernels with fp32 sums, far below a wrong result.
_GATES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
# e4m3 rounds by 0.026 on average; q, k, v, weights and perhaps the output make 0.06.
_FP8_GATE = 0.1
# Larger batches take the same code paths, and fp32 takes seconds for them.
_GATE_MAX_TOKENS = 8192

# Kernels this close are equal, so that noise makes no classes.
_TIE = 1.02
# Must win by 5 %: each new shape costs a plan of tens of milliseconds on the host.
_HANDICAPS: Mapping[str, float] = {"cudnn": 1.05, "cudnn_fp8": 1.05}

# Slow where most of many sequences are empty, which no measurement here has: it starts
# blocks for all of them, and each looks through all. In Qwen2-VL's CUDA graph a 64x64
# image took 23.0 ms, with FlashAttention 3 16.2.
_FOR_FEW: frozenset[KernelName] = frozenset({"flash_attn_4"})

# Above twice the L2 cache of any GPU.
_FLUSH_BYTES = 256 * 2**20
_BUDGET_MS = 20.0
_LEAST_ROUNDS = 4
_MOST_ROUNDS = 24

Run = Callable[[], torch.Tensor]
_T = TypeVar("_T")


class TuneError(ValueError):
    """Nothing can be tuned; the message says what to change."""


class WrongResultError(RuntimeError):
    """A kernel's output is too far from fp32."""


class TimeIsUpError(RuntimeError):
    """The time limit passed."""


class Cell(NamedTuple):
    """A batch of equal sequences.

    Attributes:
        longest: Length of each sequence, in tokens.
        num_seqs: Number of sequences.
    """

    longest: int
    num_seqs: int

    def __str__(self) -> str:
        return f"{self.num_seqs} x {self.longest} tokens"


class Clock(Protocol):
    """Prepares calls and times them; a test has its own."""

    def prepare(self, run: Run) -> Run:
        """Make a call ready for being timed; it then returns its output as before."""

    def median_us(self, runs: Mapping[KernelName, Run]) -> dict[KernelName, float]:
        """Return each prepared call's median time in microseconds."""


@dataclass(frozen=True)
class Options:
    """What to measure, and where the table goes.

    Attributes:
        dtypes: Keys of `DTYPES`, comma-separated.
        head_dims: Head dims in elements, comma-separated.
        output: The table's file; None for this GPU's file in the user's folder.
        time_limit_s: Seconds until what is not measured yet is left out.
    """

    dtypes: str = ",".join(DTYPES)
    head_dims: str = ",".join(map(str, HEAD_DIMS))
    output: Path | None = None
    time_limit_s: float = TIME_LIMIT_S

    def combinations(self) -> list[tuple[torch.dtype, int]]:
        """Return dtypes and head dims in the order in which they are measured.

        Raises:
            TuneError: A name or number is not valid.
        """
        names = [name.strip() for name in self.dtypes.split(",")]
        for name in names:
            if name not in DTYPES:
                raise TuneError(f"--dtypes has {name!r}: use {' or '.join(DTYPES)}")
        dims = [text.strip() for text in self.head_dims.split(",")]
        for text in dims:
            if not text.isdecimal() or int(text) % 8 or not 8 <= int(text) <= 256:
                raise TuneError(
                    f"--head-dims has {text!r}: use multiples of 8 from 8 to 256"
                )
        return [
            (DTYPES[name], int(text))
            for name in dict.fromkeys(names)
            for text in dict.fromkeys(dims)
        ]

    def command(self) -> str:
        """Return the command that measures the same again."""
        return (
            f"vllm-flashinfer-vit tune --dtypes {self.dtypes.replace(' ', '')} "
            f"--head-dims {self.head_dims.replace(' ', '')}"
        )


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
        TuneError: There is no GPU, an option is not valid, or nothing was measured.
        OSError: The file cannot be written.
    """
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
    device = torch.device("cuda:0")
    table = build_table(options, stack, GraphClock(device), device, console)
    tuned.write(table, path)
    return Report(path, table)


def build_table(
    options: Options,
    stack: Stack,
    clock: Clock,
    device: torch.device,
    console: Console,
    lengths: Sequence[int] = LENGTHS,
    counts: Sequence[int] = COUNTS,
) -> Table:
    """Measure each dtype and head dim and derive its classes.

    Args:
        options: What to measure.
        stack: What the machine has.
        clock: The clock.
        device: Where to measure.
        console: For the progress bar.
        lengths: Longest sequences to measure, ascending, in tokens.
        counts: Numbers of sequences to measure.

    Raises:
        TuneError: Nothing could be measured, or not within the time limit.
    """
    until = time.monotonic() + options.time_limit_s
    measurements: list[Measurement] = []
    classes: dict[str, tuple[Class, ...]] = {}
    left_out: list[str] = []
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with bar, torch.inference_mode():
        plans = [(*c, grid(c[1], lengths, counts)) for c in options.combinations()]
        task = bar.add_task("", total=sum(len(cells) for *_, cells in plans))
        for dtype, head_dim, cells in plans:
            name = tuned.key(_name(dtype), head_dim)

            def advance(cell: Cell, name: str = name) -> None:
                if time.monotonic() > until:
                    raise TimeIsUpError(
                        f"the time limit of {options.time_limit_s:g} s passed before "
                        "it was measured; raise --time-limit"
                    )
                bar.update(task, advance=1, description=f"{name}, {cell}")

            try:
                kernels = candidates(stack, dtype, head_dim)
                rows, failures = measure(
                    dtype, head_dim, kernels, cells, clock, device, advance
                )
                left_out += [f"{name}: {failure}" for failure in failures]
                classes[name] = derive_classes(rows)
                measurements += rows
            except (TimeIsUpError, TuneError) as error:
                left_out.append(f"{name}: {error}")
    if not classes:
        raise TuneError(f"no choice could be measured: {'; '.join(left_out)}")
    return Table(
        _made_by(stack, options.command()),
        classes,
        tuple(measurements),
        tuple(left_out),
    )


def _made_by(stack: Stack, command: str) -> dict[str, Any]:
    gpu = stack.gpus[0]
    return {
        "command": command,
        "version": __version__,
        "gpu": gpu.name,
        "capability": ".".join(map(str, gpu.capability)),
        "driver": stack.driver or "unknown",
        "vllm": stack.vllm or "unknown",
        "torch": torch.__version__,
        "triton": stack.triton or "none",
        "flashinfer": stack.flashinfer or "none",
        "cudnn": format_cudnn(stack.cudnn_backend),
    }


def candidates(stack: Stack, dtype: torch.dtype, head_dim: int) -> list[KernelName]:
    """Return the kernels to compare; plain PyTorch is no candidate on a GPU.

    For FP8 layers these are the kernels of bf16 and those of FP8.

    Raises:
        TuneError: No FP8 kernel can run, so there is nothing to choose for FP8 layers.
    """
    found = [
        kernel
        for kernel in KERNEL_NAMES
        if not kernel.startswith("reference")
        and kernel_verdict(kernel, stack, head_dim, _dtype_of(kernel, dtype)).ok
    ]
    if dtype == torch.float8_e4m3fn and not FP8_KERNELS.intersection(found):
        raise TuneError("no FP8 kernel runs on this GPU")
    return found


def _dtype_of(kernel: KernelName, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a kernel attends in, in layers of a dtype."""
    if dtype == torch.float8_e4m3fn and kernel not in FP8_KERNELS:
        return torch.bfloat16
    return dtype


def grid(
    head_dim: int, lengths: Sequence[int] = LENGTHS, counts: Sequence[int] = COUNTS
) -> list[Cell]:
    """Return the batches to measure, shortest sequences first."""
    return [
        Cell(longest, num_seqs)
        for longest in lengths
        for num_seqs in counts
        if num_seqs == counts[0]
        or (
            longest * num_seqs <= MAX_TOKENS
            and 4 * NUM_HEADS * head_dim * longest**2 * num_seqs <= MAX_FLOPS
        )
    ]


def measure(
    dtype: torch.dtype,
    head_dim: int,
    kernels: Sequence[KernelName],
    cells: Sequence[Cell],
    clock: Clock,
    device: torch.device,
    advance: Callable[[Cell], None] = lambda cell: None,
) -> tuple[list[Measurement], list[str]]:
    """Check and time kernels on every batch.

    A kernel that fails to run is not tried any more; one whose output is wrong loses
    the times that it has, too. A batch that the memory does not hold is skipped.

    Args:
        dtype: Activation dtype; e4m3 for FP8 layers, whose activations are bf16 here.
        head_dim: Head dim in elements.
        kernels: The kernels to compare.
        cells: Batches, shortest sequences first.
        clock: The clock.
        device: Where to measure.
        advance: Called before each batch.

    Returns:
        The measurements, and what was left out and why.
    """
    times: dict[Cell, dict[KernelName, float]] = {}
    left_out: list[str] = []
    trusted = list(kernels)
    for cell in cells:
        advance(cell)
        try:
            drawn = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
            batch = _Batch.draw(cell, drawn, head_dim, device)
            failures, times[cell] = _measure_batch(batch, trusted, clock)
        except torch.OutOfMemoryError:
            left_out.append(f"{cell}: out of memory")
            continue
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
        for failure in failures:
            trusted.remove(failure.kernel)
            left_out.append(f"{failure.kernel} from {cell} on: {failure.reason}")
            if failure.is_wrong:
                for taken in times.values():
                    taken.pop(failure.kernel, None)
    rows = [
        Measurement(
            _name(dtype),
            head_dim,
            *cell,
            {kernel: round(us, 2) for kernel, us in taken.items()},
        )
        for cell, taken in times.items()
        if taken
    ]
    return rows, left_out


class _Failure(NamedTuple):
    kernel: KernelName
    reason: str
    is_wrong: bool


def _measure_batch(
    batch: "_Batch", kernels: Sequence[KernelName], clock: Clock
) -> tuple[list[_Failure], dict[KernelName, float]]:
    """Check and time kernels; the graphs and their memory go when it returns."""
    longest = int(batch.max_seqlen)
    expected = batch.in_fp32() if batch.q.shape[0] <= _GATE_MAX_TOKENS else None
    runs: dict[KernelName, Run] = {}
    failures = []
    for kernel in kernels:
        if longest > SERVES_UP_TO.get(kernel, longest):
            continue
        try:
            ready = clock.prepare(batch.call(kernel))
            if expected is not None:
                is_fp8 = kernel in FP8_KERNELS
                limit = _FP8_GATE if is_fp8 else _GATES[batch.q.dtype]
                _check(ready(), expected, limit)
            runs[kernel] = ready
        except torch.OutOfMemoryError:
            raise
        # A kernel may fail in any way; the others are measured without it.
        except Exception as error:
            lines = str(error).strip().splitlines() or ["no message"]
            reason = f"{type(error).__name__}: {lines[0]}"
            is_wrong = isinstance(error, WrongResultError)
            failures.append(_Failure(kernel, reason, is_wrong))
            if batch.q.is_cuda:
                # Raises if every further call of this process would fail.
                torch.cuda.synchronize()
    return failures, clock.median_us(runs) if runs else {}


def derive_classes(measurements: Sequence[Measurement]) -> tuple[Class, ...]:
    """Choose the fewest classes whose kernel is nowhere noticeably slower than another.

    Kernels are compared at each measured length by the geometric mean over the numbers
    of sequences; those of FP8, which cost precision, by the number that suits them
    least. A length between two measured ones takes the longer one's kernel. Where a
    class has one of `_FOR_FEW`, many sequences have the fastest of the others.

    Args:
        measurements: Of one dtype and head dim.

    Raises:
        TuneError: No kernel was measured that takes sequences of any length.
    """
    slowdowns: dict[int, dict[KernelName, float]] = {}
    for longest, means in _means_by_length(measurements):
        best = min(means.values())
        slowdowns[longest] = {k: us / best for k, us in means.items()}
    # What serves the longest measured sequences serves all longer ones.
    while slowdowns:
        longest, last = slowdowns.popitem()
        unbounded = {k: s for k, s in last.items() if k not in SERVES_UP_TO}
        if unbounded:
            best = min(unbounded.values())
            slowdowns[longest] = {k: s / best for k, s in unbounded.items()}
            break
    if not slowdowns:
        raise TuneError("no kernel that takes sequences of any length was measured")

    classes: list[Class] = []
    # Kernels that serve every length since the last class, with their slowdowns, and
    # the slowdowns of all kernels at these lengths.
    shared: dict[KernelName, float] = {}
    members: list[dict[KernelName, float]] = []
    end = 0
    for longest, by_kernel in slowdowns.items():
        near = {
            kernel: slowdown
            for kernel, slowdown in by_kernel.items()
            if slowdown <= (1 if kernel in _HANDICAPS else _TIE)
        }
        both = {k: shared[k] * near[k] for k in shared if k in near}
        if shared and not both:
            classes.append(_class(end, shared, members))
            members = []
        shared, end = both or near, longest
        members.append(by_kernel)
    return (*classes, _class(None, shared, members))


def _class(
    max_len: int | None,
    shared: Mapping[KernelName, float],
    members: Sequence[Mapping[KernelName, float]],
) -> Class:
    kernel = _fastest(shared)
    if kernel not in _FOR_FEW:
        return Class(max_len, kernel)
    others = {
        other: math.prod(slowdowns[other] for slowdowns in members)
        for other in members[0].keys() - _FOR_FEW - FP8_KERNELS
        if all(other in slowdowns for slowdowns in members)
    }
    return Class(max_len, kernel, _fastest(others) if others else None)


def _fastest(slowdowns: Mapping[KernelName, float]) -> KernelName:
    return min(slowdowns, key=slowdowns.__getitem__)


def _means_by_length(
    measurements: Sequence[Measurement],
) -> Iterator[tuple[int, dict[KernelName, float]]]:
    """Yield lengths, ascending, with the mean times of kernels that ran every batch."""
    ordered = sorted(measurements, key=lambda m: m.longest)
    for longest, group in groupby(ordered, key=lambda m: m.longest):
        rows = [m.us for m in group]
        ran = [name for name in rows[0] if all(name in row for row in rows)]
        means = {
            cast(KernelName, name): _HANDICAPS.get(name, 1.0)
            * statistics.geometric_mean(row[name] for row in rows)
            for name in ran
        }
        others = means.keys() - FP8_KERNELS
        for name in means.keys() & FP8_KERNELS if others else ():
            worst = max(row[name] / min(row[o] for o in others) for row in rows)
            means[name] = max(means[name], worst * min(means[o] for o in others))
        if means:
            yield longest, means


class _Batch(NamedTuple):
    """Inputs of the op: q, k and v are views of a projection `[T, 3 * H * D]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: torch.Tensor

    @classmethod
    def draw(
        cls, cell: Cell, dtype: torch.dtype, head_dim: int, device: torch.device
    ) -> "_Batch":
        """Draw the inputs of a batch; the same ones in every run."""
        random = torch.Generator(device).manual_seed(0)
        tokens = cell.longest * cell.num_seqs
        shape = (tokens, 3, NUM_HEADS, head_dim)
        qkv = torch.randn(shape, dtype=dtype, device=device, generator=random)
        angle = torch.rand(tokens, head_dim // 2, device=device, generator=random)
        angle *= 2 * math.pi
        ends = torch.arange(0, tokens + 1, cell.longest, device=device)
        q, k, v = qkv.unbind(1)
        return cls(
            q,
            k,
            v,
            cos=angle.cos().to(dtype),
            sin=angle.sin().to(dtype),
            cu_seqlens=ends.int(),
            max_seqlen=torch.tensor(cell.longest),
        )

    def call(self, kernel: KernelName) -> Run:
        """Return the call of the layer's op with a kernel."""
        from vllm_flashinfer_vit.ops.attention import attention

        scale = self.q.shape[2] ** -0.5
        plan = f"*:{kernel}"
        if kernel in FP8_KERNELS:
            return fp8_call(self, scale, plan, scale_method(kernel))
        return lambda: attention(*self, 0, scale, plan)

    def in_fp32(self) -> torch.Tensor:
        """Return what every kernel should, `[T, H, D] fp32`."""
        from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
        from vllm_flashinfer_vit.kernels.rope_ref import rope_ref

        q, k = rope_ref(self.q.float(), self.k.float(), self.cos, self.sin)
        longest, scale = int(self.max_seqlen), self.q.shape[2] ** -0.5
        return attention_ref(q, k, self.v.float(), self.cu_seqlens, longest, scale)


def scale_method(kernel: str) -> ScaleMethod:
    """Return where an FP8 kernel's scales come from if no file has them."""
    return "dynamic" if kernel == "cudnn_fp8" else "block"


def fp8_call(
    inputs: Sequence[Any], scale: float, plan: str, method: ScaleMethod
) -> Run:
    """Return the call of the op of an FP8 layer, with scales of its own.

    Args:
        inputs: q, k, v, cos, sin, cu_seqlens and max_seqlen, as for `ops.attention`.
        scale: Softmax scale.
        plan: As for `ops.attention`.
        method: Where scales come from.
    """
    from vllm_flashinfer_vit.kernels.formats import DynamicScales
    from vllm_flashinfer_vit.ops.attention import fp8_attention

    state: tuple[torch.Tensor | None, ...] = (None,) * 4
    if method == "dynamic":
        state = DynamicScales.on(inputs[0].device)
    return lambda: fp8_attention(*inputs, 0, scale, plan, method, False, *state)


def _check(out: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    error = ((out.float() - expected).norm() / expected.norm()).item()
    if not error <= limit:
        raise WrongResultError(
            f"wrong result, relative error {error:.1e} against fp32, allowed {limit}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def capture(run: Run) -> Run:
    """Run a call once, so that it compiles and plans, and record it into a CUDA graph.

    Returns:
        A call that replays the graph and returns its output buffer.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # torch.cuda.graph() would also empty the allocator's cache, at every capture.
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            output = run()
        except BaseException:
            # Ending a broken capture fails too, and would hide why.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)

    # The graph reads tensors that the call closes over, so the call must live on.
    def replay(_captured: Run = run) -> torch.Tensor:
        graph.replay()
        return output

    return replay


class GraphClock:
    """Times replays of CUDA graphs on a cold L2 cache, the calls taking turns."""

    def __init__(self, device: torch.device) -> None:
        """Make the buffer that is overwritten to empty the L2 cache."""
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def prepare(self, run: Run) -> Run:
        """Run a call once, so that it compiles and plans, and record it into a graph.

        Returns:
            A call that replays the graph and returns its output buffer.
        """
        return capture(run)

    def median_us(self, runs: Mapping[KernelName, Run]) -> dict[KernelName, float]:
        """Return each call's median time; more rounds the shorter the calls are."""
        begin = time.perf_counter()
        self._rounds(runs, 1)
        one_round_ms = (time.perf_counter() - begin) * 1e3
        wanted = int(_BUDGET_MS / one_round_ms)
        rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, wanted))
        # An even number, so that half of them run backwards.
        samples = self._rounds(runs, rounds + rounds % 2)
        return {kernel: statistics.median(us) for kernel, us in samples.items()}

    def _rounds(
        self, runs: Mapping[KernelName, Run], rounds: int
    ) -> dict[KernelName, list[float]]:
        kernels = list(runs)
        events: dict[KernelName, list[tuple[torch.cuda.Event, torch.cuda.Event]]]
        events = {kernel: [] for kernel in kernels}
        for turn in range(rounds):
            for kernel in order_of_turn(kernels, turn):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # The replay is launched while the flush still runs.
                self._flush.zero_()
                start.record()
                runs[kernel]()
                end.record()
                events[kernel].append((start, end))
        torch.cuda.synchronize()
        return {
            kernel: [start.elapsed_time(end) * 1e3 for start, end in pairs]
            for kernel, pairs in events.items()
        }


def order_of_turn(contenders: Sequence[_T], turn: int) -> list[_T]:
    """Return the order in which contenders run in a turn, the first of which is turn 0.

    A contender inherits power draw and clocks from the one before it. So every second
    turn is the one before it backwards, and every two turns begin with another one:
    within `2 * len(contenders)` turns each runs as often behind either neighbour.
    """
    first = turn // 2 % len(contenders)
    order = [*contenders[first:], *contenders[:first]]
    return order[::-1] if turn % 2 else order


def to_json(report: Report) -> dict[str, Any]:
    """Return the document that `tune --json` prints: the file's path and classes."""
    return {
        "path": str(report.path),
        "schema": tuned.SCHEMA,
        "made_by": dict(report.table.made_by),
        "left_out": list(report.table.left_out),
        "classes": {
            name: [row._asdict() for row in rows]
            for name, rows in report.table.classes.items()
        },
    }


def render(report: Report, console: Console) -> None:
    """Print the classes, what was left out, and where the table is."""
    text = TextTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("dtype", "head dim", "longest sequence", "kernel"):
        text.add_column(column)
    for name, rows in report.table.classes.items():
        dtype, _, head_dim = name.partition("/")
        for row in rows:
            length = "any" if row.max_len is None else f"up to {row.max_len}"
            text.add_row(dtype, head_dim, length, row.kernel)
            dtype = head_dim = ""
    console.print(text)
    for line in report.table.left_out:
        console.print(f"left out: {line}", markup=False, soft_wrap=True)
    gpu = report.table.made_by["gpu"]
    console.print(f"choices for {gpu} are in {report.path}", soft_wrap=True)

# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: facts of the machine, CSV rows, correctness, timing.

A time is taken on an idle device with a cold L2 cache, by CUDA events around one call:
in the modes `eager` and `compiled` from the moment when the host begins to launch, in
`graph` and `compiled_graph` around the replay of a CUDA graph. Providers take turns, so
that clocks and heat hit all alike.
"""

import csv
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from vllm_flashinfer_vit.choices.clock import order_of_turn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# An attention kernel with fp32 accumulation stays an order of magnitude below these.
GATES = {"bf16": 2e-2, "fp16": 4e-3}
# FP8 attention is off by 0.04 to 0.06 on inputs from N(0, 1).
FP8_GATE = 0.1
# Five times the L2 cache of an H200.
FLUSH_BYTES = 256 * 2**20
ROOT = Path(__file__).resolve().parent.parent

Run = Callable[[], torch.Tensor]


class WrongResultError(RuntimeError):
    """A provider's output is too far from the fp32 reference to be timed."""


@dataclass(frozen=True)
class Environment:
    """Where a row comes from; the fields are the last columns of a row.

    Attributes:
        gpu: The GPU's name, or `none`.
        vllm: Installed version, as for the next four.
        torch: See `vllm`.
        triton: See `vllm`.
        flashinfer: See `vllm`.
        quack: See `vllm`.
        cudnn: Version of the cuDNN that is loaded, not of the wheel; `none` if none is.
        commit: Short commit of the measured tree, `+dirty` if it has changes.
        command: What to type to measure again.
    """

    gpu: str
    vllm: str
    torch: str
    triton: str
    flashinfer: str
    quack: str
    cudnn: str
    commit: str
    command: str

    @classmethod
    def probe(cls, argv: Sequence[str] | None = None) -> "Environment":
        """Ask this machine; `argv` stands for `sys.argv`."""
        from vllm_flashinfer_vit.machine.probe import probe
        from vllm_flashinfer_vit.machine.versions import format_cudnn

        stack = probe()
        return cls(
            gpu=stack.gpus[0].name if stack.gpus else "none",
            vllm=stack.vllm or "none",
            torch=torch.__version__,
            triton=stack.triton or "none",
            flashinfer=stack.flashinfer or "none",
            quack=stack.quack or "none",
            cudnn=format_cudnn(stack.cudnn_backend),
            commit=commit(),
            command=command_line(sys.argv if argv is None else argv),
        )


ENVIRONMENT_COLUMNS = tuple(field.name for field in fields(Environment))
# What a measurement may depend on besides the commit.
STACK_COLUMNS = tuple(
    name for name in ENVIRONMENT_COLUMNS if name not in ("commit", "command")
)
COLUMNS = (
    "bench",
    "case",
    "provider",
    "model",
    "head_dim",
    "dtype",
    "mode",
    "p20_ms",
    "p50_ms",
    "p80_ms",
    "tflops",
    "rel_err",
    *ENVIRONMENT_COLUMNS,
)


def device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def commit() -> str:
    """Return `BENCH_COMMIT`, or what git says of the tree, or `unknown`."""
    if named := os.environ.get("BENCH_COMMIT"):
        return named

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", *args], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        # The results are no part of what is measured.
        changes = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "--short", "HEAD") + ("+dirty" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command_line(argv: Sequence[str]) -> str:
    """Return the command that repeats a run, without where it wrote what."""
    kept = []
    words = iter(argv[1:])
    for word in words:
        if word in ("--output", "--logs"):
            next(words, None)
        elif not word.startswith(("--output=", "--logs=")):
            kept.append(word)
    return shlex.join(["python", f"benchmarks/{Path(argv[0]).name}", *kept])


def results_path(name: str, gpu: str, output: str | None) -> Path:
    """Return where rows go: `output`, or the folder of this GPU's results.

    Args:
        name: The file's stem.
        gpu: The GPU's name, or `none`.
        output: What the user asked for.

    Raises:
        SystemExit: There is no GPU and no `output`; CPU times are not results.
    """
    if output is not None:
        return Path(output)
    if gpu == "none":
        raise SystemExit(
            "no GPU here: give --output; times of a CPU do not go to benchmarks/results"
        )
    folder = gpu.removeprefix("NVIDIA ").lower().replace(" ", "-")
    return ROOT / "benchmarks" / "results" / folder / f"{name}.csv"


class CsvLog:
    """Appends rows to a CSV file, each on disk before the next is measured."""

    def __init__(self, path: Path, columns: Sequence[str] = COLUMNS) -> None:
        """Open or begin the file.

        Raises:
            ValueError: The file has other columns.
        """
        self.path = path
        self._columns = tuple(columns)
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.exists() and path.stat().st_size > 0
        if begun:
            with path.open(newline="", encoding="utf-8") as file:
                header = tuple(next(csv.reader(file)))
            if header != self._columns:
                raise ValueError(
                    f"{path} has the columns {','.join(header)}, these rows have "
                    f"{','.join(self._columns)}: write to another file"
                )
        else:
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerow(self._columns)

    def add(self, row: Mapping[str, object]) -> None:
        """Append one row.

        Raises:
            ValueError: The row lacks a column or has one more.
        """
        if set(row) != set(self._columns):
            odd = sorted(set(row) ^ set(self._columns))
            raise ValueError(f"row and columns differ in {', '.join(odd)}")
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(
                row[column] for column in self._columns
            )


class Failures:
    """What did not run and why, for the end of the output."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, what: str, reason: str) -> None:
        """Note and print one failure; a line of reason is enough."""
        line = f"{what}: {reason.strip().splitlines()[0]}"
        self.lines.append(line)
        print(f"  not run: {line}", flush=True)

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """Note an exception and go on, unless the GPU is lost with it."""
        try:
            yield
        except Exception as error:
            self.add(what, f"{type(error).__name__}: {error}")
            if torch.cuda.is_initialized():
                # Raises if every further call of this process would fail.
                torch.cuda.synchronize()

    def summary(self) -> None:
        """Print every failure once more."""
        if self.lines:
            print("\nNot run:")
            for line in dict.fromkeys(self.lines):
                print(f"  {line}")


def percentiles(samples_ms: Sequence[float]) -> tuple[float, float, float]:
    """Return the 20th, 50th and 80th percentile, interpolated linearly."""
    if len(samples_ms) == 1:
        return (samples_ms[0],) * 3
    cuts = statistics.quantiles(samples_ms, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]


def attention_flops(lens: Iterable[int], num_heads: int, head_dim: int) -> int:
    """Return the floating-point operations of unpadded, non-causal attention."""
    return 4 * num_heads * head_dim * sum(length * length for length in lens)


def result_row(
    environment: Environment,
    *,
    bench: str,
    case: str,
    provider: str,
    model: str,
    head_dim: int,
    dtype: str,
    mode: str,
    samples_ms: Sequence[float],
    flops: float,
    rel_err: float,
) -> dict[str, object]:
    """Turn samples into a row of `COLUMNS`; `tflops` is `flops` over the median."""
    p20, p50, p80 = percentiles(samples_ms)
    return {
        "bench": bench,
        "case": case,
        "provider": provider,
        "model": model,
        "head_dim": head_dim,
        "dtype": dtype,
        "mode": mode,
        "p20_ms": f"{p20:.4f}",
        "p50_ms": f"{p50:.4f}",
        "p80_ms": f"{p80:.4f}",
        "tflops": f"{flops / p50 / 1e9:.4g}",
        "rel_err": f"{rel_err:.2e}",
        **asdict(environment),
    }


def print_row(row: Mapping[str, object]) -> None:
    """Print the part of a row that changes from line to line."""
    print(
        f"  {row['provider']:<20} {row['mode']:<9} {row['p50_ms']:>10} ms "
        f"[{row['p20_ms']}, {row['p80_ms']}]  {row['tflops']:>7} TFLOP/s  "
        f"rel. err. {row['rel_err']}",
        flush=True,
    )


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Return ||out - ref|| / ||ref|| over all elements, summed in fp64.

    Args:
        out: `[R, ...]`, any floating dtype.
        ref: As `out`, fp32.

    Raises:
        WrongResultError: The shapes differ.
    """
    if out.shape != ref.shape:
        raise WrongResultError(
            f"output is {tuple(out.shape)}, reference is {tuple(ref.shape)}"
        )
    off = norm = 0.0
    # In slices, since a fp64 copy of a whole output would be four times its size.
    for part, ref_part in zip(out.split(4096), ref.split(4096), strict=True):
        ref_part = ref_part.double()
        off += (part.double() - ref_part).square().sum().item()
        norm += ref_part.square().sum().item()
    return (off / norm) ** 0.5


def check_error(rel_err: float, limit: float) -> None:
    """Refuse to time a wrong kernel.

    Raises:
        WrongResultError: The error is over the limit, or not a number.
    """
    if not rel_err <= limit:
        raise WrongResultError(f"wrong result: relative error {rel_err:.2e}")


def attention_fp32(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: Sequence[int],
    scale: float,
    max_seqs: int | None = None,
    max_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend within each sequence in fp32, for all rows or for a spread of them.

    Written apart from the package's own reference, which some benchmarks time.

    Args:
        q: `[T, H, D]`, any floating dtype and strides; so are k and v.
        k: See `q`.
        v: See `q`.
        lens: Sequence lengths in tokens; their sum is at most T.
        scale: Softmax scale.
        max_seqs: Number of sequences to compute, evenly spread; None for all.
        max_rows: Number of rows of each sequence, evenly spread; None for all.

    Returns:
        The computed rows `[R] int64` and their outputs `[R, H, D] fp32`.
    """
    rows, outputs = [], []
    ends = torch.tensor([0, *lens]).cumsum(0).tolist()
    for n in _spread(len(lens), max_seqs):
        begin, length = ends[n], lens[n]
        if not length:
            continue
        keys = k[begin : begin + length].float().permute(1, 2, 0)  # [H, D, L]
        values = v[begin : begin + length].float().transpose(0, 1)  # [H, L, D]
        picked = torch.tensor(_spread(length, max_rows), device=q.device) + begin
        # Scores of one slice take at most 2 GiB.
        for part in picked.split(max(1, 2**29 // (q.shape[1] * length))):
            scores = q[part].float().transpose(0, 1) @ keys
            probs = scores.mul_(scale).softmax(-1)
            rows.append(part)
            outputs.append((probs @ values).transpose(0, 1))
    return torch.cat(rows), torch.cat(outputs)


def _spread(count: int, most: int | None) -> list[int]:
    if most is None or count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def layer_plan(
    head_dim: int, dtype: torch.dtype, forced: str | None, *, is_fp8: bool
) -> Any:
    """Return the plan of a layer on this machine.

    Args:
        head_dim: D, in elements.
        dtype: Activation dtype.
        forced: A kernel's name, or None for the package's own choice.
        is_fp8: Whether the layer attends in FP8.
    """
    from vllm_flashinfer_vit.choices.lookup import plan_of
    from vllm_flashinfer_vit.engine.selection import resolve
    from vllm_flashinfer_vit.fp8.policy import resolve_fp8
    from vllm_flashinfer_vit.settings import Settings

    look_up = resolve_fp8 if is_fp8 else resolve
    return plan_of(look_up(head_dim, dtype, forced, Settings.from_env().tuned_dir))


class Clock:
    """Times single calls on one device."""

    def __init__(self, on: torch.device) -> None:
        """Make the buffer that is overwritten to empty the L2 cache."""
        self._flush = None
        if on.type == "cuda":
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=on)

    def sample_ms(self, run: Run, mode: str) -> float:
        """Return the time of one call in milliseconds."""
        if self._flush is None:
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        # A replay is launched while the flush still runs; an eager call starts on an
        # idle device, so that the host's time to launch it counts in full.
        if not is_replay(mode):
            torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def is_replay(mode: str) -> bool:
    """Return whether a mode replays a CUDA graph."""
    return mode.endswith("graph")


def is_host(mode: str) -> bool:
    """Return whether a mode's times are those that the host spends on a call."""
    return mode.endswith("host")


def host_ms(run: Callable[[], object], calls: int = 1) -> float:
    """Return the host's time for a call, the mean over a batch of them.

    It begins on an idle device, and nothing waits for the device within the batch.
    """
    _wait_for_device()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    taken_s = time.perf_counter() - begin
    # Otherwise what comes next on this device would run beside it.
    _wait_for_device()
    return taken_s * 1e3 / calls


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rounds_within(
    one_round_ms: float, budget_s: float, least: int = 7, most: int = 100
) -> int:
    """Return how many rounds fit a time budget, within bounds."""
    return max(least, min(most, int(budget_s * 1e3 / max(one_round_ms, 1e-3))))


def take_turns(
    clock: Clock,
    runs: Mapping[str, Run],
    mode: str,
    budget_s: float,
    least: int = 7,
    most: int = 100,
) -> dict[str, list[float]]:
    """Time every provider once a round, in the order of `order_of_turn`.

    The number of rounds is even, so that half of them run backwards.

    Args:
        clock: The clock.
        runs: Calls by provider; each has run before.
        mode: As in the rows; see this module's docstring.
        budget_s: Time for all providers together, in seconds.
        least: Rounds to run even over the budget.
        most: Rounds that are enough.

    Returns:
        Samples in milliseconds by provider.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    begin = time.perf_counter()
    # Another warm-up, and what a round costs with its flushes.
    for name in names:
        clock.sample_ms(runs[name], mode)
    one_round_ms = (time.perf_counter() - begin) * 1e3
    rounds = rounds_within(one_round_ms, budget_s, least, most)
    for turn in range(rounds + rounds % 2):
        for name in order_of_turn(names, turn):
            samples[name].append(clock.sample_ms(runs[name], mode))
    return samples

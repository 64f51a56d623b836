# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks' rows say, and the CSV files that they go to."""

import csv
import fcntl
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from environment import ENVIRONMENT_COLUMNS, ROOT, Environment

# By their names in the rows.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
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
        with path.open("a+", newline="", encoding="utf-8") as file:
            # Another process may begin it just now, and add its rows.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            header = tuple(next(csv.reader(file), ()))
            if not header:
                csv.writer(file, lineterminator="\n").writerow(self._columns)
            elif header != self._columns:
                raise ValueError(
                    f"{path} has the columns {','.join(header)}, these rows have "
                    f"{','.join(self._columns)}: write to another file"
                )

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
    samples_ms: Sequence[float],
    flops: float,
    rel_err: float,
    **what: object,
) -> dict[str, object]:
    """Turn samples into a row of `COLUMNS`; `tflops` is `flops` over the median.

    `what` was measured are the columns before the times.
    """
    p20, p50, p80 = percentiles(samples_ms)
    return {
        **what,
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

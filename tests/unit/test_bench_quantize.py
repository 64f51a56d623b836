# SPDX-License-Identifier: Apache-2.0
"""What bench_quantize.py does with a graph that fails, and with one that is wrong."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _benchmarks import ENVIRONMENT

import bench_quantize
from chosen_rows import read
from csv_log import CsvLog
from failures import Failures
from op_problems import make_problem
from timing import Clock

Run = Callable[[], torch.Tensor]


def fails(run: Run) -> Run:
    raise RuntimeError("not in a graph")


def spoils(run: Run) -> Run:
    return lambda: torch.zeros_like(run())


@pytest.mark.parametrize(
    ("capture", "said"), [(fails, "not in a graph"), (spoils, "wrong result")]
)
def test_a_graph_that_fails_or_is_wrong_is_noted_and_the_rest_goes_on(
    capture: Callable[[Run], Run],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = CsvLog(tmp_path / "rows.csv", bench_quantize.BENCH_COLUMNS)
    failures, on = Failures(), torch.device("cpu")
    monkeypatch.setattr(bench_quantize, "capture", capture)
    bench_quantize.measure(
        "1x24",
        make_problem((24,), 16, torch.bfloat16, on),
        "bf16",
        argparse.Namespace(providers=["copy"], modes=["graph", "eager"], budget_s=0.01),
        ENVIRONMENT,
        log,
        failures,
        Clock(on),
    )
    assert [row["mode"] for row in read(log.path)] == ["eager"]
    (line,) = failures.lines
    assert line.startswith("1x24 D=16 bf16 copy graph: ") and said in line

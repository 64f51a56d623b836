# SPDX-License-Identifier: Apache-2.0
"""Where the benchmarks are, and rows and a file as they write them."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from csv_log import CsvLog, result_row  # noqa: E402
from environment import Environment  # noqa: E402

ENVIRONMENT = Environment(
    gpu="NVIDIA H200",
    vllm="0.25.1",
    torch="2.11.0",
    triton="3.6.0",
    flashinfer="0.6.13",
    quack="0.5.0",
    cudnn="9.19.0",
    commit="abc1234",
    command="python benchmarks/bench_encoder.py",
)


def make_row(**changes):
    arguments = {
        "bench": "encoder",
        "case": "1x4096",
        "provider": "plugin",
        "model": "Qwen/Qwen3-VL-8B-Instruct",
        "head_dim": 72,
        "dtype": "bf16",
        "mode": "graph",
        "samples_ms": [2.0, 1.0, 3.0],
        "flops": 4e12,
        "rel_err": 0.0123,
        **changes,
    }
    return result_row(ENVIRONMENT, **arguments)


def host_rows(*, tower_case="1x256", steps=("norm", "qkv", "attention")):
    towers = [
        ("stock-flash_attn", "host", 0.307),
        ("stock-flash_attn", "fused_host", 0.2),
    ]
    towers.append(("plugin", "host", 0.05))
    changes = [
        {"provider": provider, "mode": mode, "samples_ms": [p50]}
        for provider, mode, p50 in towers
    ]
    rows = [make_row(bench="tower_host", case=tower_case, **row) for row in changes]
    for index, step in enumerate(steps):
        time_ms = 0.01 * (index + 1)
        rows.append(
            make_row(bench="step_host", case=step, mode="host", samples_ms=[time_ms])
        )
    # One layer's time, and another case's tower: neither is drawn.
    rows.append(make_row(bench="host", case="1x256", mode="host", samples_ms=[0.777]))
    rows.append(
        make_row(bench="tower_host", case="1x64", mode="host", samples_ms=[0.888])
    )
    return rows


def write_rows(path, rows):
    log = CsvLog(path)
    for row in rows:
        log.add(row)
    return path

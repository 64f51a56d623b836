# SPDX-License-Identifier: Apache-2.0
"""Where the benchmarks are, and a row as they write it."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from csv_log import result_row  # noqa: E402
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

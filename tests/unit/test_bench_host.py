# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the host's time: its cases and rows, and how busy the host is."""

import contextlib
import csv
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from _benchmarks import BENCHMARKS, ENVIRONMENT

import bench_host
import contenders
import host_load
from csv_log import CsvLog
from failures import Failures


def test_sizes_of_cold_metadata_are_new():
    sizes = {}
    for case, ((_, height, width), *_) in bench_host.METADATA.items():
        sizes[case] = bench_host.other_sizes(height, width, bench_host.METADATA_SAMPLES)
        assert len(set(sizes[case])) == bench_host.METADATA_SAMPLES
        assert (height, width) not in sizes[case]
        assert all(h % 2 == w % 2 == 0 for h, w in sizes[case])
        patches = [h * w for h, w in sizes[case]]
        assert max(patches) <= 1.2 * height * width
        assert min(patches) >= 0.8 * height * width
    # What one case has shown to a process is not new to it in the other.
    assert not set(sizes["1x256"]) & set(sizes["20x400"])


def test_metadata_is_cold_once_and_warm_again_and_again(tmp_path):
    class Remote:
        def __init__(self, provider):
            self.contender = contenders.Contender.of(provider, "bf16")
            self.seen = []

        def call(self, method, known, batches):
            assert method == "metadata_ms" and known == grids
            self.seen += batches
            return [1.0] * len(batches)

    grids = bench_host.METADATA["20x400"]
    log = CsvLog(tmp_path / "host.csv")
    rows = bench_host.Rows(log, ENVIRONMENT)
    remotes = [Remote("stock-flash_attn"), Remote("plugin")]
    bench_host.time_metadata(rows, "a model", 80, remotes, "20x400", grids)
    count = bench_host.METADATA_SAMPLES
    for remote in remotes:
        cold, warm = remote.seen[:count], remote.seen[count:]
        assert len({*cold, grids}) == count + 1
        assert all(len(batch) == 20 and len(set(batch)) == 1 for batch in cold)
        assert warm == [grids] * count
    with log.path.open(newline="") as file:
        found = [(row["bench"], row["case"]) for row in csv.DictReader(file)]
    cases = ["20x400-cold"] * 2 + ["20x400-warm"] * 2
    assert found == [("metadata_host", case) for case in cases]


def test_steps_are_rows_of_their_names(monkeypatch, tmp_path):
    passes = []

    class Tower:
        spec = SimpleNamespace(patch_dim=12)
        running = staticmethod(contextlib.nullcontext)

        def encode(self, pixels, grids):
            passes.append(tuple(pixels.shape))

        def attention_layers(self):
            return {"blocks.0.attn.attn": SimpleNamespace(head_size=72)}

    def steps_of(tower, encode):
        encode()
        return {"norm": lambda: None, "qkv": lambda: None}

    monkeypatch.setattr(bench_host, "build_tower", lambda *args, **kwargs: Tower())
    args = bench_host.parse_args(["--models", "Qwen/Qwen3-VL-8B-Instruct"])
    args.batches = args.calls = 2
    log, failures = CsvLog(tmp_path / "host.csv"), Failures()
    rows = bench_host.Rows(log, ENVIRONMENT)
    bench_host.time_steps(rows, failures, args)
    # Its blocks have no programs.
    assert len(failures.lines) == 1 and not passes
    monkeypatch.setattr(bench_host, "steps_of", steps_of)
    bench_host.time_steps(rows, failures, args)
    assert passes == [(256, 12)]
    with log.path.open(newline="") as file:
        found = list(csv.DictReader(file))
    names = [(row["bench"], row["case"], row["provider"]) for row in found]
    assert names == [("step_host", step, "plugin") for step in ("norm", "qkv")]


def test_each_host_bench_takes_the_cases_that_it_has():
    args = bench_host.parse_args(["--cases", "1x256", "20x400", "4x100"])
    benches = (bench_host.CASES, bench_host.TOWERS, bench_host.METADATA)
    found = [bench_host.cases_of(known, (), args) for known in benches]
    assert found == [["1x256", "4x100"], ["1x256"], ["1x256", "20x400"]]
    args = bench_host.parse_args([])
    assert bench_host.cases_of(bench_host.TOWERS, (), args) == [
        "1x64",
        "1x256",
        "1x1024",
    ]


def test_host_cases_that_no_bench_has_are_refused(monkeypatch):
    argv = ["bench_host.py", "--smoke", "--bench", "tower", "--cases", "20x400"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="20x400: no case of tower; .* tower 1x64, 1x"):
        bench_host.main()


def test_layers_and_steps_are_of_families_that_the_package_describes(capsys):
    for bench in ("attention", "steps"):
        with pytest.raises(SystemExit):
            bench_host.parse_args(["--bench", bench, "--models", "dots.ocr"])
        assert "steps: 'dots.ocr' is no folder, and none of " in capsys.readouterr().err
    args = bench_host.parse_args(["--bench", "tower", "--models", "dots.ocr"])
    assert args.models == ["dots.ocr"]


@pytest.mark.parametrize(("busy_s", "warns"), [(1.0, False), (5.0, True)])
def test_busy_cores_are_a_warning(monkeypatch, capsys, busy_s, warns):
    # Two seconds of measuring.
    times, work = iter([10.0, 12.0]), iter([100.0, 100.0 + busy_s])
    monkeypatch.setattr(
        host_load, "time", SimpleNamespace(monotonic=lambda: next(times))
    )
    monkeypatch.setattr(host_load, "_busy_s", lambda: next(work))
    with host_load.watched_load():
        pass
    out = capsys.readouterr().out
    assert f"{busy_s / 2:.1f} busy while measuring" in out
    assert f"{len(os.sched_getaffinity(0))} cores" in out
    assert ("warning" in out) == warns


def test_only_the_cores_that_a_process_may_use_count(monkeypatch, tmp_path):
    # User, nice, system, idle, iowait, irq, softirq, steal; in ticks.
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  111 0 0 9 9 0 0 0 0 0\ncpu0 1 2 3 9 9 4 5 6 0 0\n"
        "cpu1 10 0 0 9 9 0 0 0 0 0\ncpu10 100 0 0 9 9 0 0 0 0 0\nctxt 7\n"
    )
    monkeypatch.setattr(host_load, "_STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 10})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    assert host_load._busy_s() == pytest.approx(1.21)


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU has real cases")
def test_host_benchmark_runs_on_the_cpu(tmp_path):
    output = tmp_path / "host.csv"
    script = [sys.executable, str(BENCHMARKS / "bench_host.py"), "--smoke"]
    options = ["--models", "Qwen/Qwen2.5-VL-7B-Instruct", "--depth", "1"]
    options += ["--batches", "4", "--calls", "2", "--budget-s", "0.1"]
    subprocess.run(
        [*script, *options, "--output", str(output)], check=True, timeout=300
    )
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["bench"], row["case"], row["provider"]) for row in rows] == [
        (bench, case, provider)
        for bench, case in (
            ("host", "2x24"),
            ("tower_host", "1x64"),
            ("metadata_host", "1x64-cold"),
            ("metadata_host", "1x64-warm"),
        )
        for provider in ("stock-torch_sdpa", "plugin")
    ]
    assert all(row["mode"] == "host" and row["tflops"] == "0" for row in rows)
    assert all(0 < float(row["p20_ms"]) <= float(row["p80_ms"]) for row in rows)

# SPDX-License-Identifier: Apache-2.0
"""The soak of servers: their commands, scale files and memory, and the rows."""

import asyncio
import dataclasses
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from _benchmarks import BENCHMARKS, ENVIRONMENT
from _soak import PATCH, Fake, asks
from _vllm_serve import serve_arguments

import chosen_rows
import csv_log
import failures
import plot_soak
import prune
import soak
import soak_client
import soak_memory
import soak_scales
import soak_servers
import tower_cases
from serve_inputs import NAME
from soak_client import Target
from soak_inputs import Request
from soak_memory import MemoryLog, growth
from soak_scales import Mischief, broken_promises, saves, valid_file
from vllm_flashinfer_vit.fp8 import scale_files, state
from vllm_flashinfer_vit.fp8.scale_files import QKV, ScaleError
from vllm_flashinfer_vit.machine.files import FileError
from vllm_flashinfer_vit.settings import ENV_KERNEL

MODEL = "Qwen/Qwen3-VL-8B-Instruct"


SAVED = f"INFO state.py:205] {soak_scales.SAVED}27 layers to scales.json"
NOT_SAVED = f"ERROR state.py:203] {soak_scales.NOT_SAVED}scales.json: it is damaged"


@pytest.fixture
def scales(tmp_path: Path) -> Path:
    return tmp_path / "scales.json"


def test_scale_files_are_spoiled_in_every_way(scales: Path, monkeypatch) -> None:
    monkeypatch.setattr(soak_scales.time, "sleep", lambda seconds: None)
    good = valid_file(MODEL, Path("c"))
    mischief = Mischief(scales, good, seed=0)
    found = set()
    for _ in range(200):
        mischief.step()
        content = scales.read_bytes() if scales.exists() else None
        assert content == mischief.last
        found.add(content)
    assert mischief.count == 200
    assert {good, b"", None} < found
    assert any(part and part != good and good.startswith(part) for part in found)


@pytest.mark.parametrize("model", tower_cases.MODELS)
def test_servers_that_save_into_a_spoiled_file_keep_their_promises(
    model: str, scales: Path
) -> None:
    good = valid_file(model, Path("c"))
    scales.write_bytes(good)
    (found,) = scale_files.read(scales).layers.values()
    seen = {f"visual.blocks.{i}.attn.attn": QKV(7.0, 6.0, 5.0) for i in range(3)}
    head_dims = {name: (amax, found.head_dim) for name, amax in seen.items()}
    new = scale_files.from_amax(head_dims, 1.5, state.made_by_engine("c"))
    mischief = Mischief(scales, good, seed=1)
    ended = {"saved": 0, "not saved": 0}

    def save() -> None:
        while mischief.count < 40:
            try:
                file = scale_files.save(new, scales)
            except (ScaleError, FileError):
                ended["not saved"] += 1
            else:
                assert file.layers.keys() >= seen.keys()
                ended["saved"] += 1

    with mischief.at_work(), ThreadPoolExecutor(2) as pool:
        for saving in [pool.submit(save), pool.submit(save)]:
            saving.result()
    assert min(ended.values()) > 0
    assert broken_promises(scales, mischief.last, [SAVED, NOT_SAVED]) == []


def test_broken_promises_of_servers_are_said(scales: Path) -> None:
    # Not there.
    assert broken_promises(scales, None, [SAVED]) == []
    scales.write_bytes(b"{")
    assert broken_promises(scales, b"{", [SAVED]) == []
    damaged, silent = (
        broken_promises(scales, last, [SAVED, log])
        for last, log in ((b"", NOT_SAVED), (b"{", "INFO"))
    )
    assert len(damaged) == 1 and "cannot be used" in damaged[0]
    assert silent == ["server 2: its log does not say whether scales were saved"]
    # Of two ranks.
    assert saves([f"{SAVED}\n{NOT_SAVED}", SAVED]) == (2, 1)


def test_logs_are_read_for_what_engines_say() -> None:
    source = Path(state.__file__).read_text()
    assert soak_scales.SAVED in source and soak_scales.NOT_SAVED in source


def test_errors_of_the_mischief_itself_are_raised(scales: Path) -> None:
    mischief = Mischief(scales.parent / "missing" / "scales.json", b"{}", seed=0)
    with pytest.raises(FileNotFoundError), mischief.at_work():
        time.sleep(0.5)


class TestMemory:
    def test_growth_compares_the_last_tenth_with_the_second(self) -> None:
        # A first tenth that rises, and one sample that sticks out.
        flat = [1.0] * 10 + [50.0] * 85 + [500.0, 50.0, 50.0, 50.0, 50.0]
        assert growth(flat) == 0.0
        assert growth([100.0 + i for i in range(100)]) > 50
        assert growth([1.0] * 9) is None

    def test_a_servers_memory_is_that_of_its_tree(self) -> None:
        code = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
        child = "x = bytearray(200 * 2**20); print(1, flush=True); input()"
        process = subprocess.Popen(
            [sys.executable, "-c", code.format(child)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        pids = {"1": process.pid}
        log = MemoryLog(pids, lambda: ({process.pid: 3 * 2**30, 1: 2**40}, 2**41))
        log.sample(7)
        process.communicate(b"\n")
        log.sample(8)
        series = log.series["1"]
        assert log.is_per_process
        assert series.done == [7, 8]
        assert series.device_mib[0] == 3 * 1024
        assert series.rss_mib[0] > 200 and series.rss_mib[1] == 0

    def test_where_no_process_is_named_all_that_is_in_use_counts(self) -> None:
        log = MemoryLog({"1": os.getpid()}, lambda: ({0: 5}, 2**30))
        log.sample(0)
        assert not log.is_per_process
        assert log.series["1"].device_mib == [1024]


def server_commands(*given: str) -> list[list[str]]:
    args = soak.parse_args([*given])
    found = soak_servers.commands(Path("c"), MODEL, "0.33.0", args)
    return [command[command.index("serve") + 1 :] for _, _, command in found]


def test_vllm_takes_the_commands(tmp_path: Path, monkeypatch) -> None:
    more = "--tensor-parallel-size 2 --mm-encoder-tp-mode data"
    *servers, judge = map(serve_arguments, server_commands("--serve-args", more))
    assert len(servers) == 2
    assert len({args.port for args in (*servers, judge)}) == 3
    for args in servers:
        assert args.mm_encoder_attn_backend == "FLASHINFER"
        assert args.mm_encoder_attn_dtype == "fp8"
        assert args.mm_encoder_fp8_scale_save_path == "c/scales/scales.json"
        assert (args.tensor_parallel_size, args.mm_encoder_tp_mode) == (2, "data")
        assert args.compilation_config.cudagraph_mm_encoder
    assert judge.dtype == "float32" and judge.enforce_eager
    assert judge.tensor_parallel_size == 1
    # Of an option that is given twice.
    for args in (*servers, judge):
        assert args.load_format == "auto"
        assert args.kv_cache_memory_bytes == 2**30
        assert args.served_model_name == [NAME]


def test_kernels_that_were_built_after_start_are_counted() -> None:
    line = (
        "WARNING jit_monitor.py:150] {} JIT compilation during inference: {}. This "
        "causes a latency spike; consider extending warmup to cover this shape/config."
    )
    log = "\n".join(
        ["INFO Kernel JIT monitor activated", line.format("Triton kernel", "_rope")]
    )
    cute = line.format("CuTeDSL", "GemmSm90 (x=1)")
    assert soak.built([log, cute]) == ["_rope", "GemmSm90"]


def test_what_is_wrong_is_said() -> None:
    grown = {"rss": 3.0, "device": 0.0}
    good = soak_client.Tally(sent=9, differences=[0.1])
    assert soak.complaints(good, grown) == []
    bad = soak_client.Tally(sent=9, faults=["lost"], differences=[9.0])
    lines = soak.complaints(bad, {"rss": 11.0, "device": 6.0})
    assert len(lines) == 4
    unknown = soak.complaints(good, {"rss": 3.0, "device": math.nan})
    assert unknown == [
        "device: too few samples to tell whether it grew: send more --requests"
    ]
    assert "no answer was compared" in soak.complaints(soak_client.Tally(), grown)[0]


@pytest.fixture
def running() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_memory_is_that_of_the_gpus_that_the_servers_see(monkeypatch) -> None:
    from vllm.third_party import pynvml

    used = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(used=10**index),
        "nvmlDeviceGetComputeRunningProcesses": lambda index: [
            SimpleNamespace(pid=index, usedGpuMemory=5)
        ],
    }
    for name, function in used.items():
        monkeypatch.setattr(pynvml, name, function)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert soak_memory.on_devices() == ({0: 5, 2: 5}, 101)


def test_a_soak_of_servers_that_answer_as_they_should(
    running: subprocess.Popen[bytes], monkeypatch
) -> None:
    monkeypatch.setattr(soak, "SAMPLE_S", 0.01)
    memory = MemoryLog({"1": running.pid}, lambda: ({running.pid: 2**30}, 2**31))

    def small(number: int) -> Request:
        return asks(number=number, is_sampled=number % 5 == 0)

    async def run() -> tuple[soak_client.Tally, float]:
        fakes = [Fake(), Fake(), Fake()]
        *servers, judge = [await fake.start() for fake in fakes]
        target = Target(servers, judge, PATCH)
        with ThreadPoolExecutor(2) as drawing:
            await soak.warm_up(target, drawing)
            warm = [soak.WARM_UP + soak.CROWD] * 2 + [soak.WARM_UP]
            assert [fake.asked for fake in fakes] == warm
            found = await soak.soak(
                target,
                map(small, range(40)),
                8,
                time.monotonic() + 60,
                memory,
                drawing,
            )
        for fake in fakes:
            await fake.stop()
        # One more at the end; the judge sees the samples alone.
        asked = [fake.asked - of for fake, of in zip(fakes, warm, strict=True)]
        assert asked == [21, 21, 8]
        return found

    tally, seconds = asyncio.run(run())
    assert (tally.sent, tally.answered, tally.faults) == (40, 40, [])
    row = soak.row_of(tally, seconds, soak.growths(memory))
    assert (row["sampled"], row["wrong"], row["worst_diff"]) == (8, 0, "0.0000")
    (series,) = soak.memory_rows(memory)
    assert len(series["done"].split()) == len(series["rss_mib"].split()) >= 1
    assert set(row) < set(soak.COLUMNS) and set(series) < set(soak.MEMORY_COLUMNS)


def test_a_server_that_hangs_at_warm_up_ends_the_soak(monkeypatch) -> None:
    monkeypatch.setattr(soak, "START_TIMEOUT_S", 0.2)

    async def run() -> None:
        fakes = [Fake(), Fake(answers=lambda: asyncio.sleep(60))]
        server, judge = [await fake.start() for fake in fakes]
        with ThreadPoolExecutor(1) as drawing:
            await soak.warm_up(Target([server], judge, PATCH), drawing)

    with pytest.raises(RuntimeError, match="no answer in 0 s at warm-up"):
        asyncio.run(asyncio.wait_for(run(), 30))


@pytest.fixture
def fakes() -> Iterator[tuple[list[Fake], list[str]]]:
    """Two servers and a judge that answer from a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = [Fake(), Fake(), Fake()]
    starts = [asyncio.run_coroutine_threadsafe(fake.start(), loop) for fake in servers]
    yield servers, [start.result(10) for start in starts]
    for fake in servers:
        asyncio.run_coroutine_threadsafe(fake.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


class Watched(Mischief):
    """Notes how many requests a server had before each change."""

    asked: Callable[[], int]
    before: ClassVar[list[int]]

    def step(self) -> None:
        self.before.append(self.asked())
        super().step()


@pytest.mark.parametrize("crashed", [False, True])
def test_a_models_soak_ends_with_its_rows(
    crashed: bool, fakes, scales: Path, running, tmp_path: Path, monkeypatch
) -> None:
    servers, urls = fakes
    held = [
        SimpleNamespace(
            url=url,
            pid=running.pid,
            port=port,
            has_ended=crashed and port == 8301,
            log=lambda: f"{SAVED}\nJIT compilation during inference: _early. This",
        )
        for port, url in enumerate(urls, 8300)
    ]

    @contextmanager
    def serving(*given: object) -> Iterator[list[SimpleNamespace]]:
        yield held

    # Once; a process that starts grows.
    monkeypatch.setattr(soak, "SAMPLE_S", 60.0)
    monkeypatch.setattr(soak, "write_checkpoint", lambda *given: None)
    monkeypatch.setattr(soak, "scale_file", lambda checkpoint: scales)
    monkeypatch.setattr(soak, "serving", serving)
    monkeypatch.setattr(Watched, "asked", lambda self: servers[0].asked, raising=False)
    monkeypatch.setattr(Watched, "before", [], raising=False)
    monkeypatch.setattr(soak, "Mischief", Watched)
    monkeypatch.setattr(
        soak, "draw_request", lambda seed, i, patch: asks(number=i, is_sampled=i < 2)
    )
    monkeypatch.setattr(soak_memory.MemoryLog.__init__, "__defaults__", (no_gpu,))
    # Too short to tell.
    monkeypatch.setattr(soak, "growths", lambda memory: {"rss": 0.0, "device": 0.0})
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    args = soak.parse_args(["--requests", "30"])
    logs = {
        "soak": csv_log.CsvLog(tmp_path / "soak.csv", soak.COLUMNS),
        "memory": csv_log.CsvLog(tmp_path / "memory.csv", soak.MEMORY_COLUMNS),
    }
    failed = failures.Failures()
    soak.soak_model(MODEL, args, logs, failed, ENVIRONMENT)
    (row,) = chosen_rows.read(logs["soak"].path)
    assert (row["sent"], row["answered"], row["sampled"]) == ("30", "30", "2")
    assert row["serve_args"] == "OMP_NUM_THREADS=3"
    # What the log said before does not count.
    assert row["built_after_start"] == "0"
    # Engines save while they warm up.
    assert Watched.before[0] <= 1
    assert Watched.before[-1] <= soak.WARM_UP + soak.CROWD
    assert int(row["scale_file_changes"]) == len(Watched.before) > 1
    assert (row["scales_saved"], row["scales_not_saved"]) == ("2", "0")
    assert [r["server"] for r in chosen_rows.read(logs["memory"].path)] == ["1", "2"]
    expected = [f"{MODEL}: the server on 8301 has ended"] if crashed else []
    assert failed.lines == expected
    assert row["faults"] == str(len(expected))


def no_gpu() -> tuple[dict[int, int], int]:
    return {}, 0


def memory_row(server: str, **changes: object) -> dict[str, object]:
    measured = soak_memory.Series([0, 50, 99], [2048, 3072, 3072], [900, 900, 900])
    log = MemoryLog({server: os.getpid()}, lambda: ({}, 0))
    log.series[server] = measured
    (row,) = soak.memory_rows(log)
    what = {"bench": "soak_memory", "provider": "plugin-fp8", "mode": "graph"}
    what |= {"model": MODEL, "seed": 0, "requests": 99, "serve_args": ""}
    return {**what, **row, **dataclasses.asdict(ENVIRONMENT), **changes}


def test_memory_is_drawn_from_its_rows(tmp_path: Path, monkeypatch) -> None:
    log = csv_log.CsvLog(tmp_path / "soak_memory.csv", soak.MEMORY_COLUMNS)
    for server in ("1", "2", "1"):
        log.add(memory_row(server))
    kept = prune.newest_rows(chosen_rows.read(log.path))
    assert [row["server"] for row in kept] == ["2", "1"]
    target = tmp_path / "soak.svg"
    monkeypatch.setattr(sys, "argv", ["plot_soak.py", str(log.path), str(target)])
    plot_soak.main()
    text = target.read_text()
    assert "plugin-fp8, server 2" in text and "host memory, GiB" in text


@pytest.mark.extended
def test_commands_are_printed_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "soak.py", "--print", "--models", MODEL],
        capture_output=True,
        text=True,
        check=True,
    )
    # An older vLLM logs to the same stream.
    *servers, judge = (x for x in done.stdout.splitlines() if x.startswith("env "))
    assert len(servers) == 2
    for line in servers:
        variables = line.partition(" vllm serve ")[0].split()
        assert {"VLLM_PLUGINS=flashinfer_vit", f"{ENV_KERNEL}=auto"} <= set(variables)
    assert "VLLM_PLUGINS= vllm serve" in judge

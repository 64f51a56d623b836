# SPDX-License-Identifier: Apache-2.0
"""The benchmark of requests' lives: their parts, its turns, and the figure."""

import argparse
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from _benchmarks import ENVIRONMENT

import bench_request
import plot_request
from bench_request import STAGES, WHOLE, Engine
from chosen_rows import read
from csv_log import CsvLog
from failures import Failures
from remote import Remote, RemoteError
from request_trace import PREPARATION, TRACED_STAGES, traced_stages
from setups import Setup
from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform

MODEL = "Qwen/Qwen3-VL-8B-Instruct"
SAID = {
    "apply_hf_processor_secs": [0.02],
    "preprocessor_total_secs": [0.03],
    # Two calls of the encoder.
    "encoder_forward_secs": [0.004, 0.001],
    "num_encoder_calls": [2],
}


def test_the_parts_are_the_whole() -> None:
    found = bench_request.stages(100.0, 7.0, 30.0, SAID)
    assert list(found) == [*STAGES, WHOLE]
    assert found == pytest.approx(
        {
            "decode": 7.0,
            "processor": 20.0,
            "around the processor": 10.0,
            "encoder": 5.0,
            "language model": 30.0,
            "rest": 28.0,
            "whole": 100.0,
        }
    )
    assert TRACED_STAGES[: len(PREPARATION)] == PREPARATION == STAGES[:3]
    without = {key: value for key, value in SAID.items() if "encoder" not in key}
    with pytest.raises(RuntimeError, match="'encoder_forward_secs'"):
        bench_request.stages(1.0, 1.0, 1.0, without)


def test_the_commands_of_its_docstring_are_ones_that_vllm_takes() -> None:
    use_cpu_platform()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert bench_request.__doc__ is not None
    lines = bench_request.__doc__.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if "python " in line]
    assert len(commands) == 2
    for command in commands:
        args = bench_request.parse_args(command[2:])
        found = parser.parse_args(shlex.split(args.engine_args))
        # vLLM prepares no images on a GPU that also has the language model.
        assert "device" not in (found.mm_processor_kwargs or {})


def test_an_engine_gets_as_much_text_as_a_request_has_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def chat(
        messages: list[dict[str, object]], *_: object, **__: object
    ) -> list[object]:
        asked.append(messages[0]["content"])
        return [SimpleNamespace(prompt_token_ids=[1] * 12)]

    def generate(prompt: dict[str, list[int]], *_: object, **__: object) -> None:
        asked.append(len(prompt["prompt_token_ids"]))

    engine = Engine.__new__(Engine)
    engine._llm = SimpleNamespace(chat=chat, generate=generate, llm_engine=None)
    monkeypatch.setattr("vllm.multimodal.utils.fetch_image", asked.append)
    monkeypatch.setattr(
        "vllm.benchmarks.mm_processor.collect_mm_processor_stats", lambda _: SAID
    )
    content = [
        {"type": "text", "text": "?"},
        {"type": "image_url", "image_url": {"url": "data:"}},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"content": content}) + "\n")
    (found,) = engine.measure(str(path))
    assert asked == ["data:", content, 12]
    assert found["encoder"] == pytest.approx(5.0)


def event(name: str, category: str, start: float, end: float) -> dict[str, object]:
    """Return one of a trace, given milliseconds after `BASE_NS`."""
    span = {"ts": 1e3 * start, "dur": 1e3 * (end - start)}
    return {"ph": "X", "name": name, "cat": category, **span}


BASE_NS = 1_790_000_000_000_000_000
EVENTS = [
    event("cudaDeviceSynchronize", "cuda_runtime", 1, 2),  # of the profiler's start
    event("execute_context_1(3844)_generation_0(0)", "user_annotation", 50, 69),
    event("cudaDeviceSynchronize", "cuda_runtime", 51, 52),
    event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 53, 55),
    event("gemm", "kernel", 54, 58),
    event("attention", "kernel", 59, 60),
    event("Memset (Device)", "gpu_memset", 59, 59.5),
    event("cudaDeviceSynchronize", "cuda_runtime", 53, 61),
    event("gemm", "kernel", 63, 68),
    event("cudaDeviceSynchronize", "cuda_runtime", 90, 91),
    {"ph": "M", "name": "process_name"},
]


def test_the_stages_of_a_trace_are_the_whole() -> None:
    trace = {"baseTimeNanoseconds": BASE_NS, "traceEvents": EVENTS}
    prepared = dict(zip(PREPARATION, (7.0, 20.0, 10.0), strict=True))
    # Asked 10 ms after the trace's beginning, answered 70 ms later.
    begin, end = BASE_NS + 10_000_000, BASE_NS + 80_000_000
    found = traced_stages(trace, begin, end, prepared)
    assert tuple(found) == TRACED_STAGES
    assert sum(found.values()) == pytest.approx(70.0)
    assert found == pytest.approx(
        {
            **prepared,
            "transport": 5.0,
            "copy to the GPU": 2.0,
            "encoder": 4.0,
            "encoder, GPU idle": 3.0,
            "language model": 5.0,
            "rest": 14.0,
        }
    )


@pytest.mark.parametrize(
    ("events", "said"),
    [(EVENTS[2:], "has no step"), (EVENTS[:5], "1 waits for the device in its step")],
)
def test_a_trace_of_another_engine_is_refused(events: list[object], said: str) -> None:
    trace = {"baseTimeNanoseconds": BASE_NS, "traceEvents": events}
    with pytest.raises(RuntimeError, match=said):
        traced_stages(trace, BASE_NS, BASE_NS, dict.fromkeys(PREPARATION, 0.0))


def test_an_engine_is_watched_for_one_request_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def stop_profile() -> None:
        calls.append("stop")
        trace = {"baseTimeNanoseconds": BASE_NS, "traceEvents": EVENTS}
        (tmp_path / "worker.pt.trace.json").write_text(json.dumps(trace))

    def chat(*_: object, **__: object) -> list[object]:
        calls.append("ask")
        return [SimpleNamespace(prompt_token_ids=[1])]

    engine = Engine.__new__(Engine)
    engine._traces = tmp_path
    engine._llm = SimpleNamespace(
        chat=chat,
        start_profile=lambda: calls.append("start"),
        stop_profile=stop_profile,
        llm_engine=None,
    )
    monkeypatch.setattr(
        "vllm.benchmarks.mm_processor.collect_mm_processor_stats", lambda _: SAID
    )
    path = tmp_path / "requests.jsonl"
    path.write_text((json.dumps({"content": []}) + "\n") * 3)
    found = engine.trace(str(path))
    # The first one warms up the profiler.
    assert calls == ["start", "ask", "stop"] * 3
    assert [list(stages) for stages in found] == [[*TRACED_STAGES, WHOLE]] * 2
    assert not list(tmp_path.glob("*.json"))
    engine._llm.stop_profile = lambda: None
    with pytest.raises(RuntimeError, match="written 0 traces"):
        engine.trace(str(path))


class Fake:
    """Takes the place of engines."""

    def __init__(self) -> None:
        self.requests: list[int] = []

    def call(self, method: str, path: str) -> list[dict[str, float]]:
        count = len(Path(path).read_text().splitlines())
        self.requests.append(count)
        if method == "trace":
            return [dict.fromkeys((*TRACED_STAGES, WHOLE), 1.0)] * (count - 1)
        assert method == "measure"
        if len(self.requests) == 3:
            raise RemoteError("out of memory")
        return [dict.fromkeys((*STAGES, WHOLE), float(count))] * count


def test_rows_and_their_figure(tmp_path: Path) -> None:
    setups = [Setup.of("stock-flash_attn:graph"), Setup.of("plugin:graph")]
    engines = {setup: Fake() for setup in setups}
    args = bench_request.parse_args(
        ["--workloads=photograph", "--requests=3", "--turns=2", "--traces=1"]
    )
    log = CsvLog(tmp_path / "request.csv", bench_request.COLUMNS)
    failures = Failures()
    bench_request.measure(
        engines,  # type: ignore[arg-type]
        tmp_path,
        MODEL,
        args,
        log,
        failures,
        ENVIRONMENT,
    )
    # The first turn, of two requests, warms up.
    assert engines[setups[0]].requests == [2, 3, 3, 2]
    assert len(failures.lines) == 2
    found = read(log.path)
    for bench, stages in bench_request.BENCHES.items():
        rows = [row for row in found if row["bench"] == bench]
        assert [row["stage"] for row in rows] == [*stages, WHOLE] * 2
        count = "1" if bench == "trace" else "3"
        assert {row["requests"] for row in rows} == {count}
        assert {row["p50_ms"] for row in rows} == {f"{count}.00"}
        figure = plot_request.draw_request(rows)
        (axes,) = figure.axes
        assert len(axes.patches) == 2 * len(stages)


def test_engines_beside_each_other_are_of_one_run() -> None:
    row = {"model": MODEL, "mode": "graph", "stage": WHOLE, "p50_ms": "1"}
    row["command"] = ""
    old, new = (
        [
            {**row, "provider": provider, "workload": "page", "commit": commit}
            for provider in providers
        ]
        for commit, providers in (("old", ("stock", "plugin")), ("new", ("plugin",)))
    )
    other = {**old[0], "workload": "thumbnails"}
    assert plot_request.last_of_stages([*old, other, *new]) == [*new, other]


def test_an_engines_own_processes_end_with_it() -> None:
    ended: list[str] = []
    core = SimpleNamespace(shutdown=lambda: ended.append("core"))
    engine = Engine.__new__(Engine)
    engine._llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    with pytest.raises(EOFError), engine.running():
        assert not ended
        raise EOFError
    assert ended == ["core"]


def test_a_process_answers_and_its_errors_arrive() -> None:
    remote = Remote(argparse.Namespace, (), {}, 60.0)
    with pytest.raises(RemoteError, match="running"):
        remote.wait()
    remote.close()

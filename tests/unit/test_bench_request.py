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


class Fake:
    """Takes the place of engines."""

    def __init__(self) -> None:
        self.requests: list[int] = []

    def call(self, method: str, path: str) -> list[dict[str, float]]:
        assert method == "measure"
        count = len(Path(path).read_text().splitlines())
        self.requests.append(count)
        if len(self.requests) == 3:
            raise RemoteError("out of memory")
        return [dict.fromkeys((*STAGES, WHOLE), float(count))] * count


def test_rows_and_their_figure(tmp_path: Path) -> None:
    setups = [Setup.of("stock-flash_attn:graph"), Setup.of("plugin:graph")]
    engines = {setup: Fake() for setup in setups}
    args = bench_request.parse_args(
        ["--workloads", "photograph", "--requests", "3", "--turns", "2"]
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
    assert engines[setups[0]].requests == [2, 3, 3]
    assert len(failures.lines) == 2
    rows = read(log.path)
    assert len(rows) == 2 * (len(STAGES) + 1)
    assert {row["requests"] for row in rows} == {"3"}
    assert {row["p50_ms"] for row in rows} == {"3.00"}
    figure = plot_request.draw_request(rows)
    (axes,) = figure.axes
    assert len(axes.patches) == 2 * len(STAGES)


def test_a_process_answers_and_its_errors_arrive() -> None:
    remote = Remote(argparse.Namespace, (), {}, 60.0)
    with pytest.raises(RemoteError, match="running"):
        remote.wait()
    remote.close()

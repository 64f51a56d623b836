# SPDX-License-Identifier: Apache-2.0
"""The benchmark of servers: their commands, what they are sent, and the rows."""

import base64
import io
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from _benchmarks import ENVIRONMENT
from _vllm_serve import serve_arguments
from PIL import Image
from transformers import AutoImageProcessor

import bench_serve
import chosen_rows
import gpu_use
import serve_inputs
from bench_serve import WARM_UP, Samples, Server, server_command
from csv_log import CsvLog
from failures import Failures
from make_checkpoint import make_checkpoint
from serve_inputs import WORKLOADS, Workload, image_tokens, write_requests
from setups import NOTED, SETUPS, Setup
from tower_cases import MODELS
from vllm_flashinfer_vit.towers.spec import NAMED_MODELS

MODEL = "Qwen/Qwen3-VL-8B-Instruct"
ONE = Workload((((4, 6),),))
ONE_VIDEO = Workload((((4, 6),),), frames=2)


def command(text: str, vllm: str = "0.33.0", more: list[str] | None = None) -> str:
    setup = Setup.of(text)
    return " ".join(server_command(setup, Path("c"), MODEL, vllm, 8100, more or []))


@pytest.mark.parametrize(
    "setup",
    [*SETUPS, "stock-flash_attn:eager", "stock-flash_attn4:graph", "plugin-q8:eager"],
)
def test_vllm_takes_the_commands(setup: str) -> None:
    from vllm.config.multimodal import MultiModalConfig

    more = ["--api-server-count", "4"]
    found = server_command(Setup.of(setup), Path("c"), MODEL, "0.33.0", 8100, more)
    args = serve_arguments(found[found.index("serve") + 1 :])
    assert args.port == 8100
    assert args.mm_encoder_attn_backend == Setup.of(setup).contender.backend
    assert args.allowed_local_media_path == "c"
    limits = MultiModalConfig(limit_per_prompt=args.limit_mm_per_prompt)
    assert limits.get_limit_per_prompt("image") == 20
    assert limits.get_limit_per_prompt("video") >= 1


def test_by_default_a_gpu_holds_stock_and_this_package() -> None:
    found = bench_serve.parse_args([]).setups
    assert [setup.contender.is_stock for setup in found] == [True, False]


def test_a_setup_is_what_its_name_says() -> None:
    eager, graph = command("plugin:eager"), command("plugin-fp8:graph")
    assert "compilation-config" not in eager and "attn-dtype" not in eager
    assert '{"cudagraph_mm_encoder": true}' in graph
    assert "--mm-encoder-attn-dtype fp8" in graph
    assert "--quantization fp8" in command("plugin-fp8-q8:graph")
    assert '"compile_mm_encoder": true' in command("stock-flash_attn:graph")
    # It does not compile Qwen3-VL's encoder yet.
    assert "compile_mm_encoder" not in command("stock-flash_attn:graph", "0.25.1")
    assert command("plugin:eager", more=["--seed", "3"]).endswith("--seed 3")
    both = (Setup.of(f"{name}:eager") for name in ("stock-flash_attn", "plugin"))
    assert [s.environment([])["VLLM_PLUGINS"] for s in both] == ["", "flashinfer_vit"]


def images(line: str) -> list[Image.Image]:
    parts = json.loads(line)["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    kind = "data:image/jpeg;base64,"
    assert all(url.startswith(kind) for url in urls)
    raw = (base64.b64decode(url.removeprefix(kind)) for url in urls)
    return [Image.open(io.BytesIO(data)) for data in raw]


@pytest.mark.parametrize("is_page", [False, True])
def test_requests_hold_images_that_no_server_has_seen(
    tmp_path: Path, is_page: bool
) -> None:
    workload = Workload((((4, 6), (8, 2)),), is_page)
    path = tmp_path / "requests.jsonl"
    write_requests(path, workload, 16, [3, 4])
    first, second = map(images, path.read_text().splitlines())
    assert [image.size for image in first] == [(96, 64), (32, 128)]
    drawn = {image.tobytes() for image in (*first, *second)}
    assert len(drawn) == 4
    write_requests(path, workload, 16, [3])
    (again,) = map(images, path.read_text().splitlines())
    assert [i.tobytes() for i in again] == [i.tobytes() for i in first]


def test_image_tokens_are_those_of_the_processor() -> None:
    assert image_tokens(WORKLOADS["photograph"], [1, 2]) == 2 * 1024
    assert image_tokens(WORKLOADS["thumbnails"], [1]) == 20 * 100
    mixed = WORKLOADS["mixture"]
    assert len({mixed.request(seed) for seed in range(100)}) == len(mixed.kinds)


@pytest.mark.parametrize("model", MODELS)
def test_no_image_changes_its_size(model: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, model)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    patch = NAMED_MODELS[model][1]["patch_size"]
    grids = {g for one in WORKLOADS.values() for kind in one.kinds for g in kind}
    for rows, columns in grids:
        size = (rows * patch, columns * patch)
        patches = processor.get_number_of_image_patches(*size, {})
        assert patches == rows * columns, (rows, columns)


def result(ttfts: list[float], errors: list[str] | None = None) -> dict[str, object]:
    errors = errors or [""] * len(ttfts)
    return {
        "completed": errors.count(""),
        "duration": 2.0,
        "ttfts": ttfts,
        # At 10 s and from then on each half a second later.
        "start_times": [10 + i / 2 for i in range(len(ttfts))],
        "errors": errors,
    }


def test_a_row_is_of_all_turns() -> None:
    samples = Samples()
    # The second request begins at 10.5 s: two of these count, and one of the next turn.
    use = [(9.9, 0.0), (10.05, 0.0), (10.1, 1.0), (10.5, 0.5), (10.6, 0.0)]
    samples.add(result([0.1, 0.2]), sent=2, tokens=300, use=use)
    samples.add(result([0.3, 0.4]), sent=2, tokens=500, use=[(10.4, 0.9)])
    row = samples.row()
    assert row == {
        "requests": 4,
        "completed": 4,
        "req_s": "1.00",
        "image_tokens_s": "200",
        "ttft_p50_ms": "250.0",
        "ttft_p99_ms": "397.0",
        "gpu_busy": "0.80",
    }


def test_a_use_that_was_not_seen_is_unknown() -> None:
    samples = Samples()
    samples.add(result([0.6, 0.2]), sent=2, tokens=300, use=[(10.1, 1.0)])
    assert samples.row()["gpu_busy"] == "unknown"


def test_a_request_that_failed_is_an_error_and_no_row() -> None:
    samples = Samples()
    samples.add(result([0.1, 0.0], ["", "Traceback\nout of memory"]), 2, 300, [])
    with pytest.raises(RuntimeError, match="1 of 2 requests failed: out of memory"):
        samples.row()


class Answer(BaseHTTPRequestHandler):
    """Says one token, as vLLM does."""

    seen: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        # So that the GPU is looked at between answers.
        time.sleep(0.03)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chunks = [
            {"choices": [{"index": 0, "delta": {"content": "yes"}}]},
            {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}},
        ]
        for chunk in (*map(json.dumps, chunks), "[DONE]"):
            self.wfile.write(f"data: {chunk}\n\n".encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server, of which a driver says that its GPU is busy half the time.

    It is the third one, by its name in CUDA_VISIBLE_DEVICES.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    monkeypatch.setattr(bench_serve, "utilisation", {"2": lambda: 0.5}.__getitem__)
    monkeypatch.setattr(gpu_use, "_EVERY_S", 0.005)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Answer.seen = []
    yield server.server_port
    server.shutdown()


def measured(name: str, port: int, folder: Path, *more: str) -> dict[str, str]:
    """Return the row of a workload that a server was asked for by vLLM."""
    from make_checkpoint import make_checkpoint

    make_checkpoint(folder, MODEL)
    args = bench_serve.parse_args(
        ["--workloads", name, "--concurrency", "2", "--requests", "5", *more]
    )
    log = CsvLog(folder / "serve.csv", bench_serve.COLUMNS)
    failures = Failures()
    server = started("import time; time.sleep(600)", folder, port)
    bench_serve.measure([server], folder, MODEL, args, log, failures, ENVIRONMENT)
    server.stop()
    assert failures.lines == []
    (row,) = chosen_rows.read(log.path)
    return row


def test_requests_are_sent_by_vllm(
    answering: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORKLOADS, "photograph", ONE)
    row = measured("photograph", answering, tmp_path)
    sizes = []
    for body in Answer.seen:
        (message,) = body["messages"]
        sizes.append([image.size for image in images(json.dumps(message))])
    # Those that warm up, and two turns.
    assert sizes == [[(96, 64)]] * (WARM_UP + 10)
    assert not any("mm_processor_kwargs" in body for body in Answer.seen)
    assert {body["max_completion_tokens"] for body in Answer.seen} == {1}
    assert row["answer_tokens"] == "1"
    assert (row["provider"], row["mode"]) == ("plugin", "eager")
    assert (row["requests"], row["completed"]) == ("10", "10")
    tokens = float(row["image_tokens_s"]) / float(row["req_s"])
    assert tokens == pytest.approx(6, rel=0.2)
    assert 0 < float(row["ttft_p50_ms"]) <= float(row["ttft_p99_ms"])
    assert row["gpu_busy"] == "0.50"


def test_a_run_that_is_stopped_keeps_its_whole_turns(
    answering: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORKLOADS, "photograph", ONE)
    asked = []

    def ask(*given: Any) -> dict[str, object]:
        # Two servers warm up and have a turn each, then the first has another.
        asked.append(given)
        if len(asked) == 6:
            raise KeyboardInterrupt
        return result([0.1] * 5)

    monkeypatch.setattr(bench_serve, "ask", ask)
    args = bench_serve.parse_args(
        ["--workloads", "photograph", "--concurrency", "2", "--requests", "5"]
    )
    log = CsvLog(tmp_path / "serve.csv", bench_serve.COLUMNS)
    servers = [
        started("import time; time.sleep(600)", tmp_path, answering) for _ in range(2)
    ]
    with pytest.raises(KeyboardInterrupt):
        bench_serve.measure(
            servers, tmp_path, MODEL, args, log, Failures(), ENVIRONMENT
        )
    for server in servers:
        server.stop()
    rows = chosen_rows.read(log.path)
    assert [row["requests"] for row in rows] == ["5", "5"]


def test_vllm_sends_videos_too(
    answering: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cv2", reason="OpenCV writes the videos")
    monkeypatch.setitem(WORKLOADS, "video", ONE_VIDEO)
    row = measured("video", answering, tmp_path, "--answer-tokens", "5")
    assert {body["max_completion_tokens"] for body in Answer.seen} == {5}
    assert row["answer_tokens"] == "5"
    urls = []
    for body in Answer.seen:
        assert body["mm_processor_kwargs"]["size"]["longest_edge"] == 25165824
        (message,) = body["messages"]
        text, video = message["content"]
        assert text == {"type": "text", "text": serve_inputs.QUESTION}
        assert video["type"] == "video_url"
        urls.append(video["video_url"]["url"])
    written = {path.as_uri() for path in tmp_path.glob("*.mp4")}
    assert len(urls) == len(written) == WARM_UP + 10 and set(urls) == written
    assert row["completed"] == "10"
    tokens = float(row["image_tokens_s"]) / float(row["req_s"])
    assert tokens == pytest.approx(12, rel=0.2)


def test_answers_are_as_long_as_asked(
    answering: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORKLOADS, "photograph", ONE)
    row = measured("photograph", answering, tmp_path, "--answer-tokens", "7")
    assert {body["max_completion_tokens"] for body in Answer.seen} == {7}
    assert all(body["ignore_eos"] for body in Answer.seen)
    assert row["answer_tokens"] == "7"


def started(code: str, tmp_path: Path, port: int = 1) -> Server:
    command = [sys.executable, "-c", code]
    return Server(Setup.of("plugin:eager"), command, port, tmp_path / "log")


def test_a_server_is_waited_for_and_ended(answering: int, tmp_path: Path) -> None:
    server = started("import time; time.sleep(600)", tmp_path, answering)
    server.wait(until=time.monotonic() + 120)
    server.stop()
    assert server._process.poll() is not None


def test_no_server_is_started_where_another_listens(
    answering: int, tmp_path: Path
) -> None:
    args = bench_serve.parse_args(["--port", str(answering), "--logs", str(tmp_path)])
    setups = [Setup.of("plugin:eager")]
    held = bench_serve.serving(setups, tmp_path, MODEL, "0.33.0", args, Failures())
    with pytest.raises(RuntimeError, match=rf"port {answering} already"), held:
        raise AssertionError("it has started a server there")
    assert not [*tmp_path.iterdir()]


def test_servers_are_spread_over_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; print('sees', os.environ.get('CUDA_VISIBLE_DEVICES'))"
    monkeypatch.setattr(
        bench_serve, "server_command", lambda *_: [sys.executable, "-c", code]
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    setups = [
        Setup.of(f"{name}:eager") for name in ("plugin", "plugin-fp8", "plugin-q8")
    ]
    seen = {}
    for given in ([], ["--gpus", "2"]):
        args = bench_serve.parse_args(["--logs", str(tmp_path), *given])
        held = bench_serve.serving(setups, tmp_path, MODEL, "0.33.0", args, Failures())
        with held as up:
            assert up == []
        logs = (
            tmp_path / f"Qwen3-VL-8B-Instruct.{setup.provider}.eager.log"
            for setup in setups
        )
        seen[bool(given)] = [log.read_text().split()[1] for log in logs]
    assert seen == {False: ["4,6"] * 3, True: ["4", "6", "4"]}


def test_no_server_stays_behind_a_benchmark_that_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    code = "import time; time.sleep(600)"
    monkeypatch.setattr(
        bench_serve, "server_command", lambda *_: [sys.executable, "-c", code]
    )
    monkeypatch.setattr(Server, "wait", lambda *_: None)
    args = bench_serve.parse_args(["--logs", str(tmp_path)])
    setups = [Setup.of("plugin:eager")]
    held = bench_serve.serving(setups, tmp_path, MODEL, "0.33.0", args, Failures())
    bench_serve.stop_as_by_ctrl_c()
    try:
        with pytest.raises(KeyboardInterrupt), held as (server,):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert server._process.poll() is not None


def test_nothing_is_asked_where_no_server_came_up() -> None:
    args = bench_serve.parse_args([])
    bench_serve.measure([], Path("none"), MODEL, args, None, Failures(), ENVIRONMENT)


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    server = started("raise ValueError('no such model')", tmp_path)
    with pytest.raises(RuntimeError, match="ended with 1: ValueError: no such model"):
        server.wait(until=time.monotonic() + 120)
    server.stop()


def test_a_server_that_is_late_is_left(tmp_path: Path) -> None:
    server = started("import time; time.sleep(600)", tmp_path)
    with pytest.raises(RuntimeError, match="no answer in"):
        server.wait(until=0.0)
    server.stop()
    assert server._process.poll() is not None


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *given: str
) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", "--print", *given])
    bench_serve.main()
    return capsys.readouterr().out.splitlines()


def test_commands_are_printed_without_a_gpu(monkeypatch, capsys) -> None:
    lines = printed(monkeypatch, capsys, "--setups", "plugin-fp8:graph")
    assert len(lines) == 3
    assert all("--mm-encoder-attn-dtype fp8" in line for line in lines)


def test_printed_commands_start_what_their_setups_are(monkeypatch, capsys) -> None:
    for name in ("HF_HUB_OFFLINE", *NOTED):
        monkeypatch.delenv(name, raising=False)
    setups = ["plugin:eager", "plugin-triton:eager", "stock-flash_attn:eager"]
    given = ["--models", MODEL, "--setups", *setups]
    own, forced, stock = map(shlex.split, printed(monkeypatch, capsys, *given))
    assert own[:3] == ["env", "HF_HUB_OFFLINE=1", "VLLM_PLUGINS=flashinfer_vit"]
    assert own[3] == "VLLM_FLASHINFER_VIT_KERNEL=auto"
    assert forced[3] == "VLLM_FLASHINFER_VIT_KERNEL=triton"
    # The port is another one.
    assert forced[4:7] == own[4:7] == ["vllm", "serve", "CHECKPOINT"]
    assert stock[2:4] == ["VLLM_PLUGINS=", "vllm"]


def test_a_setup_that_is_refused_says_what_to_write(capsys) -> None:
    with pytest.raises(SystemExit):
        bench_serve.parse_args(["--setups", "foo:graph"])
    assert "use stock-<backend>, stock-flash_attn4" in capsys.readouterr().err


def test_a_page_is_dark_marks_on_white() -> None:
    import numpy as np

    pixels = np.asarray(serve_inputs.page(96, 160, np.random.default_rng(0)))
    assert pixels.shape == (96, 160, 3)
    assert set(np.unique(pixels)) == {32, 255}
    assert 0.1 < (pixels == 32).mean() < 0.4

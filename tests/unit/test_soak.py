# SPDX-License-Identifier: Apache-2.0
"""The soak of servers: its requests, how it judges answers, and its checkpoint."""

import asyncio
import base64
import io
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from _benchmarks import BENCHMARKS, ENVIRONMENT
from _vllm_serve import serve_arguments
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image, UnidentifiedImageError

import bench_serve
import prune
import soak
import soak_client
import soak_inputs
import soak_scales
import soak_servers
from setups import MAX_TOKENS
from soak_client import MAX_DIFFERENCE, Client, Target
from soak_inputs import BAD, KINDS, MAX_RATIO, Request, body, draw_request
from soak_memory import MemoryLog, growth
from soak_scales import Mischief, saved_layers
from vllm_flashinfer_vit.fp8 import scale_files
from vllm_flashinfer_vit.fp8.scale_files import QKV

MODEL = "Qwen/Qwen3-VL-8B-Instruct"
PATCH = 16
MANY = [draw_request(0, number, PATCH) for number in range(2000)]


def asks(bad: str | None = None, **changes: Any) -> Request:
    given = {
        "seed": 0,
        "number": 0,
        "kind": "tiny",
        "sizes": ((8, 8),),
        "bad": bad,
        "cancel_after_s": None,
        "is_sampled": False,
        "max_tokens": 1,
    }
    return Request(**{**given, **changes})


def urls(request: Request) -> list[str]:
    (message,) = json.loads(body(request, PATCH))["messages"]
    *parts, question = message["content"]
    assert question["type"] == "text"
    return [part["image_url"]["url"] for part in parts]


def opened(url: str) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    image.load()
    return image


class TestInputs:
    def test_images_have_the_sizes_that_requests_name(self) -> None:
        sizes = ((1, 200), (64, 31), (7, 7))
        first, again, other = (
            urls(asks(sizes=sizes, number=number)) for number in (1, 1, 2)
        )
        assert [opened(url).size[::-1] for url in first] == list(sizes)
        assert first == again
        assert not set(first) & set(other)

    def test_every_kind_is_drawn_and_fits_the_model(self) -> None:
        assert {request.kind for request in MANY} == set(KINDS)
        assert {request.bad for request in MANY} == {None, *BAD}
        counts = {len(request.sizes) for request in MANY}
        assert counts >= set(range(1, soak_inputs.MAX_IMAGES + 1))
        for request in MANY:
            # Images below a unit are enlarged to one.
            unit = soak_inputs.MERGE * PATCH
            tokens = sum(
                math.ceil(h / unit) * math.ceil(w / unit) for h, w in request.sizes
            )
            assert tokens < MAX_TOKENS - 500

    def test_long_and_low_images_are_what_they_say(self) -> None:
        strips = [r.sizes[0] for r in MANY if r.kind == "strip" and r.sizes]
        assert {max(size) / min(size) for size in strips} == {MAX_RATIO}
        assert {height > width for height, width in strips} == {True, False}
        low = [r.sizes[0] for r in MANY if r.kind == "low" and r.sizes]
        assert {min(size) for size in low} == {soak_inputs.MERGE * PATCH}
        assert max(max(size) for size in low) > 300 * PATCH

    def test_some_are_bad_and_some_are_given_up_but_no_sample_is(self) -> None:
        shares = [
            sum(r.bad is not None for r in MANY) / len(MANY),
            sum(r.cancel_after_s is not None for r in MANY) / len(MANY),
        ]
        assert shares == pytest.approx([0.1, 0.1], abs=0.02)
        samples = [r for r in MANY if r.is_sampled]
        assert len(samples) == 50
        assert all(r.bad is None and r.cancel_after_s is None for r in samples)
        assert any(max(max(r.sizes)) > 50 * PATCH for r in samples)
        document = json.loads(body(samples[0], PATCH))
        assert (document["logprobs"], document["top_logprobs"]) == (True, 20)

    @pytest.mark.parametrize("bad", ["truncated", "no image", "empty"])
    def test_bad_images_cannot_be_read(self, bad: str) -> None:
        for number in range(50):
            good, url = urls(asks(bad, number=number))
            assert opened(good).size == (8, 8)
            with pytest.raises((UnidentifiedImageError, OSError)):
                opened(url)

    def test_other_bad_requests_are_bad_for_another_reason(self) -> None:
        for number in range(50):
            _, url = urls(asks("too long", number=number))
            long, short = sorted(opened(url).size, reverse=True)
            assert long / short > MAX_RATIO
        assert urls(asks("unknown scheme"))[1].startswith("gopher:")
        assert len(urls(asks("too many", sizes=()))) == soak_inputs.MAX_IMAGES + 1


Answer = Callable[[dict[str, Any]], web.Response]


def answer(off: float = 0.0, shared: int = 20) -> web.Response:
    """What vLLM answers, with log-probabilities that are `off`."""
    names = [f"token_id:{i if i < shared else 100 + i}" for i in range(20)]
    top = [{"token": name, "logprob": -1.0 - i} for i, name in enumerate(names)]
    top[3]["logprob"] += off
    choice = {"finish_reason": "length", "logprobs": {"content": [{}]}}
    choice["logprobs"]["content"][0]["top_logprobs"] = top
    return web.json_response({"choices": [choice], "usage": {"completion_tokens": 1}})


def refusal(status: int = 400) -> web.Response:
    return web.json_response({"error": {"message": "no"}}, status=status)


class Fake:
    """A server that answers as it is told, and notes who went away."""

    def __init__(self, answers: Callable[[], Any] = answer, busy: int = 0) -> None:
        self.answers, self.busy = answers, busy
        self.asked = self.left = 0

    async def start(self) -> str:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/metrics", self._metrics)
        self._server = TestServer(app)
        await self._server.start_server()
        return str(self._server.make_url("/")).rstrip("/")

    async def stop(self) -> None:
        await self._server.close()

    async def _chat(self, request: web.Request) -> web.Response:
        self.asked += 1
        await request.read()
        try:
            found = self.answers()
            return await found if asyncio.iscoroutine(found) else found
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def _metrics(self, request: web.Request) -> web.Response:
        label = '{engine="0",model_name="model"}'
        text = f"vllm:num_requests_running{label} {self.busy}.0\n"
        return web.Response(text=text + f"vllm:num_requests_waiting{label} 0.0\n")


async def hang() -> None:
    await asyncio.sleep(60)


async def crash() -> None:
    raise web.HTTPInternalServerError(text="Traceback")


def asked(
    requests: list[Request], server: Fake, judge: Fake | None = None
) -> soak_client.Tally:
    judge = judge or Fake()

    async def run() -> soak_client.Tally:
        addresses = [await fake.start() for fake in (server, judge)]
        with ThreadPoolExecutor(1) as drawing:
            async with soak_client.new_session() as session:
                target = Target(addresses[:1], addresses[1], PATCH)
                client = Client(session, target, drawing)
                await client.send(iter(requests), 4, lambda: False)
                await asyncio.sleep(0.1)
        await server.stop()
        await judge.stop()
        return client.tally

    return asyncio.run(run())


class TestClient:
    def test_answers_and_refusals_are_counted(self) -> None:
        tally = asked([asks()] * 3, Fake())
        assert (tally.sent, tally.answered, tally.faults) == (3, 3, [])
        tally = asked([asks("empty")] * 2, Fake(refusal))
        assert (tally.sent, tally.refused, tally.faults) == (2, 2, [])

    @pytest.mark.parametrize(
        ("request_", "answers", "said"),
        [
            (asks(), refusal, "status 400"),
            (asks(), crash, "status 500"),
            (asks(), lambda: web.json_response({"usage": None}), "status 200"),
            (asks("empty"), answer, "status 200"),
            (asks("empty"), lambda: refusal(500), "status 500"),
            (asks("empty"), lambda: web.Response(status=400), "status 400"),
        ],
    )
    def test_everything_else_is_a_fault(self, request_, answers, said) -> None:
        tally = asked([request_], Fake(answers))
        assert (tally.answered, tally.refused) == (0, 0)
        (line,) = tally.faults
        assert said in line and "request 0 (tiny 8x8" in line

    def test_a_server_that_hangs_or_drops_is_a_fault(self, monkeypatch) -> None:
        monkeypatch.setattr(soak_client, "ANSWER_S", 0.3)
        (line,) = asked([asks()], Fake(hang)).faults
        assert "no answer in" in line

        async def lost() -> soak_client.Tally:
            async with soak_client.new_session() as session:
                with ThreadPoolExecutor(1) as drawing:
                    # A port that nobody listens on.
                    target = Target(["http://127.0.0.1:9"], "", PATCH)
                    client = Client(session, target, drawing)
                    await client.send(iter([asks()] * 500), 4, lambda: False)
            return client.tally

        tally = asyncio.run(lost())
        assert all("ClientConnectorError" in line for line in tally.faults)
        # It is not asked for ever.
        assert tally.sent < 60

    def test_who_goes_away_is_gone_for_the_server(self) -> None:
        server = Fake(hang)
        tally = asked([asks(cancel_after_s=0.2)] * 5, server)
        assert (tally.cancelled, tally.faults) == (5, [])
        assert (server.asked, server.left) == (5, 5)
        # It was quicker.
        tally = asked([asks(cancel_after_s=20.0)], Fake())
        assert (tally.cancelled, tally.answered) == (0, 1)

    def test_sampled_answers_are_compared_with_the_judges(self) -> None:
        sample = [asks(is_sampled=True, number=number) for number in range(3)]
        tally = asked(sample, Fake(lambda: answer(0.125)), Fake())
        assert tally.differences == pytest.approx([0.125] * 3)
        assert (tally.wrong, tally.faults, len(tally.others)) == (0, [], 2)
        far = asked(sample, Fake(lambda: answer(2 * MAX_DIFFERENCE)), Fake())
        assert far.wrong == 3 and far.noticed == 1.0
        foreign = asked(sample, Fake(lambda: answer(shared=9)), Fake())
        assert foreign.differences == [math.inf] * 3
        assert (foreign.wrong, foreign.answered) == (3, 3)

    def test_a_judge_that_fails_is_a_fault(self) -> None:
        sample = [asks(is_sampled=True)]
        assert "status 500" in asked(sample, Fake(), Fake(crash)).faults[0]
        bare = Fake(lambda: web.json_response({"usage": {"completion_tokens": 1}}))
        assert "no log-probabilities" in asked(sample, bare).faults[0]

    @pytest.mark.parametrize(
        ("server", "said"),
        [
            (Fake(), None),
            (Fake(busy=1), "still busy"),
            (Fake(crash), "status 500 at the end"),
        ],
    )
    def test_what_is_left_at_the_end(self, server, said, monkeypatch) -> None:
        monkeypatch.setattr(soak_client, "IDLE_S", 0.2)

        async def run() -> str | None:
            address = await server.start()
            async with soak_client.new_session() as session:
                found = await soak_client.left_over(session, address)
            await server.stop()
            return found

        found = asyncio.run(run())
        assert found is None if said is None else said in str(found)


@pytest.fixture
def scales(tmp_path: Path) -> Path:
    seen = {f"visual.blocks.{i}.attn.attn": (QKV(7.0, 6.0, 5.0), 72) for i in range(3)}
    by = {"command": "c", "version": "1", "vllm": "1", "model": "m", "method": "x"}
    path = tmp_path / "scales.json"
    scale_files.write(scale_files.from_amax(seen, 1.5, by), path)
    return path


def test_scale_files_are_spoiled_in_every_way(scales: Path, monkeypatch) -> None:
    monkeypatch.setattr(soak_scales.time, "sleep", lambda seconds: None)
    assert saved_layers(scales, 0.0) == 3
    good = scales.read_bytes()
    mischief = Mischief(scales, seed=0)
    found = set()
    for _ in range(200):
        mischief.step()
        found.add(scales.read_bytes() if scales.exists() else None)
    assert mischief.count == 200
    assert {good, b"", None} < found
    assert any(part and part != good and good.startswith(part) for part in found)
    scales.unlink(missing_ok=True)
    with pytest.raises(scale_files.ScaleError, match="cannot be used"):
        saved_layers(scales, 0.0)


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
        assert args.served_model_name == [soak_inputs.NAME] == [bench_serve.NAME]


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
    grown = {"rss": 3.0, "device": math.nan}
    good = soak_client.Tally(sent=9, differences=[0.1])
    assert soak.complaints(good, grown) == []
    bad = soak_client.Tally(sent=9, faults=["lost"], differences=[9.0])
    lines = soak.complaints(bad, {"rss": 11.0, "device": 6.0})
    assert len(lines) == 4
    assert "no answer was compared" in soak.complaints(soak_client.Tally(), grown)[0]


@pytest.fixture
def running() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_soak_of_servers_that_answer_as_they_should(
    scales: Path, running: subprocess.Popen[bytes], monkeypatch, tmp_path: Path
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
            assert [fake.asked for fake in fakes] == [soak.WARM_UP] * 3
            found = await soak.soak(
                target,
                map(small, range(40)),
                8,
                time.monotonic() + 60,
                memory,
                Mischief(scales, 0),
                drawing,
            )
        for fake in fakes:
            await fake.stop()
        # One more at the end; the judge sees the samples alone.
        assert [fake.asked - soak.WARM_UP for fake in fakes] == [21, 21, 8]
        return found

    tally, seconds = asyncio.run(run())
    assert (tally.sent, tally.answered, tally.faults) == (40, 40, [])
    row = soak.row_of(tally, seconds, soak.growths(memory))
    assert (row["sampled"], row["wrong"], row["worst_diff"]) == (8, 0, "0.0000")
    (series,) = soak.memory_rows(memory)
    assert len(series["done"].split()) == len(series["rss_mib"].split()) >= 1
    assert set(row) < set(soak.COLUMNS) and set(series) < set(soak.MEMORY_COLUMNS)

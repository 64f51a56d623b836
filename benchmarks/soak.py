# SPDX-License-Identifier: Apache-2.0
"""Soaks real servers: thousands of random requests, some bad, some given up.

For each model there are two servers of this package with encoder CUDA graphs and FP8
attention, which save their scales to one file, and a judge: stock vLLM in fp32. The
scale file is spoiled until both have saved, which an engine does once. Then the two are
asked in turns. A sample of the answers is compared with the judge's; the servers'
memory must not grow. The tower has its true size, the language model is small, and
weights are random.

    python benchmarks/soak.py --models Qwen/Qwen3-VL-8B-Instruct
    python benchmarks/soak.py --requests 8000 --serve-args "--tensor-parallel-size 2"
    python benchmarks/soak.py --print                 # the servers' commands; no GPU

Any fault is an exit status of 1: a status of 5xx, a lost connection, an answer to what
cannot be answered or none to what can, a wrong answer, memory that grows, a server
that is busy or gone at the end, a scale file that a server has damaged, or a log that
does not say whether scales were saved.
"""

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from csv_log import CsvLog, results_path
from environment import ENVIRONMENT_COLUMNS, Environment
from failures import Failures
from server_process import START_TIMEOUT_S, ServerProcess, stop_as_by_ctrl_c
from setups import with_variables
from soak_checkpoint import write_checkpoint
from soak_client import (
    MAX_DIFFERENCE,
    Client,
    Tally,
    Target,
    left_over,
    new_session,
    post,
)
from soak_inputs import LARGEST, MAX_IMAGES, Request, Size, body, draw_request
from soak_memory import MAX_GROWTH, MemoryLog, growth
from soak_scales import Mischief, broken_promises, saves, valid_file
from soak_servers import SETUP, built, commands, scale_file, serving
from tower_cases import MODELS
from vllm_flashinfer_vit.towers.spec import NAMED_MODELS

REQUESTS = 10_000
AT_ONCE = 64
TIME_LIMIT_S = 520.0
# For images; servers need the other cores.
DRAWING_THREADS = 6
# Scales are saved after the 16th step with images.
WARM_UP = 24
# Then so many large requests at once, of a server: what a full batch needs of memory is
# held before growth is looked for.
CROWD = 32
SAMPLE_S = 2.0
COLUMNS = (
    "bench",
    "provider",
    "mode",
    "model",
    "seed",
    "requests",
    "serve_args",
    "sent",
    "answered",
    "refused",
    "cancelled",
    "faults",
    "sampled",
    "wrong",
    "median_diff",
    "worst_diff",
    "noticed",
    "req_s",
    "rss_growth",
    "device_growth",
    "built_after_start",
    "scale_file_changes",
    "scales_saved",
    "scales_not_saved",
    *ENVIRONMENT_COLUMNS,
)
MEMORY_COLUMNS = (
    "bench",
    "provider",
    "mode",
    "model",
    "seed",
    "requests",
    "serve_args",
    "server",
    "device_of",
    "done",
    "rss_mib",
    "device_mib",
    *ENVIRONMENT_COLUMNS,
)


async def warm_up(target: Target, drawing: Executor) -> None:
    """Have every server answer what no row counts, all at the same time.

    Raises:
        RuntimeError: One does not.
    """
    size = (16 * target.patch, 16 * target.patch)
    # Several images, so that each rank of a data-parallel encoder has one.
    quiet = [_of_warm_up(number, (size,) * 4) for number in range(WARM_UP)]
    page = ((LARGEST * target.patch, LARGEST * target.patch),)
    crowd = [
        _of_warm_up(WARM_UP + number, page if number % 2 else (size,) * MAX_IMAGES)
        for number in range(CROWD)
    ]
    urls = (*target.servers, target.judge)
    async with new_session() as session:
        for request in quiet:
            await _all_answer(session, urls, [request], target.patch, drawing)
        await _all_answer(session, target.servers, crowd, target.patch, drawing)


def _of_warm_up(number: int, sizes: tuple[Size, ...]) -> Request:
    return Request(-1, number, "warm-up", sizes, None, None, True, 1)


async def _all_answer(
    session: Any,
    urls: Sequence[str],
    requests: Sequence[Request],
    patch: int,
    drawing: Executor,
) -> None:
    loop = asyncio.get_running_loop()
    drawn = [loop.run_in_executor(drawing, body, r, patch) for r in requests]
    bodies = await asyncio.gather(*drawn)
    asked = [post(session, url, data) for url in urls for data in bodies]
    try:
        answers = await asyncio.wait_for(asyncio.gather(*asked), START_TIMEOUT_S)
    except TimeoutError:
        raise RuntimeError(
            f"no answer in {START_TIMEOUT_S:.0f} s at warm-up: see the servers' logs"
        ) from None
    for status, answer in answers:
        if status != 200:
            raise RuntimeError(f"status {status} at warm-up: {answer}")


async def soak(
    target: Target,
    requests: Iterator[Request],
    at_once: int,
    until: float,
    memory: MemoryLog,
    drawing: Executor,
) -> tuple[Tally, float]:
    """Send requests while memory is noted.

    Args:
        target: Servers that have warmed up.
        requests: What is sent.
        at_once: How many are under way.
        until: When no more are sent, by `time.monotonic`.
        memory: Of these servers.
        drawing: Draws images.

    Returns:
        How requests ended, and the seconds that they took.
    """

    async def watch(client: Client) -> None:
        while True:
            await asyncio.to_thread(memory.sample, client.tally.sent)
            await asyncio.sleep(SAMPLE_S)

    async with new_session() as session:
        client = Client(session, target, drawing)
        watching = asyncio.create_task(watch(client))
        begin = time.monotonic()
        await client.send(requests, at_once, lambda: time.monotonic() > until)
        seconds = time.monotonic() - begin
        watching.cancel()
        (ended,) = await asyncio.gather(watching, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError):
            client.tally.faults.append(f"this script: {ended!r}")
        for server in target.servers:
            if (reason := await left_over(session, server)) is not None:
                client.tally.faults.append(f"{server}: {reason}")
        return client.tally, seconds


def growths(memory: MemoryLog) -> dict[str, float]:
    """Return by how many percent `rss` and `device` grew, of the worst server."""
    found = {}
    for name in MAX_GROWTH:
        each = [growth(getattr(s, f"{name}_mib")) for s in memory.series.values()]
        known = [value for value in each if value is not None]
        found[name] = max(known) if known else math.nan
    return found


def complaints(tally: Tally, grown: Mapping[str, float]) -> list[str]:
    """Return what is wrong with a run, in words."""
    found = list(tally.faults)
    if tally.wrong:
        found.append(
            f"{tally.wrong} of {len(tally.differences)} sampled answers are off by "
            f"more than {MAX_DIFFERENCE}"
        )
    if not tally.differences:
        found.append("no answer was compared with the judge's")
    for name, most in MAX_GROWTH.items():
        if math.isnan(grown[name]):
            found.append(
                f"{name}: too few samples to tell whether it grew: send more --requests"
            )
        elif grown[name] > most:
            found.append(f"{name} grew by {grown[name]:.1f} %, more than {most} %")
    return found


def row_of(tally: Tally, seconds: float, grown: Mapping[str, float]) -> dict[str, Any]:
    """Return the measured columns of `COLUMNS` that follow from these."""
    found = tally.differences or [math.nan]
    return {
        "sent": tally.sent,
        "answered": tally.answered,
        "refused": tally.refused,
        "cancelled": tally.cancelled,
        "faults": len(tally.faults),
        "sampled": len(tally.differences),
        "wrong": tally.wrong,
        "median_diff": f"{statistics.median(found):.4f}",
        "worst_diff": f"{max(found):.4f}",
        "noticed": f"{tally.noticed:.3f}",
        "req_s": f"{tally.sent / seconds:.2f}",
        "rss_growth": f"{grown['rss']:.1f}",
        "device_growth": f"{grown['device']:.1f}",
    }


def soak_model(
    model: str,
    args: argparse.Namespace,
    logs: Mapping[str, CsvLog],
    failures: Failures,
    environment: Environment,
) -> None:
    """Soak the servers of one model, and write its rows."""
    until = time.monotonic() + args.time_limit
    patch = NAMED_MODELS[model][1]["patch_size"]
    with ExitStack() as stack:
        checkpoint = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_checkpoint(checkpoint, model, patch, args.seed)
        held = serving(checkpoint, model, environment.vllm, args)
        *servers, judge = stack.enter_context(held)
        drawing = stack.enter_context(ThreadPoolExecutor(DRAWING_THREADS))
        target = Target([server.url for server in servers], judge.url, patch)
        path = scale_file(checkpoint)
        mischief = Mischief(path, valid_file(model, checkpoint), args.seed)
        with mischief.at_work():
            asyncio.run(warm_up(target, drawing))
        said = [server.log() for server in servers]
        faults = broken_promises(path, mischief.last, said)
        memory = MemoryLog({str(i): s.pid for i, s in enumerate(servers, 1)})
        requests = (draw_request(args.seed, i, patch) for i in range(args.requests))
        tally, seconds = asyncio.run(
            soak(target, requests, args.at_once, until, memory, drawing)
        )
        tally.faults += [*faults, *ended([*servers, judge])]
        names = built(
            [s.log()[len(log) :] for s, log in zip(servers, said, strict=True)]
        )
    grown = growths(memory)
    saved, not_saved = saves(said)
    what = {
        "provider": SETUP.provider,
        "mode": SETUP.mode,
        "model": model,
        "seed": args.seed,
        "requests": args.requests,
        "serve_args": with_variables(args.serve_args),
    }
    found = {
        **row_of(tally, seconds, grown),
        "built_after_start": len(names),
        "scale_file_changes": mischief.count,
        "scales_saved": saved,
        "scales_not_saved": not_saved,
    }
    logs["soak"].add({"bench": "soak", **what, **found, **asdict(environment)})
    for row in memory_rows(memory):
        row = {"bench": "soak_memory", **what, **row, **asdict(environment)}
        logs["memory"].add(row)
    for name, value in found.items():
        print(f"  {name:<20} {value}", flush=True)
    if names:
        print(f"  built after start: {', '.join(sorted(set(names)))}")
    if tally.sent < args.requests:
        failures.add(model, f"{tally.sent} of {args.requests} requests were sent")
    for line in complaints(tally, grown):
        failures.add(model, line)


def ended(servers: Sequence[ServerProcess]) -> list[str]:
    """Return which servers are gone, in words."""
    return [f"the server on {s.port} has ended" for s in servers if s.has_ended]


def memory_rows(memory: MemoryLog) -> list[dict[str, object]]:
    """Return the measured columns of `MEMORY_COLUMNS`, a row for each server."""
    device_of = "server" if memory.is_per_process else "all GPUs"
    return [
        {
            "server": server,
            "device_of": device_of,
            # In one cell, so that a run is replaced as a whole.
            **{name: " ".join(map(str, v)) for name, v in asdict(series).items()},
        }
        for server, series in memory.series.items()
    ]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of a model")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="under way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--time-limit",
        type=float,
        default=TIME_LIMIT_S,
        help="seconds for a model, from its servers' start to the last request",
    )
    parser.add_argument("--serve-args", default="", help="more for the two servers")
    parser.add_argument("--port", type=int, default=8300, help="of the first server")
    parser.add_argument("--logs", help="folder to keep the servers' logs in")
    parser.add_argument("--print", action="store_true", help="the commands alone")
    parser.add_argument("--output", help="CSV file to append to")
    return parser.parse_args(argv)


def main() -> None:
    """Soak servers."""
    args = parse_args()
    environment = Environment.probe()
    if args.print:
        for model in args.models:
            folder = Path("CHECKPOINT")
            for setup, _, command in commands(folder, model, environment.vllm, args):
                print(setup.printed(command[3:]))
        return
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: the servers need one")
    stop_as_by_ctrl_c()
    path = results_path("soak", environment.gpu, args.output)
    logs = {
        "soak": CsvLog(path, COLUMNS),
        "memory": CsvLog(path.with_name(f"{path.stem}_memory.csv"), MEMORY_COLUMNS),
    }
    failures = Failures()
    for model in args.models:
        with failures.noted(model):
            soak_model(model, args, logs, failures, environment)
    failures.end(path)


if __name__ == "__main__":
    main()

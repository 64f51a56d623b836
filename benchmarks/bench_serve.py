# SPDX-License-Identifier: Apache-2.0
"""Times real servers: `vllm serve` with stock's encoder attention, and with this one's.

Each setup is a server of its own, with a language model of true size and dummy weights.
All of them stay up, and take turns: one is asked at a time, by vLLM's own
`vllm bench serve`, for one token, or `--answer-tokens`, after images or a video that no
server has seen. A setup is a contender's name, as in contenders.py, and how its encoder
runs: `graph` with vLLM's encoder CUDA graphs, stock's blocks compiled where that vLLM
can, or `eager`, vLLM's default. With `-q8` at its end a contender serves
`--quantization fp8`, with `-b8` `fp8_per_block`.

A server in bf16 takes up to 30 GB, so a GPU of 80 GB holds two: stock's graphs and this
package's with FP8 attention, unless others are asked for. Name one of stock's among
them: rows are compared with stock's of the same run. Two of one model are up in 2.5 to
4 minutes; pages, photographs or thumbnails then take one to two minutes each.

    python benchmarks/bench_serve.py --models Qwen/Qwen3-VL-8B-Instruct
    python benchmarks/bench_serve.py --setups stock-flash_attn:eager plugin:eager
    python benchmarks/bench_serve.py --workloads video
    python benchmarks/bench_serve.py --serve-args "--api-server-count 4"
    OMP_NUM_THREADS=1 python benchmarks/bench_serve.py    # said in its rows' serve_args
    VLLM_FLASHINFER_VIT_DISABLE_PATCHES=image-frames,image-text \\
        python benchmarks/bench_serve.py                  # likewise
    python benchmarks/bench_serve.py --gpus 2 --setups stock-flash_attn:graph \\
        stock-flash_attn:eager plugin:graph plugin-fp8:graph  # in turns on two GPUs
    python benchmarks/bench_serve.py --print          # no more than their commands
"""

import argparse
import itertools
import shlex
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from csv_log import CsvLog, results_path
from environment import ENVIRONMENT_COLUMNS, Environment, gpus_to_use
from failures import Failures
from gpu_use import noted_use, utilisation
from make_checkpoint import make_checkpoint
from serve_inputs import NAME, WORKLOADS, image_tokens, write_dataset
from server_process import (
    START_TIMEOUT_S,
    ServerProcess,
    check_free,
    stop_as_by_ctrl_c,
)
from setups import SETUPS, Setup, setup_option, with_variables
from tower_cases import MODELS
from vllm_flashinfer_vit.choices.clock import order_of_turn
from vllm_flashinfer_vit.towers.spec import NAMED_MODELS

# Requests at once: the time to the first token, and what a server can do at most.
CONCURRENCY = (1, 64)
# Requests of a turn at that concurrency, at least. A server is full after a second.
REQUESTS = {1: 8, 64: 192}
# Even, so that half of them run backwards.
TURNS = 2
# Requests at once before the first turn: each of several API servers is to get some,
# since the first image of each is slow.
WARM_UP = 16
COLUMNS = (
    "bench",
    "provider",
    "mode",
    "model",
    "workload",
    "concurrency",
    "answer_tokens",
    "requests",
    "completed",
    "req_s",
    "image_tokens_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "gpu_busy",
    "serve_args",
    *ENVIRONMENT_COLUMNS,
)
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def server_command(
    setup: Setup,
    checkpoint: Path,
    model: str,
    vllm: str,
    port: int,
    more: Sequence[str],
) -> list[str]:
    """Return the command that starts a server.

    Args:
        setup: Which one.
        checkpoint: What it serves.
        model: Name of the model that this is.
        vllm: Version of vLLM.
        port: Where it listens.
        more: Arguments at its end.
    """
    main = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    own = ["--served-model-name", NAME, "--port", str(port)]
    # Requests with a video name its file, which is in this folder.
    own += ["--allowed-local-media-path", str(checkpoint)]
    return [*main, str(checkpoint), *own, *setup.options(model, vllm), *more]


class Server(ServerProcess):
    """A setup's server."""

    def __init__(
        self,
        setup: Setup,
        command: Sequence[str],
        port: int,
        log: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, with more environment variables; `wait` returns once it answers."""
        self.setup, self.variables = setup, variables or {}
        environment = {**setup.environment(command), **self.variables}
        super().__init__(command, port, log, environment)


def ask(
    url: str, tokenizer: Path, dataset: Sequence[str], count: int, at_once: int
) -> Any:
    """Send requests by `vllm bench serve`; return its result.

    Args:
        url: The server's.
        tokenizer: A folder that holds it.
        dataset: What `write_dataset` returned.
        count: How many requests it holds.
        at_once: How many are under way at most.
    """
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    arguments = {
        "--backend": "openai-chat",
        "--endpoint": "/v1/chat/completions",
        "--base-url": url,
        "--model": NAME,
        "--tokenizer": str(tokenizer),
        "--num-prompts": str(count),
        "--max-concurrency": str(at_once),
        "--percentile-metrics": "ttft",
        # Its test request would be one whose images the server then knows.
        "--ready-check-timeout-sec": "0",
    }
    # Detailed results have the time of each request.
    flags = ["--disable-shuffle", "--no-oversample", "--ignore-eos", "--save-detailed"]
    flat = [part for item in arguments.items() for part in item]
    return main(parser.parse_args([*flat, *dataset, *flags]))


class Samples:
    """What a server did with the requests of one workload, over all turns."""

    def __init__(self) -> None:
        """Begin without requests."""
        self.sent = self.completed = self.tokens = 0
        self.seconds = 0.0
        self.ttfts_ms: list[float] = []
        self.busy: list[float] = []
        self.errors: list[str] = []

    def add(
        self,
        result: Mapping[str, Any],
        sent: int,
        tokens: int,
        use: Sequence[tuple[float, float]],
    ) -> None:
        """Add a turn: what `ask` returned, requests, image tokens, use of the GPU.

        Of its use counts what is between the first answer and the last request: all
        places are taken then, and no client still reads its requests.
        """
        starts = result["start_times"]
        first = min(map(sum, zip(starts, result["ttfts"], strict=True)))
        self.busy += [share for at, share in use if first <= at <= max(starts)]
        self.sent += sent
        self.tokens += tokens
        self.completed += result["completed"]
        self.seconds += result["duration"]
        for ttft, error in zip(result["ttfts"], result["errors"], strict=True):
            if error:
                self.errors.append(error)
            else:
                self.ttfts_ms.append(1e3 * ttft)

    def row(self) -> dict[str, object]:
        """Return the columns that were measured.

        Raises:
            RuntimeError: A request was not answered.
        """
        if self.completed < self.sent or self.errors:
            said = (
                self.errors[0].strip().splitlines()[-1] if self.errors else "no error"
            )
            missing = self.sent - len(self.ttfts_ms)
            raise RuntimeError(f"{missing} of {self.sent} requests failed: {said}")
        cuts = statistics.quantiles(self.ttfts_ms, n=100, method="inclusive")
        busy = f"{statistics.fmean(self.busy):.2f}" if self.busy else "unknown"
        return {
            "requests": self.sent,
            "completed": self.completed,
            "req_s": f"{self.sent / self.seconds:.2f}",
            "image_tokens_s": f"{self.tokens / self.seconds:.0f}",
            "ttft_p50_ms": f"{cuts[49]:.1f}",
            "ttft_p99_ms": f"{cuts[98]:.1f}",
            "gpu_busy": busy,
        }


@contextmanager
def serving(
    setups: Sequence[Setup],
    checkpoint: Path,
    model: str,
    vllm: str,
    args: argparse.Namespace,
    failures: Failures,
) -> Iterator[list[Server]]:
    """Hold the servers of a model; those that do not come up are noted and left out.

    Raises:
        RuntimeError: Something else listens at one of their ports.
    """
    logs = Path(args.logs or checkpoint).absolute()
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        started = []
        gpus = itertools.cycle(gpus_to_use(args.gpus) if args.gpus else ())
        for port, setup in enumerate(setups, args.port):
            check_free(port)
            more = shlex.split(args.serve_args)
            command = server_command(setup, checkpoint, model, vllm, port, more)
            stem = f"{model.rpartition('/')[2]}.{str(setup).replace(':', '.')}"
            variables = {_VISIBLE: next(gpus)} if args.gpus else {}
            server = Server(setup, command, port, logs / f"{stem}.log", variables)
            stack.callback(server.stop)
            started.append(server)
        up, until = [], time.monotonic() + START_TIMEOUT_S
        for server in started:
            with failures.noted(f"{model} {server.setup}"):
                server.wait(until)
                up.append(server)
                print(f"{model} {server.setup} is up", flush=True)
        yield up


def measure(
    servers: Sequence[Server],
    checkpoint: Path,
    model: str,
    args: argparse.Namespace,
    log: CsvLog,
    failures: Failures,
    environment: Environment,
) -> None:
    """Time every workload on every server, in turns."""
    if not servers:
        return
    # Without a choice vLLM takes the first.
    (first,) = gpus_to_use(1)
    uses = {s: utilisation(s.variables.get(_VISIBLE, first)) for s in servers}
    for name in args.workloads:
        for at_once in args.concurrency:
            found = {server: Samples() for server in servers}
            what = {
                "model": model,
                "workload": name,
                "concurrency": at_once,
                "answer_tokens": args.answer_tokens,
                "serve_args": with_variables(args.serve_args),
            }
            try:
                ask_in_turns(found, uses, checkpoint, model, name, at_once, args)
            finally:
                # A run that is stopped keeps the turns that it has ended.
                add_rows(found, what, log, failures, environment)


def ask_in_turns(
    found: Mapping[Server, Samples],
    uses: Mapping[Server, Callable[[], float]],
    checkpoint: Path,
    model: str,
    name: str,
    at_once: int,
    args: argparse.Namespace,
) -> None:
    """Ask servers in turns, and add to their samples what each whole turn has found.

    Args:
        found: What is added to, by server.
        uses: What tells how busy a server's GPU is.
        checkpoint: What they serve.
        model: Name of the model that this is.
        name: The workload's.
        at_once: How many requests are under way at most.
        args: The command line.
    """
    workload, patch_size = WORKLOADS[name], NAMED_MODELS[model][1]["patch_size"]
    count = args.requests or REQUESTS.get(at_once, 2 * at_once)
    for turn in range(-1, args.turns):
        # The first one warms up: its requests are in no row.
        sent, together = (count, at_once) if turn >= 0 else (WARM_UP, WARM_UP)
        seeds = [
            zlib.crc32(f"{name} {at_once} {turn} {place}".encode())
            for place in range(sent)
        ]
        dataset = write_dataset(
            checkpoint, workload, patch_size, seeds, args.answer_tokens
        )
        answers = []
        for server in order_of_turn(list(found), turn):
            use: list[tuple[float, float]] = []
            with noted_use(uses[server], use):
                result = ask(server.url, checkpoint, dataset, sent, together)
            answers.append((server, result, use))
        if turn >= 0:
            tokens = image_tokens(workload, seeds)
            for server, result, use in answers:
                found[server].add(result, sent, tokens, use)


def add_rows(
    found: Mapping[Server, Samples],
    what: Mapping[str, object],
    log: CsvLog,
    failures: Failures,
    environment: Environment,
) -> None:
    """Add a row for each server that was asked, and print it.

    Args:
        found: What the servers did.
        what: The columns that say what they were asked.
        log: Where rows go.
        failures: Where requests are noted that were not answered.
        environment: The columns that say where this ran.
    """
    for server, samples in found.items():
        if not samples.sent:
            continue
        said = f"{server.setup} {what['workload']} {what['concurrency']} at once"
        title = f"{what['model']} {said}"
        with failures.noted(title):
            row = {
                "bench": "serve",
                "provider": server.setup.provider,
                "mode": server.setup.mode,
                **what,
                **samples.row(),
                **asdict(environment),
            }
            log.add(row)
            print(
                f"  {title}: {row['req_s']} requests/s, TTFT {row['ttft_p50_ms']} ms, "
                f"p99 {row['ttft_p99_ms']} ms, the GPU busy {row['gpu_busy']} of the "
                "time",
                flush=True,
            )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument(
        "--setups", nargs="+", type=setup_option, default=[Setup.of(s) for s in SETUPS]
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=tuple(WORKLOADS)
    )
    parser.add_argument("--concurrency", nargs="+", type=int, default=CONCURRENCY)
    parser.add_argument(
        "--requests", type=int, help="of a turn, whatever the concurrency"
    )
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--answer-tokens", type=int, default=1, help="of each answer")
    parser.add_argument("--serve-args", default="", help="more for every server")
    parser.add_argument(
        "--gpus",
        type=int,
        help="GPUs to spread the servers over; default: as vLLM does",
    )
    parser.add_argument("--port", type=int, default=8100, help="of the first server")
    parser.add_argument("--logs", help="folder to keep the servers' logs in")
    parser.add_argument("--print", action="store_true", help="the commands alone")
    parser.add_argument("--output", help="CSV file to append to")
    return parser.parse_args(argv)


def main() -> None:
    """Run the benchmark."""
    args = parse_args()
    environment = Environment.probe()
    if args.print:
        for model in args.models:
            for port, setup in enumerate(args.setups, args.port):
                more = shlex.split(args.serve_args)
                command = server_command(
                    setup, Path("CHECKPOINT"), model, environment.vllm, port, more
                )
                print(setup.printed(command[3:]))
        return
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: the servers need one")
    stop_as_by_ctrl_c()
    log = CsvLog(results_path("serve", environment.gpu, args.output), COLUMNS)
    failures = Failures()
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder, failures.noted(model):
            checkpoint = Path(folder)
            make_checkpoint(checkpoint, model, true_llm=True)
            held = serving(
                args.setups, checkpoint, model, environment.vllm, args, failures
            )
            with held as servers:
                measure(servers, checkpoint, model, args, log, failures, environment)
    failures.end(log.path)


if __name__ == "__main__":
    main()

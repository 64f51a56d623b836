# SPDX-License-Identifier: Apache-2.0
"""Times the parts of a request's life in real engines, one request at a time.

An engine (`vllm.LLM`) of each setup, as in bench_serve.py, gets the same requests in
turns. vLLM itself times its image processor and its encoder, for which it waits for the
device (`enable_mm_processor_stats`); the rest is timed around it:

- `decode`: from the JPEG in the request to an image, by vLLM's own function;
- `processor`: the Hugging Face image processor, which resizes and cuts into patches;
- `around the processor`: hashes, cache, placeholders;
- `encoder`: the vision tower;
- `language model`: a request of as many text tokens, all of it;
- `rest`: what is missing to the whole: moving pixels, scheduling, embeddings;
- `whole`: from the call until the first token is there.

After them come requests that PyTorch's profiler watches, which takes time itself: rows
of bench `trace` say when the GPU works and when it waits, see request_trace.py.

    python benchmarks/bench_request.py --models Qwen/Qwen3-VL-8B-Instruct
    python benchmarks/bench_request.py --setups stock-flash_attn:graph plugin:graph \\
        --engine-args "--mm-processor-cache-gb 0"    # no image comes twice
"""

import argparse
import json
import random
import shlex
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from csv_log import CsvLog, percentiles, results_path
from environment import ENVIRONMENT_COLUMNS, Environment
from failures import Failures
from make_checkpoint import make_checkpoint
from remote import Remote
from request_trace import PREPARATION, TRACED_STAGES, traced_stages
from serve_inputs import IMAGE_WORKLOADS, WORKLOADS, write_requests
from setups import SETUPS, Setup, setup_option, with_variables
from tower_cases import MODELS
from vllm_flashinfer_vit.choices.clock import order_of_turn
from vllm_flashinfer_vit.towers.spec import NAMED_MODELS

# In the order of a request's life; `whole` is their sum.
STAGES = (
    *PREPARATION,
    "encoder",
    "language model",
    "rest",
)
WHOLE = "whole"
# Of each kind of row, what a request consists of.
BENCHES = {"request": STAGES, "trace": TRACED_STAGES}
COLUMNS = (
    "bench",
    "provider",
    "mode",
    "model",
    "workload",
    "stage",
    "requests",
    "p20_ms",
    "p50_ms",
    "p80_ms",
    "engine_args",
    *ENVIRONMENT_COLUMNS,
)
# Requests of a turn. The first turn warms up, and is in no row.
REQUESTS = 6
TURNS = 2
# Watched requests; one more, before them, warms up.
TRACES = 3
START_TIMEOUT_S = 400.0
# A request's parts: its question and its images.
Content = list[dict[str, Any]]
# Text for the language model: token ids that are no special tokens.
TEXT_TOKENS = range(1000, 100000)


class Asked(NamedTuple):
    """A request that was answered.

    Attributes:
        decode: Milliseconds to decode its images, once more than for the answer.
        whole: Milliseconds from the call until the first token.
        tokens: Of its prompt.
        begin_ns: When it was called, since the epoch.
        end_ns: When it was answered.
        said: What vLLM has timed, in seconds.
    """

    decode: float
    whole: float
    tokens: int
    begin_ns: int
    end_ns: int
    said: Mapping[str, Sequence[float]]


class Engine:
    """A `vllm.LLM` in its own process, and what is asked of it there."""

    def __init__(
        self, setup: Setup, folder: str, model: str, vllm: str, more: Sequence[str]
    ) -> None:
        """Start it.

        Args:
            setup: With what.
            folder: What it serves.
            model: Name of the model that this is.
            vllm: Version of vLLM.
            more: Further options.
        """
        from vllm import LLM
        from vllm.config import ProfilerConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        options = ["--model", folder, *setup.options(model, vllm), *more]
        arguments = EngineArgs.from_cli_args(parser.parse_args(options))
        # It has no option of its own.
        arguments.enable_mm_processor_stats = True
        self._traces = Path(folder) / f"traces-{setup}".replace(":", "-")
        arguments.profiler_config = ProfilerConfig(
            profiler="torch",
            torch_profiler_dir=str(self._traces),
            torch_profiler_with_stack=False,
            torch_profiler_use_gzip=False,
            # A table for people, which takes longer than the request.
            torch_profiler_dump_cuda_time_total=False,
        )
        self._llm = LLM(**vars(arguments))

    @contextmanager
    def running(self) -> Iterator[None]:
        """End the engine's own processes at last: they hold the GPU's memory."""
        try:
            yield
        finally:
            self._llm.llm_engine.engine_core.shutdown()

    def ready(self) -> None:
        """Do nothing, see `running`."""

    def measure(self, requests: str) -> list[dict[str, float]]:
        """Return `STAGES` and `WHOLE` of each request of a file, in milliseconds."""
        return [self._timed(content) for content in contents(requests)]

    def trace(self, requests: str) -> list[dict[str, float]]:
        """Return `TRACED_STAGES` and `WHOLE` of each request of a file but the first.

        Raises:
            RuntimeError: vLLM has written no trace, or one that is not as it is known.
        """
        return [self._traced(content) for content in contents(requests)][1:]

    def _timed(self, content: Content) -> dict[str, float]:
        asked = self._asked(content)
        text = random.choices(TEXT_TOKENS, k=asked.tokens)
        language, _ = timed(lambda: self._fill(text))
        return stages(asked.whole, asked.decode, language, asked.said)

    def _traced(self, content: Content) -> dict[str, float]:
        self._llm.start_profile()
        try:
            asked = self._asked(content)
        finally:
            self._llm.stop_profile()
        written = list(self._traces.glob("*.json"))
        if len(written) != 1:
            raise RuntimeError(f"vLLM has written {len(written)} traces, not one")
        trace = json.loads(written[0].read_text(encoding="utf-8"))
        written[0].unlink()
        prepared = preparation(asked.decode, asked.said)
        found = traced_stages(trace, asked.begin_ns, asked.end_ns, prepared)
        return {**found, WHOLE: asked.whole}

    def _asked(self, content: Content) -> Asked:
        from vllm.benchmarks.mm_processor import collect_mm_processor_stats
        from vllm.multimodal.utils import fetch_image

        urls = [part["image_url"]["url"] for part in content if "image_url" in part]
        decode, _ = timed(lambda: [fetch_image(url) for url in urls])
        collect_mm_processor_stats(self._llm.llm_engine)
        begin_ns = time.time_ns()
        whole, tokens = timed(lambda: self._ask([{"role": "user", "content": content}]))
        end_ns = time.time_ns()
        said = collect_mm_processor_stats(self._llm.llm_engine)
        return Asked(decode, whole, tokens, begin_ns, end_ns, said)

    def _ask(self, messages: list[Any]) -> int:
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        (answer,) = self._llm.chat(messages, how, use_tqdm=False)
        assert answer.prompt_token_ids is not None
        return len(answer.prompt_token_ids)

    def _fill(self, tokens: list[int]) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        how = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        self._llm.generate(TokensPrompt(prompt_token_ids=tokens), how, use_tqdm=False)


def timed(call: Any) -> tuple[float, Any]:
    """Return a call's milliseconds, and what it returns."""
    start = time.perf_counter()
    result = call()
    return 1e3 * (time.perf_counter() - start), result


def contents(requests: str) -> list[Content]:
    """Return what each request of a file shows and asks."""
    lines = Path(requests).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["content"] for line in lines]


def stages(
    whole: float, decode: float, language: float, said: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Return `STAGES` and `WHOLE` of a request in milliseconds.

    Args:
        whole: All of it.
        decode: Its images' decoding.
        language: A request of as many text tokens.
        said: Seconds by stage, as vLLM's `collect_mm_processor_stats` returns them.

    Raises:
        RuntimeError: vLLM has timed no processor or no encoder.
    """
    prepared = preparation(decode, said)
    encoder = milliseconds(said, "encoder_forward_secs")
    rest = whole - sum(prepared.values()) - encoder - language
    later = zip(STAGES[len(prepared) :], (encoder, language, rest), strict=True)
    return {**prepared, **dict(later), WHOLE: whole}


def preparation(decode: float, said: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return `PREPARATION` of a request, see `stages`."""
    processor = milliseconds(said, "apply_hf_processor_secs")
    around = milliseconds(said, "preprocessor_total_secs") - processor
    return dict(zip(PREPARATION, (decode, processor, around), strict=True))


def milliseconds(said: Mapping[str, Sequence[float]], name: str) -> float:
    """Return all that vLLM has timed by a name.

    Raises:
        RuntimeError: It has timed nothing.
    """
    if name not in said:
        raise RuntimeError(f"vLLM has not timed {name!r}: {sorted(said)}")
    return 1e3 * sum(said[name])


@contextmanager
def started(
    args: argparse.Namespace,
    folder: Path,
    model: str,
    vllm: str,
    failures: Failures,
) -> Iterator[dict[Setup, Remote]]:
    """Hold a model's engines; those that do not start are noted and left out."""
    more = shlex.split(args.engine_args)
    with ExitStack() as stack:
        remotes = {}
        for setup in args.setups:
            given = (setup, str(folder), model, vllm, more)
            remote = Remote(Engine, given, setup.environment(more), START_TIMEOUT_S)
            stack.callback(remote.close)
            remotes[setup] = remote
        up = {}
        for setup, remote in remotes.items():
            with failures.noted(f"{model} {setup}"):
                remote.wait()
                up[setup] = remote
                print(f"{model} {setup} is up", flush=True)
        yield up


def measure(
    engines: Mapping[Setup, Remote],
    folder: Path,
    model: str,
    args: argparse.Namespace,
    rows: CsvLog,
    failures: Failures,
    environment: Environment,
) -> None:
    """Time every workload on every engine, in turns."""
    patch_size = NAMED_MODELS[model][1]["patch_size"]
    for name in args.workloads:
        found: dict[str, dict[Setup, list[dict[str, float]]]] = {
            bench: {setup: [] for setup in engines} for bench in BENCHES
        }
        for turn in range(-1, args.turns + (args.traces > 0)):
            is_traced = turn == args.turns
            seeds = [
                zlib.crc32(f"{name} {turn} {place}".encode())
                for place in range(
                    args.traces + 1 if is_traced else args.requests if turn >= 0 else 2
                )
            ]
            requests = folder / "requests.jsonl"
            write_requests(requests, WORKLOADS[name], patch_size, seeds)
            bench, method = ("trace", "trace") if is_traced else ("request", "measure")
            for setup in order_of_turn(list(engines), turn):
                with failures.noted(f"{model} {setup} {name}"):
                    taken = engines[setup].call(method, str(requests))
                    found[bench][setup] += taken if turn >= 0 else []
        for bench, by_setup in found.items():
            for setup, samples in by_setup.items():
                if samples:
                    what = bench, setup, model, name
                    add_rows(rows, what, samples, args, environment)


def add_rows(
    rows: CsvLog,
    what: tuple[str, Setup, str, str],
    samples: Sequence[Mapping[str, float]],
    args: argparse.Namespace,
    environment: Environment,
) -> None:
    """Write and print the stages of one setup's requests: bench, setup, model, name."""
    bench, setup, model, workload = what
    print(f"  {bench} {model} {setup} {workload}", flush=True)
    for stage in (*BENCHES[bench], WHOLE):
        values = [sample[stage] for sample in samples]
        p20, p50, p80 = (f"{ms:.2f}" for ms in percentiles(values))
        rows.add(
            {
                "bench": bench,
                "provider": setup.provider,
                "mode": setup.mode,
                "model": model,
                "workload": workload,
                "stage": stage,
                "requests": len(values),
                "p20_ms": p20,
                "p50_ms": p50,
                "p80_ms": p80,
                "engine_args": with_variables(args.engine_args),
                **asdict(environment),
            }
        )
        print(f"    {stage:<20} {p50:>8} ms", flush=True)


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
        "--workloads", nargs="+", choices=IMAGE_WORKLOADS, default=IMAGE_WORKLOADS
    )
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of a turn")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument(
        "--traces", type=int, default=TRACES, help="watched requests; 0 for none"
    )
    parser.add_argument("--engine-args", default="", help="more for every engine")
    parser.add_argument("--output", help="CSV file to append to")
    return parser.parse_args(argv)


def main() -> None:
    """Run the benchmark."""
    args = parse_args()
    environment = Environment.probe()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: the engines need one")
    rows = CsvLog(results_path("request", environment.gpu, args.output), COLUMNS)
    failures = Failures()
    for model in args.models:
        with tempfile.TemporaryDirectory() as name, failures.noted(model):
            folder = Path(name)
            make_checkpoint(folder, model, true_llm=True)
            held = started(args, folder, model, environment.vllm, failures)
            with held as engines:
                measure(engines, folder, model, args, rows, failures, environment)
    failures.end(rows.path)


if __name__ == "__main__":
    main()

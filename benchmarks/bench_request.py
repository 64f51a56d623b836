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

    python benchmarks/bench_request.py --models Qwen/Qwen3-VL-8B-Instruct
    python benchmarks/bench_request.py --setups stock-flash_attn:graph plugin:graph \\
        --engine-args "--mm-processor-cache-gb 0"    # no image comes twice
"""

import argparse
import json
import random
import shlex
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from csv_log import CsvLog, results_path
from environment import ENVIRONMENT_COLUMNS, Environment
from failures import Failures
from make_checkpoint import make_checkpoint
from remote import Remote
from serve_inputs import IMAGE_WORKLOADS, WORKLOADS, write_requests
from setups import Setup, setup_option
from tower_cases import MODELS
from vllm_flashinfer_vit.choices.clock import order_of_turn
from vllm_flashinfer_vit.towers.spec import NAMED_MODELS

SETUPS = ("stock-flash_attn:graph", "plugin:graph", "plugin-fp8:graph")
# In the order of a request's life; `whole` is their sum.
STAGES = (
    "decode",
    "processor",
    "around the processor",
    "encoder",
    "language model",
    "rest",
)
WHOLE = "whole"
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
START_TIMEOUT_S = 400.0
# Text for the language model: token ids that are no special tokens.
TEXT_TOKENS = range(1000, 100000)


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
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        options = ["--model", folder, *setup.options(model, vllm), *more]
        arguments = EngineArgs.from_cli_args(parser.parse_args(options))
        # It has no option of its own.
        arguments.enable_mm_processor_stats = True
        self._llm = LLM(**vars(arguments))

    def running(self) -> AbstractContextManager[None]:
        """Hold nothing: an engine is ready once it is made."""
        return nullcontext()

    def ready(self) -> None:
        """Do nothing, see `running`."""

    def measure(self, requests: str) -> list[dict[str, float]]:
        """Return the stages of each request of a file, in milliseconds."""
        lines = Path(requests).read_text(encoding="utf-8").splitlines()
        return [self._request(json.loads(line)["content"]) for line in lines]

    def _request(self, content: list[dict[str, Any]]) -> dict[str, float]:
        from vllm.benchmarks.mm_processor import collect_mm_processor_stats
        from vllm.multimodal.utils import fetch_image

        urls = [part["image_url"]["url"] for part in content if "image_url" in part]
        decode, _ = timed(lambda: [fetch_image(url) for url in urls])
        collect_mm_processor_stats(self._llm.llm_engine)
        whole, tokens = timed(lambda: self._ask([{"role": "user", "content": content}]))
        said = collect_mm_processor_stats(self._llm.llm_engine)
        text = random.choices(TEXT_TOKENS, k=tokens)
        language, _ = timed(lambda: self._fill(text))
        return stages(whole, decode, language, said)

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


def stages(
    whole: float, decode: float, language: float, said: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Return a request's stages in milliseconds.

    Args:
        whole: All of it.
        decode: Its images' decoding.
        language: A request of as many text tokens.
        said: Seconds by stage, as vLLM's `collect_mm_processor_stats` returns them.

    Raises:
        RuntimeError: vLLM has timed no processor or no encoder.
    """
    by_name = {name: 1e3 * sum(values) for name, values in said.items()}
    try:
        processor = by_name["apply_hf_processor_secs"]
        around = by_name["preprocessor_total_secs"] - processor
        encoder = by_name["encoder_forward_secs"]
    except KeyError as error:
        raise RuntimeError(f"vLLM has not timed {error}: {sorted(by_name)}") from None
    known = (decode, processor, around, encoder, language)
    rest = whole - sum(known)
    return {**dict(zip(STAGES, (*known, rest), strict=True)), WHOLE: whole}


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
        found: dict[Setup, list[dict[str, float]]] = {setup: [] for setup in engines}
        for turn in range(-1, args.turns):
            seeds = [
                zlib.crc32(f"{name} {turn} {place}".encode())
                for place in range(args.requests if turn >= 0 else 2)
            ]
            requests = folder / "requests.jsonl"
            write_requests(requests, WORKLOADS[name], patch_size, seeds)
            for setup in order_of_turn(list(engines), turn):
                with failures.noted(f"{model} {setup} {name}"):
                    taken = engines[setup].call("measure", str(requests))
                    found[setup] += taken if turn >= 0 else []
        for setup, samples in found.items():
            if samples:
                add_rows(rows, setup, model, name, samples, args, environment)


def add_rows(
    rows: CsvLog,
    setup: Setup,
    model: str,
    workload: str,
    samples: Sequence[Mapping[str, float]],
    args: argparse.Namespace,
    environment: Environment,
) -> None:
    """Write and print the stages of one setup's requests."""
    print(f"  {model} {setup} {workload}", flush=True)
    for stage in (*STAGES, WHOLE):
        values = [sample[stage] for sample in samples]
        cuts = statistics.quantiles(values, n=10, method="inclusive")
        rows.add(
            {
                "bench": "request",
                "provider": setup.provider,
                "mode": setup.mode,
                "model": model,
                "workload": workload,
                "stage": stage,
                "requests": len(values),
                **{f"p{10 * i + 10}_ms": f"{cuts[i]:.2f}" for i in (1, 4, 7)},
                "engine_args": args.engine_args,
                **asdict(environment),
            }
        )
        print(f"    {stage:<20} {cuts[4]:8.2f} ms", flush=True)


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
    failures.summary()
    print(f"rows in {rows.path}")
    failures.exit()


if __name__ == "__main__":
    main()

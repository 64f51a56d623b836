# SPDX-License-Identifier: Apache-2.0
"""Checks and times encoder CUDA graphs in the real engine, without any weights.

For each model an engine starts with stock FLASH_ATTN and automatic budgets, compiled
where this vLLM can, and others with this package: with limits as vLLM's documentation
shows them, with automatic budgets, with these in FP8, and with these in an instance
that runs the encoder alone. They run on vLLM's default model runner, if that has
encoder graphs. In each, what a graph returns is compared with eager mode on the same
input, for fixed cases and for random mixtures; random requests must build nothing; and
the tower is timed while the other engines on its GPU wait, with a fixed case again and
again, with a mixture when it first comes.

A graph holds one attention kernel for every batch that fits into it; eager mode chooses
by the longest sequence of a batch, and `rel_err` and `bitwise` compare with that. Where
bits differ, eager mode runs again with the kernels of the graphs that served the
request, see `Encoder.eager_as`: `same_kernel_rel_err` and `same_kernel_bitwise`.

    python benchmarks/graph_check.py --gpus 4
    python benchmarks/graph_check.py --jobs 3                 # three share a GPU
    python benchmarks/graph_check.py --requests-budget-s 240 --budget-s 240    # all
    python benchmarks/graph_check.py --smoke --output out/graphs.csv

A run goes on where an earlier one of the same commit ended.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from chosen_rows import read
from csv_log import CsvLog, results_path
from engines import Job, start
from environment import (
    ENVIRONMENT_COLUMNS,
    STACK_COLUMNS,
    Environment,
    gpus_to_use,
    is_clean,
)
from failures import Failures
from graph_engine import CONFIGS, run_engine, run_smoke
from graph_requests import MAX_TOKENS
from tower_cases import MODELS

# Against eager mode with the graphs' kernels. Another order of sums is 0.01 to 0.03 in
# bf16, so the difference to plain eager mode, like stock's, is shown and not judged.
GATE = 1e-2
# Of one engine beyond its budgets: its start, and the fixed cases.
START_TIMEOUT_S = 300.0
COLUMNS = (
    "config",
    "provider",
    "model",
    "case",
    "requests",
    "patches",
    "padded_over_real",
    "graph_hits",
    "graph_misses",
    "rel_err",
    "bitwise",
    "same_kernel_rel_err",
    "same_kernel_bitwise",
    "p20_ms",
    "p50_ms",
    "p80_ms",
    "total_ms",
    "triton_kernels",
    "cudnn_plans",
    "workspace_bytes",
    "reserved_bytes",
    "start_s",
    *ENVIRONMENT_COLUMNS,
)


def jobs_for(models: Sequence[str], configs: Sequence[str]) -> list[Job]:
    """Return the engines to start, those that are compared side by side."""
    jobs = []
    for config in reversed(configs):
        jobs += [Job(model, config, "plugin") for model in models]
        if config == "automatic":
            # With limits, stock fails or is wrong: there is nothing to time.
            jobs += [Job(model, config, "stock-flash_attn") for model in models]
    return jobs


def finished(path: Path, environment: Environment) -> set[Job]:
    """Return the engines whose rows of this commit and stack are in a file already.

    Those with a row that is wrong are to run again, and all of a tree with changes.
    """
    if not path.exists() or not is_clean(environment.commit):
        return set()
    here = {name: getattr(environment, name) for name in ("commit", *STACK_COLUMNS)}
    ended, wrong = set(), set()
    for row in read(path):
        if any(row[name] != value for name, value in here.items()):
            continue
        job = Job(row["model"], row["config"], row["provider"])
        if row["case"] == "random mixtures":
            ended.add(job)
        # Stock's faults are its results.
        if job.provider == "plugin" and judge(row):
            wrong.add(job)
    return ended - wrong


def judge(row: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a row of the plugin; nothing, if all is well."""
    faults = []
    error = row["same_kernel_rel_err"]
    if error != "" and not float(error) <= GATE:
        faults.append(f"graph and eager mode with the same kernels differ by {error}")
    for name in ("triton_kernels", "cudnn_plans", "workspace_bytes"):
        if row[name] not in ("", 0, "0"):
            faults.append(f"{row[name]} {name} built within requests")
    return faults


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=[*CONFIGS])
    parser.add_argument("--mixtures", type=int, default=300, help="random mixtures")
    parser.add_argument("--requests", type=int, default=1000, help="after start")
    parser.add_argument(
        "--requests-budget-s",
        type=float,
        default=90,
        help="limit of the requests after start, for each engine",
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=120,
        help="to compare and to time the mixtures, for each engine",
    )
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to spread over")
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time on each")
    parser.add_argument("--smoke", action="store_true", help="small, on a CPU")
    parser.add_argument("--logs", help="folder to keep logs in")
    parser.add_argument("--output", help="CSV file to append to")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Check and time the engines."""
    args = parse_args()
    if args.one is not None:
        job, options = Job(**json.loads(args.one[0])), json.loads(args.one[1])
        run = run_smoke if options["smoke"] else run_engine
        run(job, options, Path(args.one[2]))
        return
    if not torch.cuda.is_available() and not args.smoke:
        raise SystemExit("no GPU here: the engine needs one; --smoke does without")
    environment = Environment.probe()
    path = results_path("graphs", environment.gpu, args.output)
    log, failures = CsvLog(path, COLUMNS), Failures()
    options = {
        "smoke": args.smoke,
        "mixtures": 8 if args.smoke else args.mixtures,
        "requests": 8 if args.smoke else args.requests,
        "max_tokens": 512 if args.smoke else MAX_TOKENS,
        "budget_s": args.budget_s,
        "requests_budget_s": args.requests_budget_s,
    }
    # Engines that share a GPU wait while one of them is timed.
    timeout_s = START_TIMEOUT_S + args.jobs * (args.budget_s + args.requests_budget_s)
    # A simulated GPU is a number.
    smoke_gpus = [str(i) for i in range(args.gpus)]
    gpus = smoke_gpus if args.smoke else gpus_to_use(args.gpus)
    skip, jobs = finished(path, environment), []
    for job in jobs_for(args.models, args.configs):
        if job in skip:
            print(f"{job.stem}: its rows of {environment.commit} are there already")
        elif job.provider == "plugin" or not args.smoke:
            jobs.append(job)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.logs or scratch).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        free: SimpleQueue[str] = SimpleQueue()
        for gpu in gpus * args.jobs:
            free.put(gpu)

        def run_on_free_gpu(job: Job) -> None:
            gpu = free.get()
            try:
                start(
                    __file__,
                    job,
                    [json.dumps(options | {"gpu": gpu})],
                    folder,
                    timeout_s,
                    {"CUDA_VISIBLE_DEVICES": gpu},
                )
            finally:
                free.put(gpu)

        with ThreadPoolExecutor(len(gpus) * args.jobs) as pool:
            running = {pool.submit(run_on_free_gpu, job): job for job in jobs}
            for future in as_completed(running):
                job = running[future]
                with failures.noted(job.stem):
                    future.result()
                    report(job, folder, log, failures, environment)
    failures.end(log.path)


def report(
    job: Job, folder: Path, log: CsvLog, failures: Failures, environment: Environment
) -> None:
    """Write, print and judge an engine's rows."""
    for values in json.loads((folder / f"{job.stem}.json").read_text()):
        if "refused" in values:
            failures.add(f"{job.stem} {values['case']}", values["refused"])
            continue
        row = {
            **dict.fromkeys(COLUMNS, ""),
            **asdict(job),
            **values,
            **asdict(environment),
        }
        log.add(row)
        shown = (
            "requests",
            "rel_err",
            "bitwise",
            "same_kernel_rel_err",
            "same_kernel_bitwise",
            "p50_ms",
            "total_ms",
            "padded_over_real",
        )
        facts = "  ".join(f"{name} {row[name]}" for name in shown if row[name] != "")
        print(f"{job.stem}: {row['case']}: {facts}", flush=True)
        for fault in judge(row) if job.provider == "plugin" else []:
            failures.add(f"{job.stem} {row['case']}", fault)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Times encoder attention at the level of the op: stock vLLM and this package.

Two benches. `attention` takes q and k rotated and contiguous and v as a strided view of
the projection, as stock's attention layer gets them. `qkv_attention` begins with the
projection `[T, 3 * H * D]` and the rotary tables, as the models' attention classes do.

With `--rooms` the batches are as an engine's CUDA graphs hold them: with padding, and
with empty sequences where there is room for more.

Providers with `fp8` in their names quantise within the measured time and have a gate of
their own, `FP8_GATE`; `plugin-fp8` is what a layer of mm_encoder_attn_dtype=fp8 runs.

    python benchmarks/bench_attention.py
    python benchmarks/bench_attention.py --rooms --modes graph
    python benchmarks/bench_attention.py --smoke --output out/attention.csv   # no GPU
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from correctness import check_error, relative_error
from csv_log import DTYPES, CsvLog, attention_flops, print_row, result_row, results_path
from environment import Environment, device
from failures import Failures
from op_problems import (
    CASES,
    NUM_HEADS,
    ROOMS,
    SMOKE_CASES,
    SMOKE_ROOMS,
    Problem,
    Room,
    make_problem,
    reference,
)
from op_providers import gate, provider_names, setup
from timing import Clock, Run, take_turns
from vllm_flashinfer_vit.choices.clock import capture

BENCHES = ("attention", "qkv_attention")


@dataclass
class Bench:
    """One run of this script: where rows go, and how long to measure."""

    log: CsvLog
    environment: Environment
    failures: Failures
    clock: Clock
    providers: Sequence[str]
    modes: Sequence[str]
    budget_s: float
    least_rounds: int

    def measure(self, bench: str, case: str, problem: Problem, dtype: str) -> None:
        """Check and time all providers on one case, and write their rows."""
        ref = reference(bench, problem)
        head_dim = problem.q.shape[2]
        what = f"{bench} {case} D={head_dim} {dtype}"
        ready: dict[str, Run] = {}
        for provider in self.providers:
            with self.failures.noted(f"{what} {provider}"):
                run = setup(provider, bench, problem)
                self._checked(run, ref, gate(provider, dtype))
                ready[provider] = run
        for mode in self.modes:
            runs, errors = {}, {}
            for provider, run in ready.items():
                with self.failures.noted(f"{what} {provider} {mode}"):
                    runs[provider] = capture(run) if mode == "graph" else run
                    limit = gate(provider, dtype)
                    errors[provider] = self._checked(runs[provider], ref, limit)
            timed = {name: runs[name] for name in errors}
            if not timed:
                continue
            samples = take_turns(
                self.clock, timed, mode, self.budget_s, self.least_rounds
            )
            for provider, taken in samples.items():
                row = result_row(
                    self.environment,
                    bench=bench,
                    case=case,
                    provider=provider,
                    model="",
                    head_dim=head_dim,
                    dtype=dtype,
                    mode=mode,
                    samples_ms=taken,
                    flops=attention_flops(problem.lens, NUM_HEADS, head_dim),
                    rel_err=errors[provider],
                )
                self.log.add(row)
                print_row(row)

    def _checked(self, run: Run, ref: torch.Tensor, limit: float) -> float:
        # Stock leaves rows of padding as they are.
        rows = run().reshape(-1, *ref.shape[1:])[: ref.shape[0]]
        rel_err = relative_error(rows, ref)
        check_error(rel_err, limit)
        return rel_err


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    batches = parser.add_mutually_exclusive_group()
    batches.add_argument("--cases", nargs="+", choices=[*CASES, *SMOKE_CASES])
    batches.add_argument("--rooms", action="store_true", help="as graphs hold batches")
    parser.add_argument("--head-dims", nargs="+", type=int, help="default 72 80")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--benches", nargs="+", choices=BENCHES, default=BENCHES)
    parser.add_argument("--modes", nargs="+", choices=("eager", "graph"))
    parser.add_argument("--providers", nargs="+")
    parser.add_argument(
        "--budget-s", type=float, help="time per case and mode, all providers together"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny cases, any machine")
    parser.add_argument("--output", help="CSV file to append to")
    return parser.parse_args()


def run_cases(bench: Bench, args: argparse.Namespace) -> None:
    """Time every provider on every case, head dim and dtype asked for."""
    known = {**CASES, **SMOKE_CASES}
    cases: dict[str, tuple[tuple[int, ...], Room | None]] = {}
    if args.rooms:
        cases |= SMOKE_ROOMS if args.smoke else ROOMS
    else:
        names = args.cases or (SMOKE_CASES if args.smoke else CASES)
        cases |= {name: (known[name], None) for name in names}
    for dtype in args.dtypes or ["bf16"]:
        for head_dim in args.head_dims or (72, 80):
            for name, (lens, room) in cases.items():
                problem = make_problem(lens, head_dim, DTYPES[dtype], device(), room)
                for level in args.benches:
                    print(f"{level} {name} D={head_dim} {dtype}", flush=True)
                    bench.measure(level, name, problem, dtype)


def main() -> None:
    """Run the benchmark."""
    args = parse_args()
    on_gpu = device().type == "cuda"
    if not on_gpu and not args.smoke:
        raise SystemExit("no GPU here: only --smoke runs on the CPU")
    if not on_gpu:
        from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform

        use_cpu_platform()
    torch.set_float32_matmul_precision("highest")
    modes = ["eager", "graph"] if on_gpu else ["eager"]
    environment = Environment.probe()
    # Their rows are no part of the mean over cases.
    name = "attention_in_graphs" if args.rooms else "attention"
    output = results_path(name, environment.gpu, args.output)
    bench = Bench(
        log=CsvLog(output),
        environment=environment,
        failures=Failures(),
        clock=Clock(device()),
        providers=args.providers or provider_names(),
        modes=args.modes or modes,
        budget_s=args.budget_s or (0.03 if args.smoke else 0.4),
        least_rounds=3 if args.smoke else 7,
    )
    with torch.inference_mode():
        run_cases(bench, args)
    bench.failures.end(output)


if __name__ == "__main__":
    main()

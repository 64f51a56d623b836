# SPDX-License-Identifier: Apache-2.0
"""Times encoder attention at the level of the op: stock vLLM and this package.

Two benches. `attention` takes q and k rotated and contiguous and v as a strided view of
the projection, as stock's attention layer gets them. `qkv_attention` begins with the
QKV projection `[T, 3 * H * D]` and the rotary tables, as the models' attention classes
do. `--sweep` times kernels over lengths and counts, for the table of choices.

Providers with `fp8` in their names quantise within the measured time and have a gate of
their own, `FP8_GATE`; `plugin-fp8` is what a layer of mm_encoder_attn_dtype=fp8 runs.

    python benchmarks/bench_attention.py
    python benchmarks/bench_attention.py --sweep
    python benchmarks/bench_attention.py --smoke --output out/attention.csv   # no GPU
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from correctness import check_error, relative_error
from csv_log import DTYPES, CsvLog, attention_flops, print_row, result_row, results_path
from environment import Environment, device
from failures import Failures
from op_problems import CASES, NUM_HEADS, SMOKE_CASES, Problem, make_problem, reference
from op_providers import gate, is_fp8_provider, provider_names, setup
from timing import Clock, Run, take_turns
from vllm_flashinfer_vit.choices.clock import capture
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS

BENCHES = ("attention", "qkv_attention")
SWEEP_LENGTHS = tuple(2**i for i in range(4, 17))
SWEEP_COUNTS = tuple(2**i for i in range(11))
SWEEP_MAX_TOKENS = 2**17
SWEEP_MAX_FLOPS = 4e13


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

    def measure(
        self,
        bench: str,
        case: str,
        problem: Problem,
        dtype: str,
        max_seqs: int | None = None,
        max_rows: int | None = None,
        row_bench: str | None = None,
    ) -> None:
        """Check and time all providers on one case, and write their rows."""
        rows, ref = reference(bench, problem, max_seqs, max_rows)
        head_dim = problem.q.shape[2]
        what = f"{bench} {case} D={head_dim} {dtype}"
        ready: dict[str, Run] = {}
        for provider in self.providers:
            with self.failures.noted(f"{what} {provider}"):
                run = setup(provider, bench, problem)
                self._checked(run, rows, ref, gate(provider, dtype))
                ready[provider] = run
        for mode in self.modes:
            runs, errors = {}, {}
            for provider, run in ready.items():
                with self.failures.noted(f"{what} {provider} {mode}"):
                    runs[provider] = capture(run) if mode == "graph" else run
                    limit = gate(provider, dtype)
                    errors[provider] = self._checked(runs[provider], rows, ref, limit)
            timed = {name: runs[name] for name in errors}
            if not timed:
                continue
            samples = take_turns(
                self.clock, timed, mode, self.budget_s, self.least_rounds
            )
            for provider, taken in samples.items():
                row = result_row(
                    self.environment,
                    bench=row_bench or bench,
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

    def _checked(
        self, run: Run, rows: torch.Tensor, ref: torch.Tensor, limit: float
    ) -> float:
        out = run().reshape(-1, *ref.shape[1:])
        rel_err = relative_error(out[rows], ref)
        check_error(rel_err, limit)
        return rel_err


def sweep_cases() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the sweep's cases, `NxL`: N sequences of L tokens."""
    for length in SWEEP_LENGTHS:
        for count in SWEEP_COUNTS:
            if count * length > SWEEP_MAX_TOKENS:
                continue
            if attention_flops([length] * count, NUM_HEADS, 128) > SWEEP_MAX_FLOPS:
                continue
            yield f"{count}x{length}", (length,) * count


def run_sweep(bench: Bench, args: argparse.Namespace) -> None:
    """Time the kernels over lengths and counts until the time is up."""
    until = time.monotonic() + args.limit_s
    left_out = 0
    for dtype in args.dtypes or ("bf16", "fp16"):
        for head_dim in args.head_dims or HEAD_DIMS:
            print(f"sweep D={head_dim} {dtype}", flush=True)
            for case, lens in sweep_cases():
                if time.monotonic() > until:
                    left_out += 1
                    continue
                problem = make_problem(lens, head_dim, DTYPES[dtype], device())
                # A spread of rows is enough to tell a wrong kernel from a right one.
                bench.measure("attention", case, problem, dtype, 8, 256, "sweep")
            torch.cuda.empty_cache()
    if left_out:
        bench.failures.add("sweep", f"{left_out} cases left out after {args.limit_s} s")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *SMOKE_CASES])
    parser.add_argument("--head-dims", nargs="+", type=int, help="default 72 80")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--benches", nargs="+", choices=BENCHES, default=BENCHES)
    parser.add_argument("--modes", nargs="+", choices=("eager", "graph"))
    parser.add_argument("--providers", nargs="+")
    parser.add_argument(
        "--budget-s", type=float, help="time per case and mode, all providers together"
    )
    parser.add_argument("--sweep", action="store_true", help="kernels, for the table")
    parser.add_argument(
        "--limit-s", type=float, default=170.0, help="time of the whole sweep"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny cases, any machine")
    parser.add_argument("--output", help="CSV file to append to")
    return parser.parse_args()


def run_cases(bench: Bench, args: argparse.Namespace) -> None:
    """Time every provider on every case, head dim and dtype asked for."""
    known = {**CASES, **SMOKE_CASES}
    names = args.cases or (SMOKE_CASES if args.smoke else CASES)
    for dtype in args.dtypes or ["bf16"]:
        for head_dim in args.head_dims or (72, 80):
            for name in names:
                problem = make_problem(known[name], head_dim, DTYPES[dtype], device())
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
    providers = args.providers or provider_names()
    if args.sweep and not args.providers and on_gpu:
        providers = [
            name
            for name in providers
            if name.startswith("plugin-") and not is_fp8_provider(name)
        ]
    modes = ["eager", "graph"] if on_gpu else ["eager"]
    quick = args.sweep or args.smoke
    environment = Environment.probe()
    name = "sweep" if args.sweep else "attention"
    output = results_path(name, environment.gpu, args.output)
    bench = Bench(
        log=CsvLog(output),
        environment=environment,
        failures=Failures(),
        clock=Clock(device()),
        providers=providers,
        modes=["graph"] if args.sweep else args.modes or modes,
        budget_s=args.budget_s or (0.03 if quick else 0.4),
        least_rounds=3 if quick else 7,
    )
    try:
        with torch.inference_mode():
            if args.sweep:
                run_sweep(bench, args)
            else:
                run_cases(bench, args)
    finally:
        bench.failures.summary()
    print(f"rows in {output}")
    bench.failures.exit()


if __name__ == "__main__":
    main()

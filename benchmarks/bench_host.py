# SPDX-License-Identifier: Apache-2.0
"""Times what the host spends on vision towers in eager mode.

- `attention`: a call of one attention layer, which is the forward pass of vLLM's own
  module, from the QKV projection to the input of the output projection; both GEMMs are
  replaced by tensors. Nothing waits for the device within a batch of calls, and inputs
  are small, so that it keeps up with the host.
- `tower`: a pass of a whole tower, over its blocks: from the call until it returns, on
  an idle device. It includes patch embedding, metadata and merger. Each provider has a
  process of its own, as in bench_encoder.py.
- `metadata`: one call of `prepare_encoder_metadata` in these processes, for batches of
  a size never seen and for one that is known.
- `steps`: each step of the plugin's block alone, in batches of calls.

    python benchmarks/bench_host.py
    python benchmarks/bench_host.py --bench tower --stock-modes fused_host
    python benchmarks/bench_host.py --smoke --output out/host.csv   # no GPU
"""

import argparse
import copy
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tower_cases
from csv_log import DTYPES, CsvLog, print_row, result_row, results_path
from environment import Environment, device
from failures import Failures
from host_layers import DTYPE, build_layers, provider_names, ready_calls, serves
from host_load import load_text, watched_load
from model_names import any_model, named_model
from op_problems import make_problem
from timing import host_ms
from tower_bench import TURNS, Bench
from tower_cases import Grids
from tower_worker import RemoteTower
from vllm_flashinfer_vit.choices.clock import order_of_turn
from vllm_flashinfer_vit.towers.spec import resolve_spec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

# In the order in which they run: stock's layers come before the plugin is active.
BENCHES = ("attention", "tower", "metadata", "steps")
DEFAULT_BENCHES = ("attention", "tower", "metadata")
# Lengths of the sequences. None keeps a GPU busy for longer than the host needs.
CASES = {
    "win64x16": (64,) * 16,
    "4x100": (100,) * 4,
    "1x256": (256,),
    "1x1024": (1024,),
    "mixed4": (64, 256, 400, 144),
}
SMOKE_CASES = {"2x24": (24, 24)}
# Both run the same attention module, with 16 heads of 80 and of 72.
MODELS = ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-8B-Instruct")
TOWERS: dict[str, Grids] = {
    # Even the plugin's blocks take the device less time than the host.
    "1x64": tower_cases.SMOKE_CASES["1x64"],
    "1x256": tower_cases.CASES["1x256"],
    "1x1024": tower_cases.CASES["1x1024"],
}
METADATA = {name: tower_cases.CASES[name] for name in ("1x256", "20x400")}
SMOKE_GRIDS = {"1x64": TOWERS["1x64"]}
# What the rows of `steps` are measured on; their case is the step.
STEPS_CASE = "1x256"
# Samples of each provider of `metadata`: a cold one takes a size of its own.
METADATA_SAMPLES = 48

Step = Callable[[], object]


@dataclass(frozen=True)
class Rows:
    """Where rows go.

    Attributes:
        log: The file.
        environment: Their last columns.
    """

    log: CsvLog
    environment: Environment

    def add(self, **measured: Any) -> None:
        """Write and print a row of the host's time; see `result_row`."""
        row = result_row(
            self.environment, dtype=DTYPE, mode="host", flops=0, **measured
        )
        self.log.add(row)
        print_row(row)


def take_turns(
    runs: Mapping[str, Callable[[], object]], batches: int, calls: int
) -> dict[str, list[float]]:
    """Time a batch of every call a round, in the order of `order_of_turn`."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(batches):
        for name in order_of_turn(list(runs), turn):
            samples[name].append(host_ms(runs[name], calls))
    return samples


def time_attention(
    rows: Rows, failures: Failures, args: argparse.Namespace, cases: Sequence[str]
) -> None:
    """Time every provider's attention layer on every case."""
    known = {**CASES, **SMOKE_CASES}
    providers = args.providers or provider_names()
    layers = build_layers(providers, args.models or MODELS, failures)
    with torch.inference_mode():
        for model, by_provider in layers.items():
            for case in cases:
                print(f"{model} {case}", flush=True)
                able = {
                    name: layer
                    for name, layer in by_provider.items()
                    if serves(name, known[case])
                }
                if not able:
                    continue
                head_dim = next(iter(able.values())).head_dim
                problem = make_problem(known[case], head_dim, DTYPES[DTYPE], device())
                runs, errors = ready_calls(able, problem, f"{model} {case}", failures)
                with watched_load():
                    samples = take_turns(runs, args.batches, args.calls)
                for provider, taken in samples.items():
                    rows.add(
                        bench="host",
                        case=case,
                        provider=provider,
                        model=model,
                        head_dim=head_dim,
                        samples_ms=taken,
                        rel_err=errors[provider],
                    )


def time_towers(
    rows: Rows,
    failures: Failures,
    args: argparse.Namespace,
    towers: Mapping[str, Grids],
    metadata: Mapping[str, Grids],
) -> None:
    """Time passes of whole towers, and the preparation of their metadata."""
    on_gpu = device().type == "cuda"
    stock = "stock-flash_attn" if on_gpu else "stock-torch_sdpa"
    # On a CPU there is no FP8.
    mine = ("plugin", "plugin-fp8") if on_gpu else ("plugin",)
    bench = Bench(
        log=rows.log,
        environment=rows.environment,
        failures=failures,
        modes=("host",),
        stock_modes=args.stock_modes,
        dtype=DTYPE,
        budget_s=args.budget_s,
        bench="tower_host",
    )
    with bench.processes(args.providers or (stock, *mine)) as remotes:
        for model in tower_models(args):
            head_dim, ready = bench.build(remotes, model, args.depth)
            bench.run_cases(model, head_dim, ready, towers)
            # Attention's dtype and the blocks do not change the metadata.
            able = [
                remote
                for remote in ready[1:]
                if remote.contender.attn_dtype is None
                and remote.contender.blocks == "eager"
            ]
            for case, grids in metadata.items() if able else ():
                with failures.noted(f"{model} {case} metadata"):
                    time_metadata(rows, model, head_dim, able, case, grids)


def time_metadata(
    rows: Rows,
    model: str,
    head_dim: int,
    remotes: Sequence[RemoteTower],
    case: str,
    grids: Grids,
) -> None:
    """Time the metadata of a case in each process, of new sizes and of a known one."""
    (frames, height, width), *_ = grids
    cold = [
        ((frames, *size),) * len(grids)
        for size in other_sizes(height, width, METADATA_SAMPLES)
    ]
    for kind, batches in ("cold", cold), ("warm", [grids] * len(cold)):
        print(f"{model} {case}-{kind} metadata", flush=True)
        samples: dict[RemoteTower, list[float]] = {remote: [] for remote in remotes}
        with watched_load():
            for turn in range(TURNS):
                part = batches[turn::TURNS]
                for remote in order_of_turn(remotes, turn):
                    samples[remote] += remote.call("metadata_ms", grids, part)
        for remote, taken in samples.items():
            rows.add(
                bench="metadata_host",
                case=f"{case}-{kind}",
                provider=remote.contender.provider,
                model=model,
                head_dim=head_dim,
                samples_ms=taken,
                rel_err=math.nan,
            )


def other_sizes(height: int, width: int, count: int) -> list[tuple[int, int]]:
    """Return up to `count` sizes of about as many patches, the nearest first.

    They differ by at most a fifth in patches. Rows and columns are even, as every tower
    merges two by two, and the size itself is left out.
    """
    patches = height * width
    sides = range(2, 4 * max(height, width), 2)
    sizes = [(h, w) for h in sides for w in sides if (h, w) != (height, width)]
    near = [size for size in sizes if abs(math.prod(size) - patches) <= patches / 5]
    near.sort(key=lambda size: (abs(math.prod(size) - patches), size))
    return near[:count]


class _Projected:
    """Stands for a block's QKV projection, which has run and done no more."""

    turning = quantizing = None

    def __call__(self, now: Any) -> torch.Tensor:
        """Return what it wrote."""
        return now.qkv


def steps_of(tower: Tower, encode: Callable[[], object]) -> dict[str, Step]:
    """Return the launch of each step of the tower's first block, in their order.

    Args:
        tower: The plugin's.
        encode: Runs a pass of the case to time.

    Raises:
        RuntimeError: vLLM's own steps run the blocks.
    """
    from vllm_flashinfer_vit.blocks import linear
    from vllm_flashinfer_vit.blocks.attach import program_of

    program = program_of(tower.visual.get_submodule("blocks.0"))
    if program is None:
        raise RuntimeError("vLLM's own steps run the blocks of this tower")
    seen: dict[str, Any] = {}
    run = program.run

    def watched(x: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
        out = run(x, given)
        # Held, so that the pass and its buffers outlive the blocks after this one.
        seen.update(x=x, given=given, out=out, now=program._tower.now)
        return out

    vars(program)["run"] = watched
    try:
        encode()
    finally:
        del vars(program)["run"]
    x, now, given = seen["x"], seen["now"], seen["given"]
    total = torch.empty_like(x)
    following = program._tower.blocks[1]
    reader = following._attention.qkv.step
    # The projection is a step of its own: in the figure, times of steps are added.
    attention = copy.copy(program._attention)
    attention.qkv = _Projected()
    attend = functools.partial(attention, now, x, given, program._longest(given))
    context, settled = attend()
    attended, normed = now.attended, now.normed
    mlp = program._mlp
    hidden = mlp.hidden_of(now)
    return {
        "QKV projection": lambda: program._attention.qkv(now),
        "rotary, attention": attend,
        "projection": lambda: program._projected(now, settled, context),
        "sum, norm": lambda: program._sum(
            now, x, (attended,), program._norm2, None, mlp.first, ()
        ),
        "MLP, first": lambda: mlp.hidden_of(now),
        "MLP, second": lambda: linear.run(
            now.settled, "second", mlp.second, hidden, normed
        ),
        "memory for the sum": lambda: torch.empty_like(x),
        "last sum, norm": lambda: program._sum(
            now, x, (attended, normed), following._norm1, total, reader, ()
        ),
    }


def time_steps(rows: Rows, failures: Failures, args: argparse.Namespace) -> None:
    """Time each step of the plugin's block in each model."""
    grids = SMOKE_GRIDS["1x64"] if args.smoke else METADATA[STEPS_CASE]
    for model in tower_models(args):
        with failures.noted(f"{model} steps"):
            # The first of two blocks: the last one normalises nothing for the next.
            tower = build_tower(
                resolve_spec(model, random_weights=True, depth=2),
                backend="FLASHINFER",
                dtype=DTYPES[DTYPE],
                device=device(),
            )
            patches = sum(math.prod(grid) for grid in grids)
            pixels = torch.randn(patches, tower.spec.patch_dim)
            encode = functools.partial(tower.encode, pixels, grids)
            print(f"{model} steps", flush=True)
            with tower.running(), watched_load():
                steps = steps_of(tower, encode)
                samples = take_turns(steps, args.batches, args.calls)
            head_dim = next(iter(tower.attention_layers().values())).head_size
            for step, taken in samples.items():
                rows.add(
                    bench="step_host",
                    case=step,
                    provider="plugin",
                    model=model,
                    head_dim=head_dim,
                    samples_ms=taken,
                    rel_err=math.nan,
                )


def tower_models(args: argparse.Namespace) -> Sequence[str]:
    """Return the models of the towers: those asked for, or bench_encoder's."""
    own = tower_cases.MODELS[1:2] if args.smoke else tower_cases.MODELS
    return args.models or own


def cases_of(
    known: Iterable[str], smoke: Iterable[str], args: argparse.Namespace
) -> list[str]:
    """Return a bench's cases: those asked for that it has, or its own."""
    if args.cases:
        return [case for case in args.cases if case in {*known, *smoke}]
    return list(smoke if args.smoke else known)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bench", nargs="+", choices=BENCHES, default=DEFAULT_BENCHES, dest="benches"
    )
    cases = {**CASES, **SMOKE_CASES, **TOWERS, **METADATA}
    parser.add_argument("--cases", nargs="+", choices=cases, help="not for steps")
    parser.add_argument(
        "--models",
        nargs="+",
        type=any_model,
        help="names or checkpoint folders; default: each bench has its own",
    )
    parser.add_argument("--providers", nargs="+", help="not for steps")
    parser.add_argument(
        "--stock-modes",
        nargs="+",
        choices=("fused_host", "compiled_host"),
        default=(),
        help="more of stock's towers, see bench_encoder.py",
    )
    parser.add_argument("--depth", type=int, help="a tower's blocks; default all")
    parser.add_argument(
        "--batches", type=int, default=40, help="samples of a layer or step"
    )
    parser.add_argument("--calls", type=int, default=50, help="calls of a batch")
    parser.add_argument(
        "--budget-s", type=float, default=2.0, help="of a tower's case, all providers"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny cases, any machine")
    parser.add_argument("--output", help="CSV file to append to")
    args = parser.parse_args(argv)
    if {"attention", "steps"} & {*args.benches}:
        try:
            for model in args.models or ():
                named_model(model)
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --models: attention and steps: {error}")
    if args.smoke and args.depth is None:
        args.depth = 2
    return args


def main() -> None:
    """Run the benchmarks."""
    args = parse_args()
    if device().type == "cpu" and not args.smoke:
        raise SystemExit("no GPU here: only --smoke runs on the CPU")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    cases = {
        "attention": cases_of(CASES, SMOKE_CASES, args),
        "tower": cases_of(TOWERS, SMOKE_GRIDS, args),
        "metadata": cases_of(METADATA, SMOKE_GRIDS, args),
    }
    wanted = {bench: names for bench, names in cases.items() if bench in args.benches}
    if strange := {*(args.cases or ())} - {*sum(wanted.values(), [])}:
        raise SystemExit(
            f"{', '.join(strange)}: no case of {', '.join(args.benches)}; attention "
            f"has {', '.join(CASES)}, tower {', '.join(TOWERS)}, metadata "
            f"{', '.join(METADATA)}"
        )
    print(load_text())
    environment = Environment.probe()
    output = results_path("host", environment.gpu, args.output)
    rows, failures = Rows(CsvLog(output), environment), Failures()
    if names := wanted.get("attention"):
        time_attention(rows, failures, args, names)
    grids = {**TOWERS, **METADATA}
    towers, metadata = (
        {name: grids[name] for name in wanted.get(bench, ())}
        for bench in ("tower", "metadata")
    )
    if towers or metadata:
        time_towers(rows, failures, args, towers, metadata)
    if "steps" in args.benches:
        time_steps(rows, failures, args)
    failures.end(output)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Checks and times encoder CUDA graphs in the real engine, without any weights.

For each model an engine starts with stock FLASH_ATTN and automatic budgets (Qwen2.5-VL
compiled: stock's best), and three with this package: with limits as vLLM's
documentation shows them, with automatic budgets, and with these in FP8. In each, what a
graph returns is compared with eager mode on the same input, for fixed cases and for
random mixtures; random requests must build nothing; and the tower is timed while the
other engines wait.

    python benchmarks/graph_check.py --jobs 3                 # about 7 minutes
    python benchmarks/graph_check.py --smoke --output out/graphs.csv

A run goes on where an earlier one of the same commit ended.
"""

import argparse
import csv
import fcntl
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from common import (
    ENVIRONMENT_COLUMNS,
    CsvLog,
    Environment,
    Failures,
    percentiles,
    relative_error,
    results_path,
)
from engines import BACKENDS, MODELS, Job, fill_tower, start

# Engine arguments by name; `limits` are what vLLM's documentation shows.
CONFIGS: dict[str, dict[str, Any]] = {
    "limits": {
        "compilation_config": {
            "encoder_cudagraph_token_budgets": [256, 1024, 4096],
            "encoder_cudagraph_max_vision_items_per_batch": 8,
        }
    },
    "automatic": {},
    "fp8": {"mm_encoder_attn_dtype": "fp8"},
}
MAX_TOKENS = 16384
MERGE = 2
# Modality and grids in patches; the first seven are those of the stock survey.
CASES: dict[str, tuple[str, list[list[int]]]] = {
    "image 16x16": ("image", [[1, 16, 16]]),
    "image 26x38": ("image", [[1, 26, 38]]),
    "3 images mixed": ("image", [[1, 16, 16], [1, 26, 38], [1, 32, 32]]),
    "image 64x64": ("image", [[1, 64, 64]]),
    "8 x (32x32)": ("image", [[1, 32, 32]] * 8),
    "5 x (20x20)": ("image", [[1, 20, 20]] * 5),
    "video 4x16x24": ("video", [[4, 16, 24]]),
    "image 32x32": ("image", [[1, 32, 32]]),
    "20 x (20x20)": ("image", [[1, 20, 20]] * 20),
    "video 160x4x4": ("video", [[160, 4, 4]]),
}
# Another order of sums is 0.01 to 0.03 in bf16, so stock is shown, not judged.
GATE = 1e-2
ROUNDS = 20
PROCESS_TIMEOUT_S = 500.0
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

Request = tuple[str, list[list[int]]]


def mixtures(count: int, seed: int, max_tokens: int = MAX_TOKENS) -> list[Request]:
    """Return random requests: images of many sizes, a quarter of them videos."""
    rng = random.Random(seed)

    def side() -> int:
        # Log-uniform: as many images below 24 x 24 patches as above.
        return 2 * round(2 ** rng.uniform(1.6, 5.5))

    requests: list[Request] = []
    while len(requests) < count:
        if rng.random() < 0.25:
            h, w = side(), side()
            frames = rng.randint(1, 16)
            modality, grids = "video", [[frames, h, w]]
        else:
            grids = [[1, side(), side()] for _ in range(rng.randint(1, 8))]
            modality = "image"
        if patches(grids) <= max_tokens * MERGE**2:
            requests.append((modality, grids))
    return requests


def patches(grids: Sequence[Sequence[int]]) -> int:
    """Return the patches of a request."""
    return sum(t * h * w for t, h, w in grids)


class Encoder:
    """A manager and the model behind it, as one call."""

    def __init__(self, manager: Any, model: Any, device: torch.device) -> None:
        self.manager = manager
        self._model = model
        self._device = device
        self._is_qwen2_5 = type(model).__name__.startswith("Qwen2_5")
        proj = model.visual.patch_embed.proj
        embed = model.visual.patch_embed
        side = embed.patch_size**2 * embed.temporal_patch_size
        self._width, self._dtype = proj.in_channels * side, proj.weight.dtype

    def inputs(self, request: Request, seed: int) -> dict[str, Any]:
        """Return random pixels and the grids, as the engine batches them."""
        modality, grids = request
        generator = torch.Generator(self._device).manual_seed(seed)
        pixels = torch.randn(
            patches(grids),
            self._width,
            generator=generator,
            device=self._device,
            dtype=self._dtype,
        )
        name = "pixel_values" if modality == "image" else "pixel_values_videos"
        inputs = {name: pixels, f"{modality}_grid_thw": torch.tensor(grids)}
        if modality == "video" and self._is_qwen2_5:
            inputs["second_per_grid_ts"] = torch.ones(len(grids))
        return inputs

    def graph(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the embeddings by way of the manager."""
        return torch.cat(list(self.manager.execute(dict(inputs))))

    def eager(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the embeddings without graphs."""
        kwargs = {k: v for k, v in inputs.items() if k != "second_per_grid_ts"}
        return self._model.encoder_eager_forward(kwargs)


def check(encoder: Encoder, requests: Sequence[Request], until: float) -> list[Any]:
    """Compare graphs with eager mode; return relative error and equality of each."""
    found = []
    for seed, request in enumerate(requests):
        if found and time.monotonic() > until:
            break
        inputs = encoder.inputs(request, seed)
        ours, eager = encoder.graph(inputs), encoder.eager(inputs)
        error = relative_error(ours.float(), eager.float())
        found.append((error, bool(torch.equal(ours, eager))))
    return found


def waste_of(manager: Any) -> Callable[[], float]:
    """Count padded and real tokens of every replay; return their quotient so far."""
    padded = real = 0
    original = manager._run_budget_graph

    def run(mm_kwargs: dict[str, Any], token_budget: int, *args: Any, **kw: Any) -> Any:
        nonlocal padded, real
        # What the graph holds, which in stock is more than the budget.
        padded += held(manager, token_budget)
        real += sum(s.output_tokens for s in manager._get_item_specs(mm_kwargs))
        return original(mm_kwargs, token_budget, *args, **kw)

    manager._run_budget_graph = run
    return lambda: padded / real if real else 0.0


def held(manager: Any, token_budget: int) -> int:
    """Return the tokens that a budget's graph computes."""
    graphs = manager.budget_graphs
    graph = graphs.get("default", graphs)[token_budget]
    buffers = getattr(graph, "input_buffers", None)
    pixels = buffers["pixel_values"] if buffers else graph.input_buffer
    return pixels.shape[0] // MERGE**2


def times_ms(run: Callable[[], Any], rounds: int, device: torch.device) -> list[float]:
    """Time calls from their start on an idle device to the end of their work."""
    samples = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - begin) * 1e3)
    return samples


@contextmanager
def turn(lock: Path, exclusive: bool) -> Iterator[None]:
    """Hold the GPU alone for timing, or together with others."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


def measure(
    encoder: Encoder, job: Mapping[str, Any], lock: Path
) -> list[dict[str, Any]]:
    """Check, count and time one engine; return its rows but for the environment."""
    from vllm_flashinfer_vit.warmup import counters

    device = encoder._device
    rows = []
    mixed = mixtures(job["mixtures"], seed=0, max_tokens=job["max_tokens"])
    cases = {k: v for k, v in CASES.items() if patches(v[1]) <= 4 * job["max_tokens"]}

    def row(case: str, requests: Sequence[Request], **values: Any) -> None:
        total = sum(patches(grids) for _, grids in requests)
        rows.append(
            {"case": case, "requests": len(requests), "patches": total} | values
        )

    def counted(run: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        manager = encoder.manager
        hits, misses = manager.graph_hits, manager.graph_misses
        waste = waste_of(manager)
        try:
            result = run()
        finally:
            del manager.__dict__["_run_budget_graph"]
        return result, {
            "padded_over_real": f"{waste():.4f}",
            "graph_hits": manager.graph_hits - hits,
            "graph_misses": manager.graph_misses - misses,
        }

    with torch.inference_mode():
        with turn(lock, exclusive=False):
            fresh = mixtures(job["requests"], seed=1, max_tokens=job["max_tokens"])
            before = counters()
            reserved = _reserved(device)
            done = 0
            begin = time.monotonic()
            for seed, request in enumerate(fresh):
                encoder.graph(encoder.inputs(request, seed))
                done += 1
                if time.monotonic() - begin > job["budget_s"] / 4:
                    break
            after = counters()
            built = {
                name: new - old
                for name, old, new in zip(after._fields, before, after, strict=True)
            }
            row(
                "random requests after start",
                fresh[:done],
                reserved_bytes=_reserved(device) - reserved,
                **built,
            )
            errors = {
                name: counted(lambda r=request: check(encoder, [r], 0))
                for name, request in cases.items()
            }
            until = time.monotonic() + job["budget_s"] / 3
            found, facts = counted(lambda: check(encoder, mixed, until))
        with turn(lock, exclusive=True):
            for name, request in cases.items():
                inputs = encoder.inputs(request, 0)
                samples = times_ms(lambda i=inputs: encoder.graph(i), ROUNDS, device)
                (((error, same),), case_facts) = errors[name]
                row(
                    name,
                    [request],
                    rel_err=f"{error:.2e}",
                    bitwise=int(same),
                    **_percentiles(samples),
                    **case_facts,
                )
            samples = []
            begin = time.monotonic()
            for seed, request in enumerate(mixed):
                inputs = encoder.inputs(request, seed)
                encoder.graph(inputs)
                samples += times_ms(lambda i=inputs: encoder.graph(i), 1, device)
                if time.monotonic() - begin > job["budget_s"] / 3:
                    break
    row(
        "random mixtures",
        mixed[: len(found)],
        rel_err=f"{max(error for error, _ in found):.2e}",
        bitwise=f"{statistics.fmean(same for _, same in found):.3f}",
        total_ms=f"{sum(samples):.2f}" if len(samples) == len(mixed) else "",
        **_percentiles(samples),
        **facts,
    )
    return rows


def _percentiles(samples: Sequence[float]) -> dict[str, str]:
    names = ("p20_ms", "p50_ms", "p80_ms")
    return dict(zip(names, (f"{x:.4f}" for x in percentiles(samples)), strict=True))


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved() if device.type == "cuda" else 0


def run_engine(job: Job, options: Mapping[str, Any], folder: Path) -> None:
    """Start one engine, measure it, and leave a JSON file."""
    # The runner that has encoder CUDA graphs in every supported vLLM.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    from vllm import LLM

    from make_checkpoint import make_checkpoint

    checkpoint = folder / f"{job.stem}.checkpoint"
    make_checkpoint(checkpoint, job.model)
    is_stock = job.provider.startswith("stock")
    compiled = is_stock and "Qwen2.5" in job.model
    lock = folder / "gpu.lock"
    arguments = dict(CONFIGS[job.config])
    if "mm_encoder_attn_dtype" in arguments:
        # By measured choice bf16 would run where FP8 does not pay.
        os.environ.setdefault("VLLM_FLASHINFER_VIT_KERNEL", "triton_fp8")
    begin = time.perf_counter()
    with turn(lock, exclusive=False):
        llm = LLM(
            model=str(checkpoint),
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=MAX_TOKENS,
            max_num_batched_tokens=MAX_TOKENS,
            max_num_seqs=4,
            limit_mm_per_prompt={"image": 8, "video": 1},
            mm_encoder_attn_backend=BACKENDS[job.provider],
            # A fixed cache, since several engines may share a GPU.
            gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=2**30,
            seed=0,
            compilation_config={
                "cudagraph_mm_encoder": True,
                "compile_mm_encoder": compiled,
                "cudagraph_capture_sizes": [1],
                **arguments.pop("compilation_config", {}),
            },
            **arguments,
        )
        start_s = time.perf_counter() - begin
        llm.apply_model(fill_tower)

    def measure_worker(worker: Any) -> list[dict[str, Any]]:
        runner = worker.model_runner
        manager = runner.encoder_cudagraph_manager
        if manager is None:
            raise RuntimeError("this runner has no encoder CUDA graphs")
        model = runner.get_model()
        encoder = Encoder(manager, model, runner.device)
        return measure(encoder, options, lock)

    rows = llm.collective_rpc(measure_worker)[0]
    for row in rows:
        row["start_s"] = f"{start_s:.1f}"
    (folder / f"{job.stem}.json").write_text(json.dumps(rows))


def run_smoke(job: Job, options: Mapping[str, Any], folder: Path) -> None:
    """Do the same with small towers and simulated graphs, on a CPU."""
    from simulated_graphs import build_manager, capture, simulated_graphs
    from vllm_flashinfer_vit.tower import NAMED_MODELS, TowerSpec, build_tower

    family, config = NAMED_MODELS[job.model]
    small = {"depth": 2, "num_heads": 4, "fullatt_block_indexes": [1]}
    small |= {"hidden_size": 64, "embed_dim": 64, "out_hidden_size": 64}
    small |= {"intermediate_size": 96, "deepstack_visual_indexes": [0]}
    spec = TowerSpec(
        family,
        {name: small.get(name, value) for name, value in config.items()},
        job.model,
        None,
        2,
    )
    tower = build_tower(
        spec,
        backend="FLASHINFER",
        dtype=torch.float32,
        device="cpu",
        attn_dtype=CONFIGS[job.config].get("mm_encoder_attn_dtype"),
    )
    limits = {"budgets": (64, 256), "max_items": 8} if job.config == "limits" else {}
    with simulated_graphs(), tower.running():
        manager = build_manager(tower, max_tokens=options["max_tokens"], **limits)
        capture(manager, tower)
        model = getattr(manager.model, "wrapped", manager.model)
        encoder = Encoder(manager, model, torch.device("cpu"))
        rows = measure(encoder, options, folder / "gpu.lock")
    (folder / f"{job.stem}.json").write_text(json.dumps(rows))


def jobs_for(models: Sequence[str], configs: Sequence[str]) -> list[Job]:
    """Return the engines to start, those that are compared side by side."""
    jobs = []
    for config in reversed(configs):
        jobs += [Job(model, config, "plugin") for model in models]
        if config == "automatic":
            # With limits, stock fails or is wrong: there is nothing to time.
            jobs += [Job(model, config, "stock-flash_attn") for model in models]
    return jobs


def finished(path: Path, commit: str) -> set[Job]:
    """Return the engines whose rows of this commit are in a file already."""
    if not path.exists():
        return set()
    with path.open(newline="", encoding="utf-8") as file:
        return {
            Job(row["model"], row["config"], row["provider"])
            for row in csv.DictReader(file)
            if row["commit"] == commit and row["case"] == "random mixtures"
        }


def judge(row: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a row of the plugin; nothing, if all is well."""
    faults = []
    if row["rel_err"] != "" and not float(row["rel_err"]) <= GATE:
        faults.append(f"graph and eager mode differ by {row['rel_err']}")
    for name in ("triton_kernels", "cudnn_plans", "workspace_bytes"):
        if row[name] not in ("", 0):
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
    parser.add_argument("--budget-s", type=float, default=120, help="for each engine")
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time")
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
    }
    skip = finished(path, environment.commit)
    jobs = [job for job in jobs_for(args.models, args.configs) if job not in skip]
    if args.smoke:
        jobs = [job for job in jobs if job.provider == "plugin"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.logs or scratch).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(args.jobs) as pool:
            running = {
                job: pool.submit(
                    start,
                    __file__,
                    job,
                    [json.dumps(options)],
                    folder,
                    PROCESS_TIMEOUT_S,
                )
                for job in jobs
            }
            for job, future in running.items():
                with failures.noted(job.stem):
                    future.result()
                    report(job, folder, log, failures, environment)
    failures.summary()
    print(f"rows in {log.path}")
    if failures.lines:
        raise SystemExit(1)


def report(
    job: Job, folder: Path, log: CsvLog, failures: Failures, environment: Environment
) -> None:
    """Write, print and judge an engine's rows."""
    for values in json.loads((folder / f"{job.stem}.json").read_text()):
        row = {
            **dict.fromkeys(COLUMNS, ""),
            **asdict(job),
            **values,
            **asdict(environment),
        }
        log.add(row)
        shown = ("rel_err", "bitwise", "p50_ms", "total_ms", "padded_over_real")
        facts = "  ".join(f"{name} {row[name]}" for name in shown if row[name] != "")
        print(f"{job.stem}: {row['case']}: {facts}", flush=True)
        for fault in judge(row) if job.provider == "plugin" else []:
            failures.add(f"{job.stem} {row['case']}", fault)


if __name__ == "__main__":
    main()

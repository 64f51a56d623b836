# SPDX-License-Identifier: Apache-2.0
"""What the process of one engine does: it checks, counts and times encoder graphs."""

import fcntl
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from csv_log import percentiles
from engines import Job, fill_tower, manager_of, runner_with_graphs
from graph_encoder import Encoder, Found, compare
from graph_requests import CASES, MAX_TOKENS, Request, mixtures, patches, prefixes

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
    "fp8_linear": {"quantization": "fp8"},
}
if Version(version("vllm")) >= Version("0.29"):
    # The first with a runner for it.
    CONFIGS["encoder_only"] = {"mm_encoder_only": True}
ROUNDS = 20


def check(encoder: Encoder, requests: Sequence[Request], until: float) -> list[Found]:
    """Compare graphs with eager mode, at least for the first request."""
    found: list[Found] = []
    for seed, request in enumerate(requests):
        if found and time.monotonic() > until:
            break
        found.append(compare(encoder, encoder.inputs(request, seed)))
    return found


def summary(found: Sequence[Found]) -> dict[str, Any]:
    """Return the columns of compared requests: largest errors, shares of equal ones."""
    real = sum(one.real for one in found)
    padded = sum(one.padded for one in found)
    return {
        "padded_over_real": f"{padded / real:.4f}" if real else "",
        "graph_hits": sum(one.hits for one in found),
        "graph_misses": sum(one.misses for one in found),
        "rel_err": _worst([one.rel_err for one in found]),
        "bitwise": _share([one.bitwise for one in found]),
        "same_kernel_rel_err": _worst([one.same_kernel_rel_err for one in found]),
        "same_kernel_bitwise": _share([one.same_kernel_bitwise for one in found]),
    }


def _worst(errors: Sequence[float]) -> str:
    # `max` loses NaN after a number.
    return f"{torch.tensor(errors).max().item():.2e}"


def _share(equal: Sequence[bool]) -> str:
    return f"{statistics.fmean(equal):.3g}"


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
    """Hold a GPU alone for timing, or together with others."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


def serve(
    encoder: Encoder, requests: Sequence[Request], limit_s: float
) -> tuple[int, dict[str, int]]:
    """Serve requests; return how many, and what was built and reserved meanwhile."""
    from vllm_flashinfer_vit.engine.warmup import counters

    before, reserved = counters(), _reserved(encoder.device)
    done = 0
    until = time.monotonic() + limit_s
    for seed, request in enumerate(requests):
        if done and time.monotonic() > until:
            break
        encoder.graph(encoder.inputs(request, seed))
        done += 1
    after = counters()
    built = {
        name: new - old
        for name, old, new in zip(after._fields, before, after, strict=True)
    }
    built["reserved_bytes"] = _reserved(encoder.device) - reserved
    return done, built


def times_of(
    encoder: Encoder, requests: Sequence[Request], limit_s: float
) -> list[float]:
    """Time each request once, when it first comes, until the time is over.

    A run of it before would leave there what this package keeps by sizes.
    """
    samples: list[float] = []
    until = time.monotonic() + limit_s
    for seed, request in enumerate(requests):
        if samples and time.monotonic() > until:
            break
        inputs = encoder.inputs(request, seed)
        samples += times_ms(lambda i=inputs: encoder.graph(i), 1, encoder.device)
    return samples


def measure(
    encoder: Encoder, options: Mapping[str, Any], lock: Path, is_stock: bool = False
) -> list[dict[str, Any]]:
    """Check, count and time one engine; return its rows but for the environment.

    Of a case that stock's engine stops at, a row has the error alone, as `refused`.
    """
    rows = []
    max_tokens = options["max_tokens"]
    mixed = mixtures(options["mixtures"], seed=0, max_tokens=max_tokens)
    fresh = mixtures(options["requests"], seed=1, max_tokens=max_tokens)
    cases = {k: v for k, v in CASES.items() if patches(v[1]) <= 4 * max_tokens}
    # One half to time the mixtures, the other to compare them.
    half_s = options["budget_s"] / 2

    def row(case: str, requests: Sequence[Request], **values: Any) -> None:
        total = sum(patches(grids) for _, grids in requests)
        rows.append(
            {"case": case, "requests": len(requests), "patches": total} | values
        )

    with torch.inference_mode():
        with turn(lock, exclusive=False):
            done, built = serve(encoder, fresh, options["requests_budget_s"])
            row("random requests after start", fresh[:done], **built)
            compared = {}
            for name, case in cases.items():
                try:
                    compared[name] = check(encoder, [case], until=0)
                except RuntimeError as error:
                    # Its graphs have no room for so many frames.
                    if not is_stock:
                        raise
                    row(name, [case], refused=str(error))
        with turn(lock, exclusive=True):
            for name in compared:
                case = cases[name]
                inputs = encoder.inputs(case, 0)
                samples = times_ms(
                    lambda i=inputs: encoder.graph(i), ROUNDS, encoder.device
                )
                row(name, [case], **summary(compared[name]), **_percentiles(samples))
            samples = times_of(encoder, mixed, half_s)
        with turn(lock, exclusive=False):
            found = check(encoder, mixed, time.monotonic() + half_s)
    for count in prefixes(len(mixed)):
        if count <= len(samples):
            row(
                f"first {count} random mixtures",
                mixed[:count],
                total_ms=f"{sum(samples[:count]):.2f}",
                **_percentiles(samples[:count]),
            )
    # The last row of an engine, see `finished` in graph_check.py.
    row("random mixtures", mixed[: len(found)], **summary(found))
    return rows


def _percentiles(samples: Sequence[float]) -> dict[str, str]:
    names = ("p20_ms", "p50_ms", "p80_ms")
    return dict(zip(names, (f"{x:.4f}" for x in percentiles(samples)), strict=True))


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved() if device.type == "cuda" else 0


def run_engine(job: Job, options: Mapping[str, Any], folder: Path) -> None:
    """Start one engine, measure it, and leave a JSON file."""
    os.environ.update(runner_with_graphs())
    from vllm import LLM

    from make_checkpoint import make_checkpoint

    checkpoint = folder / f"{job.stem}.checkpoint"
    make_checkpoint(checkpoint, job.model)
    lock = lock_of(options, folder)
    arguments = dict(CONFIGS[job.config])
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
            mm_encoder_attn_backend=job.contender.backend,
            # A fixed cache, since several engines may share a GPU.
            gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=2**30,
            seed=0,
            compilation_config={
                "cudagraph_mm_encoder": True,
                "compile_mm_encoder": job.provider.startswith("stock"),
                "cudagraph_capture_sizes": [1],
                **arguments.pop("compilation_config", {}),
            },
            **arguments,
        )
        start_s = time.perf_counter() - begin
        llm.apply_model(fill_tower)

    def measure_worker(worker: Any) -> list[dict[str, Any]]:
        runner = worker.model_runner
        encoder = Encoder(manager_of(runner), runner.get_model(), runner.device)
        return measure(encoder, options, lock, job.provider.startswith("stock"))

    rows = llm.collective_rpc(measure_worker)[0]
    for row in rows:
        row["start_s"] = f"{start_s:.1f}"
    (folder / f"{job.stem}.json").write_text(json.dumps(rows))


def run_smoke(job: Job, options: Mapping[str, Any], folder: Path) -> None:
    """Do the same with small towers and simulated graphs, on a CPU."""
    from simulated_graphs import build_manager, capture, simulated_graphs

    tower = small_tower(job)
    limits = {"budgets": (64, 256), "max_items": 8} if job.config == "limits" else {}
    with simulated_graphs(), tower.running():
        manager = build_manager(tower, max_tokens=options["max_tokens"], **limits)
        capture(manager, tower)
        model = getattr(manager.model, "wrapped", manager.model)
        encoder = Encoder(manager, model, torch.device("cpu"))
        rows = measure(encoder, options, lock_of(options, folder))
    (folder / f"{job.stem}.json").write_text(json.dumps(rows))


def lock_of(options: Mapping[str, Any], folder: Path) -> Path:
    """Return the file that the engines of one GPU lock in turns."""
    return folder / f"gpu-{options['gpu']}.lock"


def small_tower(job: Job) -> Any:
    """Return a small tower of a job's model, on the CPU."""
    from vllm_flashinfer_vit.towers.spec import NAMED_MODELS, TowerSpec
    from vllm_flashinfer_vit.towers.tower import build_tower

    family, config = NAMED_MODELS[job.model]
    small = {"depth": 2, "num_heads": 4, "fullatt_block_indexes": [1]}
    small |= {"hidden_size": 64, "embed_dim": 64, "out_hidden_size": 64}
    small |= {"intermediate_size": 96, "deepstack_visual_indexes": [0]}
    spec = TowerSpec(
        {name: small.get(name, value) for name, value in config.items()},
        job.model,
        2,
        family=family,
    )
    return build_tower(
        spec,
        backend="FLASHINFER",
        dtype=torch.float32,
        device="cpu",
        attn_dtype=CONFIGS[job.config].get("mm_encoder_attn_dtype"),
    )

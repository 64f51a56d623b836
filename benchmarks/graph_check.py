# SPDX-License-Identifier: Apache-2.0
"""Checks and times encoder CUDA graphs in the real engine, without any weights.

For each model an engine starts with stock FLASH_ATTN and automatic budgets, compiled
where this vLLM can, and others with this package: with limits as vLLM's documentation
shows them, with automatic budgets, with these in FP8, and with these in an instance
that runs the encoder alone. They run on vLLM's default model runner, if that has
encoder graphs. In each, what a
graph returns is compared with eager mode on the same input, for fixed cases and for
random mixtures; random requests must build nothing; and the tower is timed while the
other engines on its GPU wait.

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
import csv
import fcntl
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple
from unittest import mock

import torch
from packaging.version import Version

from correctness import relative_error
from csv_log import CsvLog, percentiles, results_path
from engines import BACKENDS, MODELS, Job, fill_tower, random_pixels, start
from environment import ENVIRONMENT_COLUMNS, Environment
from failures import Failures
from vllm_flashinfer_vit.machine.versions import ENV_V2_RUNNER, runner_note

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
# Against eager mode with the graphs' kernels. Another order of sums is 0.01 to 0.03 in
# bf16, so the difference to plain eager mode, like stock's, is shown and not judged.
GATE = 1e-2
# The mixtures that a total time is reported for, so that engines which did not get
# through all of them are compared over the same ones.
PREFIXES = (100, 200, 300)
ROUNDS = 20
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


class Captured(NamedTuple):
    """What a graph was captured for.

    Attributes:
        patches: Patches that it computes, padding included.
        bounds: Bounds of the sequence lengths, in patches, by vLLM's names for them.
        sequences: How many sequences it takes, empty ones included.
    """

    patches: int
    bounds: dict[str, int]
    sequences: int


class Batch(NamedTuple):
    """A part of a request, as a manager cut it.

    Attributes:
        items: Its items, by their place in the request.
        inputs: Their pixels and grids.
        graph: What served them, or None if that was eager mode.
    """

    items: list[int]
    inputs: dict[str, Any]
    graph: Captured | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens of each item."""
        name = next(key for key in self.inputs if key.endswith("_grid_thw"))
        return [patches([grid]) // MERGE**2 for grid in self.inputs[name]]


def captured(manager: Any) -> dict[tuple[str, int], Captured]:
    """Return each graph by the name of its set and its budget.

    Nothing may have been replayed: a replay writes its own lengths over the bounds in
    the buffers, although the graph keeps the kernels that were chosen by them.
    """
    found = {}
    for path, graphs in manager.budget_graphs.items():
        for budget, graph in graphs.items():
            buffers = graph.input_buffers
            bounds = {
                key: int(buffer)
                for key, buffer in buffers.items()
                if key.startswith("max_seqlen") and buffer is not None
            }
            # Stock's graphs compute more than their budget.
            found[path, budget] = Captured(
                buffers["pixel_values"].shape[0],
                bounds,
                buffers["cu_seqlens"].numel() - 1,
            )
    return found


class Encoder:
    """A manager and its model, as one call."""

    def __init__(self, manager: Any, model: Any, device: torch.device) -> None:
        self.manager = manager
        self._model = model
        self.device = device
        self._is_qwen2_5 = type(model).__name__.startswith("Qwen2_5")
        self._captured = captured(manager)

    def inputs(self, request: Request, seed: int) -> dict[str, Any]:
        """Return random pixels and the grids, as the engine batches them."""
        modality, grids = request
        generator = torch.Generator(self.device).manual_seed(seed)
        pixels = random_pixels(self._model.visual, patches(grids), generator)
        name = "pixel_values" if modality == "image" else "pixel_values_videos"
        inputs = {name: pixels, f"{modality}_grid_thw": torch.tensor(grids)}
        if modality == "video" and self._is_qwen2_5:
            inputs["second_per_grid_ts"] = torch.ones(len(grids))
        return inputs

    def graph(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the embeddings by way of the manager."""
        return torch.cat(list(self.manager.execute(dict(inputs))))

    @contextmanager
    def batches(self) -> Iterator[list[Batch]]:
        """Collect the batches that the manager runs within the context."""
        from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

        found: list[Batch] = []
        select = self._model.select_encoder_cudagraph_items
        # Below this package's manager, which chooses the set of graphs.
        run = EncoderCudaGraphManager._run_budget_graph

        def note_batch(inputs: dict[str, Any], items: list[int]) -> dict[str, Any]:
            batch = select(inputs, items)
            found.append(Batch(list(items), batch))
            return batch

        def note_graph(
            manager: Any, batch: dict[str, Any], budget: int, *args: Any, **kw: Any
        ) -> torch.Tensor | None:
            output = run(manager, batch, budget, *args, **kw)
            if output is not None:
                graph = self._captured[kw.get("path", "default"), budget]
                found[-1] = found[-1]._replace(graph=graph)
            return output

        with (
            mock.patch.object(
                self._model, "select_encoder_cudagraph_items", note_batch
            ),
            mock.patch.object(EncoderCudaGraphManager, "_run_budget_graph", note_graph),
        ):
            yield found

    def eager(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the embeddings without graphs."""
        kwargs = {k: v for k, v in inputs.items() if k != "second_per_grid_ts"}
        return self._model.encoder_eager_forward(kwargs)

    def eager_as(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Return a request's embeddings in eager mode, batch by batch as served.

        For a batch that a graph served, eager mode takes the graph's kernels. Attention
        layers choose one by the bound of the sequence lengths, which also sets the
        blocks of `triton_window`, whether FA3 splits the keys, and cuDNN's bucket.
        cuBLAS, and who runs a GEMM, go by the number of rows, which is a bound of the
        lengths too. So eager mode gets the bounds and the mean length that the graph
        was captured with, and frames of one token where the graph has padding. What
        stays different is the number of sequences, which is a part of cuDNN's bucket.
        """
        items: dict[int, torch.Tensor] = {}
        for batch in batches:
            if batch.graph is None:
                output = self.eager(batch.inputs)
            else:
                inputs = _filled(batch.inputs, batch.graph.patches)
                with self._bounded(batch.graph):
                    output = self.eager(inputs)
            output = output[: sum(batch.tokens)]
            items |= zip(batch.items, output.split(batch.tokens), strict=True)
        return torch.cat([items[i] for i in range(len(items))])

    @contextmanager
    def _bounded(self, graph: Captured) -> Iterator[None]:
        """Tell the layers a graph's bounds and mean of the lengths, not the batch's."""
        from vllm_flashinfer_vit.ops.batch import Ready

        visual = self._model.visual
        prepare = visual.prepare_encoder_metadata
        # On the CPU, as vLLM's models hand them over.
        bounds = graph.bounds.items()
        tensors = {k: torch.tensor(v, dtype=torch.int32) for k, v in bounds}

        def bounded(*args: Any, **kw: Any) -> dict[str, Any]:
            return prepare(*args, **kw) | tensors

        with (
            mock.patch.object(visual, "prepare_encoder_metadata", bounded),
            mock.patch.object(Ready, "mean_len", graph.patches / graph.sequences),
        ):
            yield


def _filled(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """Return inputs of `count` patches: frames of one token after the batch's own."""
    pixels = next(key for key in inputs if key.startswith("pixel_values"))
    grids = next(key for key in inputs if key.endswith("_grid_thw"))
    rest = count - inputs[pixels].shape[0]
    if not rest:
        return inputs
    return {
        pixels: torch.nn.functional.pad(inputs[pixels], (0, 0, 0, rest)),
        grids: [*inputs[grids], [rest // MERGE**2, MERGE, MERGE]],
    }


class Found(NamedTuple):
    """What one request's graphs returned, and how many tokens they computed.

    Attributes:
        rel_err: Relative error against eager mode.
        bitwise: Whether all bits are eager mode's.
        same_kernel_rel_err: Relative error against eager mode with the graphs' kernels.
            0 where `bitwise` is true: then it is not computed.
        same_kernel_bitwise: As `bitwise`, of the same.
        padded: Tokens that the graphs computed.
        real: Tokens of the batches in them.
        hits: Items that graphs served.
        misses: Items that ran without a graph.
    """

    rel_err: float
    bitwise: bool
    same_kernel_rel_err: float
    same_kernel_bitwise: bool
    padded: int
    real: int
    hits: int
    misses: int


def compare(encoder: Encoder, inputs: dict[str, Any]) -> Found:
    """Compare what graphs return for one request with eager mode."""
    manager = encoder.manager
    hits, misses = manager.graph_hits, manager.graph_misses
    with encoder.batches() as batches:
        ours = encoder.graph(inputs)
    counts = manager.graph_hits - hits, manager.graph_misses - misses
    plain = same_kernel = difference(ours, encoder.eager(inputs))
    if not plain[1]:
        same_kernel = difference(ours, encoder.eager_as(batches))
    padded = sum(b.graph.patches for b in batches if b.graph) // MERGE**2
    real = sum(sum(b.tokens) for b in batches if b.graph)
    return Found(*plain, *same_kernel, padded, real, *counts)


def difference(ours: torch.Tensor, eager: torch.Tensor) -> tuple[float, bool]:
    """Return the relative error, and whether all bits are equal."""
    error = relative_error(ours.float(), eager.float())
    return error, bool(torch.equal(ours, eager))


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
    """Time each request once, after an untimed run, until the time is over."""
    samples: list[float] = []
    until = time.monotonic() + limit_s
    for seed, request in enumerate(requests):
        if samples and time.monotonic() > until:
            break
        inputs = encoder.inputs(request, seed)
        encoder.graph(inputs)
        samples += times_ms(lambda i=inputs: encoder.graph(i), 1, encoder.device)
    return samples


def prefixes(count: int) -> list[int]:
    """Return the numbers of mixtures to report total times for, `count` being all."""
    return [*(prefix for prefix in PREFIXES if prefix < count), count]


def measure(
    encoder: Encoder, options: Mapping[str, Any], lock: Path
) -> list[dict[str, Any]]:
    """Check, count and time one engine; return its rows but for the environment."""
    rows = []
    max_tokens = options["max_tokens"]
    mixed = mixtures(options["mixtures"], seed=0, max_tokens=max_tokens)
    fresh = mixtures(options["requests"], seed=1, max_tokens=max_tokens)
    cases = {k: v for k, v in CASES.items() if patches(v[1]) <= 4 * max_tokens}
    # One half to compare the mixtures, the other to time them.
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
            compared = {
                name: check(encoder, [case], until=0) for name, case in cases.items()
            }
            found = check(encoder, mixed, time.monotonic() + half_s)
        with turn(lock, exclusive=True):
            for name, case in cases.items():
                inputs = encoder.inputs(case, 0)
                samples = times_ms(
                    lambda i=inputs: encoder.graph(i), ROUNDS, encoder.device
                )
                row(name, [case], **summary(compared[name]), **_percentiles(samples))
            samples = times_of(encoder, mixed, half_s)
    for count in prefixes(len(mixed)):
        if count <= len(samples):
            row(
                f"first {count} random mixtures",
                mixed[:count],
                total_ms=f"{sum(samples[:count]):.2f}",
                **_percentiles(samples[:count]),
            )
    # The last row of an engine, see `finished`.
    row("random mixtures", mixed[: len(found)], **summary(found))
    return rows


def _percentiles(samples: Sequence[float]) -> dict[str, str]:
    names = ("p20_ms", "p50_ms", "p80_ms")
    return dict(zip(names, (f"{x:.4f}" for x in percentiles(samples)), strict=True))


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved() if device.type == "cuda" else 0


def run_engine(job: Job, options: Mapping[str, Any], folder: Path) -> None:
    """Start one engine, measure it, and leave a JSON file."""
    if runner_note(version("vllm"), os.environ):
        os.environ[ENV_V2_RUNNER] = "0"
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
            mm_encoder_attn_backend=BACKENDS[job.provider],
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
        return measure(encoder, options, lock)

    rows = llm.collective_rpc(measure_worker)[0]
    for row in rows:
        row["start_s"] = f"{start_s:.1f}"
    (folder / f"{job.stem}.json").write_text(json.dumps(rows))


def manager_of(runner: Any) -> Any:
    """Return the manager of encoder graphs of vLLM's V1 or V2 model runner.

    Raises:
        RuntimeError: The runner has none.
    """
    state = getattr(runner, "model_state", None)
    if state is None:
        manager = runner.encoder_cudagraph_manager
    else:
        manager = state.encoder_runner.cudagraph_manager
    if manager is None:
        raise RuntimeError(f"{type(runner).__name__} has no encoder CUDA graphs here")
    return manager


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
        family,
        {name: small.get(name, value) for name, value in config.items()},
        job.model,
        None,
        2,
    )
    return build_tower(
        spec,
        backend="FLASHINFER",
        dtype=torch.float32,
        device="cpu",
        attn_dtype=CONFIGS[job.config].get("mm_encoder_attn_dtype"),
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
    error = row["same_kernel_rel_err"]
    if error != "" and not float(error) <= GATE:
        faults.append(f"graph and eager mode with the same kernels differ by {error}")
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
    gpus = gpus_to_use(args.gpus, args.smoke)
    skip = finished(path, environment.commit)
    jobs = [job for job in jobs_for(args.models, args.configs) if job not in skip]
    if args.smoke:
        jobs = [job for job in jobs if job.provider == "plugin"]
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
    failures.summary()
    print(f"rows in {log.path}")
    if failures.lines:
        raise SystemExit(1)


def gpus_to_use(count: int, smoke: bool) -> list[str]:
    """Return GPUs by their names in CUDA_VISIBLE_DEVICES.

    Raises:
        SystemExit: There are fewer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible and not smoke:
        names = visible.split(",")
    else:
        names = [str(i) for i in range(count if smoke else torch.cuda.device_count())]
    if count > len(names):
        raise SystemExit(f"--gpus {count}, but there are {len(names)} here")
    return names[:count]


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

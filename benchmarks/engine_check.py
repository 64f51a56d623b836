# SPDX-License-Identifier: Apache-2.0
"""Runs the real engine on FLASHINFER and checks what comes out, without any weights.

For each model and configuration a process starts `vllm.LLM` with stock FLASH_ATTN and
another with this package. Both answer an image, a video and a multi-image prompt, and
encode the same images with the same tower weights; the embeddings are compared. Models
other than Qwen's are compared by their image prompt, and most are asked no video:
`answered_video` is empty then. With `graphs`, what encoder CUDA graphs return is also
compared with this package's eager mode; for Qwen's models graph_check.py does more.
This is a check, not a benchmark: processes may run side by side.

    python benchmarks/engine_check.py --configs eager compile_mm_encoder --jobs 3
    python benchmarks/engine_check.py --models google/gemma-3-4b-it --jobs 2
    python benchmarks/engine_check.py --models google/gemma-4-31B-it --configs graphs
    python benchmarks/engine_check.py --configs tp2 tp2_data          # two GPUs
"""

import argparse
import importlib.metadata
import json
import os
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from correctness import relative_error
from csv_log import CsvLog, results_path
from engine_models import (
    MODELS,
    OTHER_MODELS,
    describe_tower,
    draw_inputs,
    embed,
    embed_without_attention,
    graphs_and_eager,
    prompts,
    record_graph_inputs,
    record_inputs,
    write_checkpoint,
)
from engines import (
    ENTRY_POINT,
    Job,
    compiles_blocks,
    fill_tower,
    runner_with_graphs,
    start,
)
from environment import ENVIRONMENT_COLUMNS, Environment
from failures import Failures
from tower_cases import MODELS as QWEN_MODELS

# Engine arguments by configuration.
CONFIGS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compile_mm_encoder": {
        "compilation_config": {"compile_mm_encoder": True, "cudagraph_mode": "NONE"}
    },
    "graphs": {
        "compilation_config": {
            "cudagraph_mm_encoder": True,
            "cudagraph_capture_sizes": [1],
        }
    },
    "tp2": {"enforce_eager": True, "tensor_parallel_size": 2},
    "tp2_data": {
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "mm_encoder_tp_mode": "data",
    },
    "fp8": {"enforce_eager": True, "mm_encoder_attn_dtype": "fp8"},
    "fp8_tp2": {
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "mm_encoder_attn_dtype": "fp8",
    },
    "fp8_linear": {"enforce_eager": True, "quantization": "fp8"},
    "fp8_linear_tp2": {
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "quantization": "fp8",
    },
}
# The configuration whose stock tower has the same weights, runs without a compiler, and
# exists: stock has no FP8 attention on Hopper.
COMPARED_WITH = {
    "compile_mm_encoder": "eager",
    "graphs": "eager",
    "fp8": "eager",
    "fp8_tp2": "tp2",
}
# Two attention kernels in bf16 differ by 1 to 3 percent after a whole tower.
GATE = 5e-2
# The image of 4096 patches attends in FP8, at about 5 percent a layer.
FP8_GATE = 1e-1
# Rows of linear layers in FP8 get other scales than in stock, in every layer: that
# moves Qwen2.5-VL by 0.14. How far each is from fp32 is for the tests to hold.
FP8_LINEAR_GATE = 2e-1
# Embeddings that hardly move when attention is off could not show a wrong kernel.
LEAST_ATTENTION_SHARE = 0.2
COLUMNS = (
    "config",
    "provider",
    "model",
    "answered_image",
    "answered_video",
    "answered_multi",
    "rel_err",
    "graph_hits",
    "graph_rel_err",
    "graph_bitwise",
    "attention_share",
    "layer_class",
    "kernels",
    "compiled_modules",
    "start_s",
    "peak_memory_mib",
    *ENVIRONMENT_COLUMNS,
)
ANSWER_TOKENS = 8
PROCESS_TIMEOUT_S = 420.0


def take_peak_memory_mib(_: torch.nn.Module) -> int:
    """Return the most memory held on the GPU, pools included, since the last call."""
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak >> 20


def run_engine(job: Job, folder: Path) -> None:
    """Start one engine, ask it everything, and leave a JSON and a safetensors file."""
    has_graphs = job.config == "graphs"
    if has_graphs:
        os.environ.update(runner_with_graphs())
    from vllm import LLM, SamplingParams

    checkpoint = folder / f"{job.stem}.checkpoint"
    write_checkpoint(checkpoint, job.model)
    asked = prompts(job.model)
    begin = time.perf_counter()
    llm = LLM(
        model=str(checkpoint),
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=8192,
        max_num_seqs=4,
        limit_mm_per_prompt={"image": 3, "video": int("video" in asked)},
        mm_encoder_attn_backend=job.contender.backend,
        # A fixed cache, since several engines may share a GPU.
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=2**30,
        seed=0,
        **CONFIGS[job.config],
    )
    facts: dict[str, Any] = {"start_s": round(time.perf_counter() - begin, 1)}
    peaks = llm.apply_model(take_peak_memory_mib)
    llm.apply_model(fill_tower)
    # Filling takes copies of weights that no engine takes.
    llm.apply_model(take_peak_memory_mib)
    facts |= llm.apply_model(describe_tower)[0]
    if job.model not in OTHER_MODELS:
        llm.apply_model(draw_inputs)
    elif has_graphs:
        llm.collective_rpc(record_graph_inputs)
    else:
        llm.apply_model(record_inputs)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True
    )
    facts["answered_video"] = ""
    for kind, prompt in asked.items():
        facts[f"answered_{kind}"] = 0
        try:
            answer = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
        except Exception:
            # Shown in the log; the other prompts are still worth asking.
            traceback.print_exc()
        else:
            facts[f"answered_{kind}"] = int(len(answer.token_ids) == ANSWER_TOKENS)
    if has_graphs:
        facts |= llm.collective_rpc(graphs_and_eager)[0]
    embeddings = llm.apply_model(embed)[0]
    save_file({"output": embeddings}, str(folder / f"{job.stem}.safetensors"))
    facts["attention_share"] = ""
    if not facts["compiled_modules"]:
        blind = llm.apply_model(embed_without_attention)[0]
        facts["attention_share"] = f"{relative_error(blind, embeddings):.2e}"
    facts["peak_memory_mib"] = max(*peaks, *llm.apply_model(take_peak_memory_mib))
    (folder / f"{job.stem}.json").write_text(json.dumps(facts))


def jobs_for(models: Sequence[str], configs: Sequence[str]) -> list[Job]:
    """Return the engines to start: the plugin's, and stock's to compare with."""
    jobs = []
    for model in models:
        for config in configs:
            compared = COMPARED_WITH.get(config, config)
            jobs.append(Job(model, compared, "stock-flash_attn"))
            jobs.append(Job(model, config, "plugin"))
    return list(dict.fromkeys(jobs))


def _gate(config: str) -> float:
    if config.startswith("fp8_linear"):
        return FP8_LINEAR_GATE
    return FP8_GATE if config.startswith("fp8") else GATE


def judge(row: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a row of the plugin; nothing, if all is well."""
    faults = [
        f"no answer to the {kind} prompt"
        for kind in ("image", "video", "multi")
        if row[f"answered_{kind}"] != 1
        and (kind != "video" or row["answered_video"] != "")
    ]
    if row["layer_class"] != "FlashInferViTAttention":
        faults.append(f"the attention layers are {row['layer_class']}")
    gate = _gate(row["config"])
    if not float(row["rel_err"] or "nan") <= gate:
        faults.append(
            f"embeddings differ from stock's by {row['rel_err'] or 'unknown'}"
        )
    if row["config"] == "graphs":
        if not row["graph_hits"]:
            faults.append("no graph served the image prompt")
        if not float(row["graph_rel_err"] or "nan") <= gate:
            faults.append(f"graphs differ from eager mode by {row['graph_rel_err']}")
    share = row["attention_share"]
    if share != "" and not float(share) >= LEAST_ATTENTION_SHARE:
        faults.append(f"attention makes up only {share} of the embeddings")
    must_compile = row["config"] == "compile_mm_encoder" and compiles_blocks(
        row["model"], row["vllm"]
    )
    if must_compile and not row["compiled_modules"]:
        faults.append("no block of the tower is compiled")
    return faults


def collect(job: Job, folder: Path, environment: Environment) -> dict[str, Any]:
    """Return a finished engine's row."""
    row = {
        "config": job.config,
        "provider": job.provider,
        "model": job.model,
        **dict.fromkeys(
            ("rel_err", "graph_hits", "graph_rel_err", "graph_bitwise"), ""
        ),
        **json.loads((folder / f"{job.stem}.json").read_text()),
        **asdict(environment),
    }
    if job.provider == "plugin":
        compared = COMPARED_WITH.get(job.config, job.config)
        stock = (
            folder / f"{Job(job.model, compared, 'stock-flash_attn').stem}.safetensors"
        )
        if stock.exists():
            ours = load_file(folder / f"{job.stem}.safetensors")["output"]
            row["rel_err"] = f"{relative_error(ours, load_file(stock)['output']):.2e}"
    return row


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=QWEN_MODELS)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=("eager",))
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time")
    parser.add_argument("--logs", help="folder to keep logs and embeddings in")
    parser.add_argument("--output", help="CSV file to append to")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Check the engines."""
    args = parse_args()
    if args.one is not None:
        run_engine(Job(**json.loads(args.one[0])), Path(args.one[1]))
        return
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: the engine needs one")
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if ENTRY_POINT not in points.names:
        raise SystemExit(
            f"no entry point {ENTRY_POINT}: install this package, so that vLLM finds it"
        )
    environment = Environment.probe()
    log = CsvLog(results_path("engine", environment.gpu, args.output), COLUMNS)
    failures = Failures()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.logs or scratch).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        check_all(args, folder, log, failures, environment)
    failures.end(log.path)


def check_all(
    args: argparse.Namespace,
    folder: Path,
    log: CsvLog,
    failures: Failures,
    environment: Environment,
) -> None:
    """Run every engine; write and judge its row when it has ended."""
    jobs = []
    for job in jobs_for(args.models, args.configs):
        ranks = CONFIGS[job.config].get("tensor_parallel_size", 1)
        if ranks > torch.cuda.device_count():
            failures.add(job.stem, f"needs {ranks} GPUs")
        else:
            jobs.append(job)
            # What another run left in the same folder is not to be compared with.
            (folder / f"{job.stem}.safetensors").unlink(missing_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {
            job: pool.submit(start, __file__, job, [], folder, PROCESS_TIMEOUT_S)
            for job in jobs
        }
        # Stock's engine comes before the one that is compared with it. Rows are written
        # as engines end, so that a run that is cut short keeps them.
        for job, future in running.items():
            with failures.noted(job.stem):
                future.result()
                row = collect(job, folder, environment)
                log.add(row)
                faults = judge(row) if job.provider == "plugin" else []
                print(
                    f"{job.stem}: {'; '.join(faults) or 'as it should be'}", flush=True
                )
                for fault in faults:
                    failures.add(job.stem, fault)


if __name__ == "__main__":
    main()

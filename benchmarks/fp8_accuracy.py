# SPDX-License-Identifier: Apache-2.0
"""How far FP8 attention is from fp32, by where its scales come from.

`attention` compares the op's output, on drawn q, k and v as an attention layer gets
them; `tower` compares the embeddings of whole vision towers with random weights, on
drawn images; `layers` those of towers with FP8 linear layers, on a GPU. Upstream's
method, vLLM's own, takes part on the same inputs: the largest values of 16 passes, not
the largest absolute ones.

    python benchmarks/fp8_accuracy.py
    python benchmarks/fp8_accuracy.py --markdown docs/fp8_accuracy.md
    python benchmarks/fp8_accuracy.py --smoke --output out/fp8_accuracy.csv   # no GPU
"""

import argparse
import json
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from correctness import attention_fp32, relative_error
from csv_log import CsvLog, results_path
from environment import ROOT, Environment, device
from failures import Failures
from fp8_inputs import FULL, INPUTS, QKV, SMOKE, Images, Size, draw
from fp8_layers import layer_rows
from fp8_page import COLUMNS, markdown, read_rows
from model_names import named_model
from op_providers import layer_plan
from tower_cases import MODELS
from vllm_flashinfer_vit.kernels.formats import E4M3_MAX

# What vLLM looks back on, for upstream's method and the dynamic one alike.
PASSES = 16
# vLLM's default head room for scales that are saved.
MARGIN = 1.5
HEAD_DIMS = (72, 80)
SEEDS = range(8)
LEVELS = ("attention", "tower", "layers")


def upstream_scales(passes: Iterable[QKV]) -> torch.Tensor:
    """Return `[3]` fp32 scales as vLLM makes them: from the largest signed values."""
    amax = torch.stack([torch.stack([x.float().amax() for x in one]) for one in passes])
    tiny = torch.finfo(torch.float32).tiny
    return amax.amax(0).clamp(min=tiny) / E4M3_MAX


def static_scales(passes: Iterable[QKV]) -> torch.Tensor:
    """Return `[3]` fp32 scales from the largest absolute values, with head room."""
    amax = [torch.stack([x.float().abs().amax() for x in one]) for one in passes]
    return torch.stack(amax).amax(0) * (MARGIN / E4M3_MAX)


def cosine(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Return the mean cosine between rows of the last dimension."""
    rows = torch.nn.functional.cosine_similarity(out.float(), ref.float(), dim=-1)
    return rows.mean().item()


def fp8_kernels(head_dim: int) -> list[str]:
    """Return the FP8 kernels that run here."""
    from vllm_flashinfer_vit.choices.trial import attempt
    from vllm_flashinfer_vit.kernels.catalog import KERNELS

    if device().type == "cpu":
        return ["reference_fp8"]
    kernels = sorted(
        name for name, k in KERNELS.items() if k.is_fp8 and not k.is_reference
    )
    found = []
    for kernel in kernels:
        if reason := attempt(kernel, head_dim, torch.bfloat16):
            print(f"  without {kernel}: {reason}", flush=True)
        else:
            found.append(kernel)
    return found


class Layer:
    """An attention layer without a model: one sequence, called pass by pass."""

    def __init__(self, size: Size, head_dim: int) -> None:
        """Prepare the metadata."""
        self._cu_seqlens = torch.tensor([0, size.tokens], dtype=torch.int32).to(
            device()
        )
        self._max_seqlen = torch.tensor(size.tokens)
        self._scale = head_dim**-0.5

    def bf16(self, qkv: QKV) -> tuple[str, torch.Tensor]:
        """Return the package's own choice of a kernel and its output."""
        from vllm_flashinfer_vit.ops.attention import attention

        plan = layer_plan(qkv.q.shape[2], qkv.q.dtype, None, is_fp8=False)
        out = attention(self._batch(qkv), self._scale, plan)
        return plan.kernel_for(qkv.q.shape[0]), out

    def fp8(
        self, kernel: str, method: str, passes: Sequence[QKV], scales: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of the last pass.

        Args:
            kernel: An FP8 kernel.
            method: `block`, `dynamic` or `static`.
            passes: All are run, in order, if the method has a memory.
            scales: `[3]` fp32, for `static`.
        """
        from vllm_flashinfer_vit.kernels.formats import DeviceScales
        from vllm_flashinfer_vit.ops.attention import Fp8, attention
        from vllm_flashinfer_vit.ops.plan import Plan

        state = None
        if method != "block":
            state = DeviceScales.on(scales.device)
        if method == "static":
            state = state._replace(scales=scales)
        fp8 = Fp8(method, state=state)
        for qkv in passes if method == "dynamic" else passes[-1:]:
            batch = self._batch(qkv)
            out = attention(batch, self._scale, Plan.of(kernel), fp8)
        return out

    def _batch(self, qkv: QKV) -> Any:
        from vllm_flashinfer_vit.ops.batch import Batch

        return Batch(*qkv, cu_seqlens=self._cu_seqlens, max_seqlen=self._max_seqlen)


def attention_rows(
    name: str, seed: int, size: Size, head_dim: int, kernels: Sequence[str]
) -> Iterator[dict[str, object]]:
    """Compare the attention output on one input by every method and kernel."""
    calibration = (draw(name, seed, PASSES + i, size, head_dim) for i in range(PASSES))
    static = static_scales(calibration)
    passes = [draw(name, seed, i, size, head_dim) for i in range(PASSES)]
    last = passes[-1]
    ref = attention_fp32(*last, (size.tokens,), head_dim**-0.5)
    layer = Layer(size, head_dim)
    bf16_kernel, bf16 = layer.bf16(last)
    outputs = {("bf16", bf16_kernel): bf16}
    for kernel in kernels:
        methods = {
            "block": ("block", static),
            "dynamic": ("dynamic", static),
            "static": ("static", static),
            "upstream": ("static", upstream_scales(passes)),
        }
        if kernel == "cudnn_fp8":
            del methods["block"]
        for method, (how, scales) in methods.items():
            outputs[method, kernel] = layer.fp8(kernel, how, passes, scales)
    for (method, kernel), out in outputs.items():
        yield {
            "level": "attention",
            "input": name,
            "seed": seed,
            "method": method,
            "kernel": kernel,
            "model": "",
            "head_dim": head_dim,
            "tokens": size.tokens,
            **_distances(out, ref, bf16),
        }


def _distances(
    out: torch.Tensor, fp32: torch.Tensor, bf16: torch.Tensor
) -> dict[str, str]:
    return {
        "err_fp32": f"{relative_error(out, fp32):.3e}",
        "cos_fp32": f"{cosine(out, fp32):.6f}",
        "err_bf16": f"{relative_error(out, bf16.float()):.3e}",
        "cos_bf16": f"{cosine(out, bf16):.6f}",
    }


@contextmanager
def recorded(tower: Any) -> Iterator[dict[str, list[QKV]]]:
    """Record extremes of a tower's rotated q, k and v, by layer and pass.

    What is recorded are the largest and the smallest value, `[2]`, in place of tensors.
    """
    from vllm_flashinfer_vit.ops.attention import rotate

    seen: dict[str, list[QKV]] = defaultdict(list)

    def watch(layer: Any, attend: Callable[[Any], Any], batch: Any) -> torch.Tensor:
        q, k, v, cos, sin = batch[:5]
        turned = (q, k) if cos is None else rotate(q, k, cos, sin)
        extremes = (torch.stack(x.aminmax()) for x in (*turned, v))
        seen[layer.layer_name].append(QKV(*extremes))
        return attend(batch)

    with ExitStack() as stack:
        for layer in tower.attention_layers().values():
            stack.enter_context(layer.watched(watch))
        yield seen


def scale_file(
    seen: Mapping[str, Sequence[QKV]],
    scales_of: Callable[[Iterable[QKV]], torch.Tensor],
    path: Path,
) -> Path:
    """Write scales of every layer in vLLM's own form."""
    scales = {
        name: dict(zip("qkv", scales_of(passes).tolist(), strict=True))
        for name, passes in seen.items()
    }
    path.write_text(json.dumps(scales), encoding="utf-8")
    return path


def tower_rows(
    model: str, size: Size, failures: Failures
) -> Iterator[dict[str, object]]:
    """Compare a tower's embeddings of one image by every method."""
    from vllm_flashinfer_vit.settings import ENV_FP8_SCALES
    from vllm_flashinfer_vit.towers.spec import resolve_spec
    from vllm_flashinfer_vit.towers.tower import build_tower

    spec = resolve_spec(model, random_weights=True, depth=size.depth)
    images = Images(spec, size)
    on = device()
    measured = images(PASSES - 1)

    def build(**options: Any) -> Any:
        options = {"backend": "FLASHINFER", "dtype": torch.bfloat16, **options}
        return build_tower(spec, device=on, **options)

    fp32 = build(backend="TORCH_SDPA", dtype=torch.float32).encode(*measured)
    tower = build()
    with recorded(tower) as used:
        for index in range(PASSES):
            bf16 = tower.encode(*images(index))
    with recorded(tower) as calibration:
        for index in range(PASSES):
            tower.encode(*images(PASSES + index))
    layer = next(iter(tower.attention_layers().values()))

    def row(method: str, tower: Any, out: torch.Tensor) -> dict[str, object]:
        kernels = tower.kernels(measured[1])
        return {
            "level": "tower",
            "input": "images",
            "seed": PASSES - 1,
            "method": method,
            "kernel": " ".join(f"{name}:{kernel}" for name, kernel in kernels.items()),
            "model": model,
            "head_dim": layer.head_size,
            "tokens": math.prod(measured[1][0]),
            **_distances(out, fp32, bf16),
        }

    yield row("bf16", tower, bf16)
    with tempfile.TemporaryDirectory() as folder:
        static = scale_file(calibration, static_scales, Path(folder, "static.json"))
        upstream = scale_file(used, upstream_scales, Path(folder, "upstream.json"))
        for method, setting, path in (
            ("block", "block", None),
            ("dynamic", "dynamic", None),
            ("static", "auto", static),
            ("upstream", "auto", upstream),
        ):
            with (
                failures.noted(f"{model} {method}"),
                mock.patch.dict(os.environ, {ENV_FP8_SCALES: setting}),
            ):
                tower = build(attn_dtype="fp8", fp8_scale_path=path)
                for index in range(0 if method == "dynamic" else PASSES - 1, PASSES):
                    out = tower.encode(*images(index))
                yield row(method, tower, out)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--levels", nargs="+", choices=LEVELS)
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=list(INPUTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--models", nargs="+", type=named_model, default=MODELS)
    parser.add_argument("--smoke", action="store_true", help="small, any machine")
    parser.add_argument("--output", help="CSV file to append to, or to read")
    parser.add_argument(
        "--markdown", type=Path, help="write this page from the CSV file; nothing runs"
    )
    return parser.parse_args()


def measure(
    args: argparse.Namespace, log: CsvLog, environment: Environment, failures: Failures
) -> None:
    """Measure everything that the command line asks for."""
    size = SMOKE if args.smoke else FULL

    def add(rows: Iterable[Mapping[str, object]]) -> None:
        for row in rows:
            log.add({**row, **asdict(environment)})
            print(
                f"  {row['method']:<22} {row['kernel']:<14} error {row['err_fp32']}, "
                f"cosine {row['cos_fp32']}",
                flush=True,
            )

    levels = args.levels or (LEVELS if device().type == "cuda" else LEVELS[:2])
    if "attention" in levels:
        for head_dim in HEAD_DIMS:
            kernels = fp8_kernels(head_dim)
            for name in args.inputs:
                for seed in args.seeds:
                    what = f"attention {name} seed {seed} D={head_dim}"
                    print(what, flush=True)
                    with failures.noted(what):
                        add(attention_rows(name, seed, size, head_dim, kernels))
    if "tower" in levels:
        for model in args.models:
            print(model, flush=True)
            with failures.noted(model):
                add(tower_rows(model, size, failures))
    if "layers" in levels:
        for model in args.models:
            print(model, flush=True)
            with failures.noted(model):
                add(layer_rows(model, size, failures, _distances))


def main() -> None:
    """Measure, or write the page."""
    args = parse_args()
    on_gpu = device().type == "cuda"
    if args.markdown:
        source = Path(args.output or ROOT / "benchmarks/results/h200/fp8_accuracy.csv")
        args.markdown.write_text(markdown(read_rows(source)), encoding="utf-8")
        print(f"wrote {args.markdown}")
        return
    if not on_gpu and not args.smoke:
        raise SystemExit("no GPU here: only --smoke runs on the CPU")
    if not on_gpu:
        from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform

        use_cpu_platform()
    torch.set_float32_matmul_precision("highest")
    environment = Environment.probe()
    output = results_path("fp8_accuracy", environment.gpu, args.output)
    failures = Failures()
    with torch.inference_mode():
        measure(args, CsvLog(output, COLUMNS), environment, failures)
    failures.end(output)


if __name__ == "__main__":
    main()

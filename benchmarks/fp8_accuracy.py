# SPDX-License-Identifier: Apache-2.0
"""How far FP8 attention is from fp32, by where its scales come from.

`attention` compares the op's output, on drawn q, k and v as an attention layer gets
them; `tower` compares the embeddings of whole vision towers with random weights, on
drawn images. Upstream's method, vLLM's own, takes part on the same inputs: the largest
values of 16 passes, not the largest absolute ones.

    python benchmarks/fp8_accuracy.py
    python benchmarks/fp8_accuracy.py --markdown docs/fp8_accuracy.md
    python benchmarks/fp8_accuracy.py --smoke --output out/fp8_accuracy.csv   # no GPU
"""

import argparse
import csv
import json
import math
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from correctness import attention_fp32, relative_error
from csv_log import CsvLog, results_path
from environment import ENVIRONMENT_COLUMNS, ROOT, Environment, device
from failures import Failures
from op_providers import layer_plan
from vllm_flashinfer_vit.kernels.formats import E4M3_MAX

# What vLLM looks back on, for upstream's method and the dynamic one alike.
PASSES = 16
# vLLM's default head room for scales that are saved.
MARGIN = 1.5
METHODS = ("bf16", "block", "dynamic", "static", "upstream")
HEAD_DIMS = (72, 80)
SEEDS = range(8)
MODELS = (
    "Qwen/Qwen2-VL-7B-Instruct",
    "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen/Qwen3-VL-8B-Instruct",
)
COLUMNS = (
    "level",
    "input",
    "seed",
    "method",
    "kernel",
    "model",
    "head_dim",
    "tokens",
    "err_fp32",
    "cos_fp32",
    "err_bf16",
    "cos_bf16",
    *ENVIRONMENT_COLUMNS,
)
# The bar for block scales' error on outliers, as a part of that of upstream's method.
BAR = 0.8


class QKV(NamedTuple):
    """One pass of a layer: q, k and v, each `[T, H, D]` bf16 and rotated."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Size(NamedTuple):
    """How much is drawn."""

    tokens: int
    heads: int
    grid: int  # rows and columns of patches of an image
    depth: int | None  # blocks of a tower


FULL = Size(tokens=4096, heads=16, grid=68, depth=None)
SMOKE = Size(tokens=256, heads=4, grid=16, depth=2)


class Input(NamedTuple):
    """A kind of q, k and v.

    Attributes:
        text: What it is, for the page.
        change: Makes it, in place, of `[T, H, D]` from N(0, 1). The generator, on the
            CPU, draws what is the same in all passes.
    """

    text: str
    change: Callable[[torch.Tensor, torch.Generator], None]


def _outliers(x: torch.Tensor, fixed: torch.Generator) -> None:
    channels = x.view(x.shape[0], -1)
    picked = torch.randperm(channels.shape[1], generator=fixed)[:2].to(x.device)
    magnitude = (25 + 75 * torch.rand(2, generator=fixed)).to(x.device)
    sign = (torch.randint(0, 2, (2,), generator=fixed) * 2 - 1).to(x.device)
    channels[:, picked] = magnitude * (sign + 0.2 * channels[:, picked])


def _skewed(x: torch.Tensor, fixed: torch.Generator) -> None:
    x[..., ::4] -= 8


def _massive(x: torch.Tensor, fixed: torch.Generator) -> None:
    picked = torch.randperm(x.shape[0], generator=fixed)[:4].to(x.device)
    x[picked] *= 1000


INPUTS: Mapping[str, Input] = {
    "normal": Input("N(0, 1)", lambda x, fixed: None),
    "outliers": Input(
        "N(0, 1), but two channels each of q, k and v, out of those of all heads, hold "
        "m (s + 0.2 n) with n from N(0, 1); the magnitude m, 25 to 100, and the sign s "
        "are drawn once for a channel, as a bias fixes them in a model",
        _outliers,
    ),
    "skewed": Input(
        "N(0, 1), but every fourth channel is N(-8, 1), all negative", _skewed
    ),
    "massive": Input(
        "N(0, 1), but four tokens are a thousand times as large", _massive
    ),
}


def draw(name: str, seed: int, index: int, size: Size, head_dim: int) -> QKV:
    """Draw a pass.

    Args:
        name: A key of `INPUTS`.
        seed: Which layer; it fixes what is the same in all passes.
        index: Which pass.
        size: How much.
        head_dim: D.
    """
    fixed = torch.Generator().manual_seed(seed)
    random = torch.Generator(device()).manual_seed(1000 * seed + index)
    shape = (size.tokens, size.heads, head_dim)
    parts = []
    for _ in range(3):
        x = torch.randn(shape, generator=random, device=device())
        INPUTS[name].change(x, fixed)
        parts.append(x.bfloat16())
    return QKV(*parts)


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
        from vllm_flashinfer_vit.kernels.formats import DynamicScales
        from vllm_flashinfer_vit.ops.attention import Fp8, fp8_attention
        from vllm_flashinfer_vit.ops.plan import Plan

        state = None
        if method != "block":
            state = DynamicScales.on(scales.device)
        if method == "static":
            state = state._replace(scales=scales)
        fp8 = Fp8(method, state=state)
        for qkv in passes if method == "dynamic" else passes[-1:]:
            batch = self._batch(qkv)
            out = fp8_attention(batch, self._scale, Plan.of(kernel), fp8)
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
    _, ref = attention_fp32(*last, (size.tokens,), head_dim**-0.5)
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


def draw_image(seed: int, side: int) -> Any:
    """Draw an RGB image: soft colours, fine texture, hard-edged boxes."""
    from PIL import Image

    random = torch.Generator().manual_seed(seed)
    soft = torch.rand(1, 3, 6, 6, generator=random)
    pixels = torch.nn.functional.interpolate(
        soft, (side, side), mode="bicubic", align_corners=False
    )[0]
    pixels += 0.1 * torch.randn(3, side, side, generator=random)
    for _ in range(12):
        top, left, height, width = torch.randint(
            0, side // 2, (4,), generator=random
        ).tolist()
        colour = torch.rand(3, 1, 1, generator=random)
        pixels[:, top : top + height, left : left + width] = colour
    rgb = (pixels.clamp(0, 1) * 255).byte().permute(1, 2, 0)
    return Image.fromarray(rgb.numpy())


class Images:
    """Drawn images as a model's image processor cuts them into patches."""

    def __init__(self, spec: Any, size: Size) -> None:
        """Load the processor."""
        from vllm_flashinfer_vit.commands.images import image_processor

        self._processor = image_processor(spec, None)
        self._side = spec.patch_size * size.grid

    def __call__(self, seed: int) -> tuple[torch.Tensor, list[list[int]]]:
        """Return patches and grids of an image."""
        image = draw_image(seed, self._side)
        found = self._processor(images=[image], return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"].tolist()


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


@contextmanager
def _scales_setting(value: str | None) -> Iterator[None]:
    from vllm_flashinfer_vit.settings import ENV_FP8_SCALES

    before = os.environ.pop(ENV_FP8_SCALES, None)
    if value is not None:
        os.environ[ENV_FP8_SCALES] = value
    try:
        yield
    finally:
        os.environ.pop(ENV_FP8_SCALES, None)
        if before is not None:
            os.environ[ENV_FP8_SCALES] = before


def tower_rows(
    model: str, size: Size, failures: Failures
) -> Iterator[dict[str, object]]:
    """Compare a tower's embeddings of one image by every method."""
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
            ("static", None, static),
            ("upstream", None, upstream),
        ):
            with failures.noted(f"{model} {method}"), _scales_setting(setting):
                tower = build(attn_dtype="fp8", fp8_scale_path=path)
                for index in range(0 if method == "dynamic" else PASSES - 1, PASSES):
                    out = tower.encode(*images(index))
                yield row(method, tower, out)


Row = Mapping[str, str]


def read_rows(path: Path) -> list[Row]:
    """Read a results file; of repeated measurements the last one counts.

    Raises:
        ValueError: The file has other columns.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{path} is not a file of FP8 accuracy: its columns differ")
    keys = COLUMNS[: COLUMNS.index("tokens") + 1]
    return list({tuple(row[key] for key in keys): row for row in rows}.values())


def markdown(rows: Sequence[Row]) -> str:
    """Write the page `docs/fp8_accuracy.md` from a results file."""
    attention = [row for row in rows if row["level"] == "attention"]
    tower = [row for row in rows if row["level"] == "tower"]
    parts = ["# Accuracy of FP8 attention\n", _preamble(rows)]
    for kernel in _unique(r["kernel"] for r in attention if r["method"] != "bf16"):
        mine = [r for r in attention if r["kernel"] == kernel or r["method"] == "bf16"]
        parts += [f"## Attention output, `{kernel}`\n", _attention_table(mine)]
        if bar := _bar(mine):
            parts.append(bar)
    if tower:
        text = _TOWER_TEXT.format(tokens=tower[0]["tokens"])
        parts += ["## Embeddings of whole towers\n", text, _tower_table(tower)]
    return "\n".join(parts)


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _preamble(rows: Sequence[Row]) -> str:
    machines = _unique(
        f"{row['gpu']}, vLLM {row['vllm']}, torch {row['torch']}, Triton "
        f"{row['triton']}, cuDNN {row['cudnn']}, commit {row['commit']}"
        for row in rows
    )
    inputs = "\n".join(f"- `{name}`: {kind.text}." for name, kind in INPUTS.items())
    return _PREAMBLE.format(machines="; ".join(machines), inputs=inputs)


_PREAMBLE = """\
Written by `python benchmarks/fp8_accuracy.py --markdown docs/fp8_accuracy.md` from rows
that the same script measured: {machines}.

An error is `|out - fp32| / |fp32|` over the whole output: the mean over seeds and the
worst, and in brackets the mean over rows of one minus the cosine. fp32 starts from the
same bf16 inputs. Where scales come from:

- `bf16`: no FP8; the kernel that this package picks.
- `block`: one for each block of 128 tokens and head, from that block alone.
- `dynamic`: one for each tensor, from the largest absolute value of 16 passes, the
  measured one being the last.
- `static`: one for each tensor, 1.5 times what the largest absolute value of 16 other
  passes needs.
- `upstream`: as `dynamic`, but from the largest signed value, as in vLLM. The attention
  after it is the same, so that only the scales differ.

Inputs of the attention, one sequence, rounded to bf16; q and k count as rotated:

{inputs}

e4m3 keeps three bits of mantissa over fifteen binades, of which q and k use eleven, up
to 28. A scale that is a few times too large costs next to nothing; one that is too
small cuts the largest values off, and upstream's is, wherever the largest value is
negative.
"""

_TOWER_TEXT = """\
Random weights in true dimensions and one drawn image of {tokens} patches, after 15
others. Static and upstream's scales were recorded in bf16. Windows and short sequences
stay in bf16, as in an engine.
"""


def _attention_table(rows: Sequence[Row]) -> str:
    found: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        found[row["input"], row["head_dim"]][row["method"]].append(row)
    methods = [
        m for m in METHODS if any(m in by_method for by_method in found.values())
    ]
    lines = [
        f"| input | head dim | {' | '.join(methods)} |",
        "|" + "---|" * (len(methods) + 2),
    ]
    for (name, head_dim), by_method in found.items():
        cells = " | ".join(_cell(by_method[method]) for method in methods)
        lines.append(f"| `{name}` | {head_dim} | {cells} |")
    return "\n".join(lines) + "\n"


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return "-"
    errors = [float(row["err_fp32"]) for row in rows]
    angle = statistics.mean(1 - float(row["cos_fp32"]) for row in rows)
    worst = f", worst {max(errors):.2g}" if len(errors) > 1 else ""
    return f"{statistics.mean(errors):.2g}{worst} ({angle:.1g})"


def error_ratio(rows: Sequence[Row], name: str) -> float | None:
    """Return block scales' mean error over upstream's on an input, None if unknown."""
    errors = {
        method: [
            float(row["err_fp32"])
            for row in rows
            if row["input"] == name and row["method"] == method
        ]
        for method in ("block", "upstream")
    }
    if not all(errors.values()):
        return None
    return statistics.mean(errors["block"]) / statistics.mean(errors["upstream"])


def _bar(rows: Sequence[Row]) -> str | None:
    ratio = error_ratio(rows, "outliers")
    if ratio is None:
        return None
    verdict = "within" if ratio <= BAR else "above"
    return (
        f"On `outliers`, the mean error of block scales is {ratio:.2f} times that of "
        f"upstream's method, {verdict} the bar of {BAR}.\n"
    )


def _tower_table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | scales | kernels | against fp32 | against bf16 |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        pairs = (
            f"{float(row[f'err_{ref}']):.2g} ({1 - float(row[f'cos_{ref}']):.1g})"
            for ref in ("fp32", "bf16")
        )
        lines.append(
            f"| {row['model']} | {row['method']} | {row['kernel']} | "
            f"{' | '.join(pairs)} |"
        )
    return "\n".join(lines) + "\n"


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--levels", nargs="+", choices=("attention", "tower"))
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=list(INPUTS))
    parser.add_argument("--head-dims", nargs="+", type=int, default=list(HEAD_DIMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--smoke", action="store_true", help="small, any machine")
    parser.add_argument("--output", help="CSV file to append to, or to read")
    parser.add_argument(
        "--markdown", type=Path, help="write this page from the CSV file; nothing runs"
    )
    return parser.parse_args()


def measure(args: argparse.Namespace, log: CsvLog, environment: Environment) -> None:
    """Measure everything that the command line asks for."""
    size = SMOKE if args.smoke else FULL
    failures = Failures()

    def add(rows: Iterable[Mapping[str, object]]) -> None:
        for row in rows:
            log.add({**row, **asdict(environment)})
            print(
                f"  {row['method']:<9} {row['kernel']:<14} error {row['err_fp32']}, "
                f"cosine {row['cos_fp32']}",
                flush=True,
            )

    levels = args.levels or ("attention", "tower")
    if "attention" in levels:
        for head_dim in args.head_dims:
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
    failures.summary()


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
    with torch.inference_mode():
        measure(args, CsvLog(output, COLUMNS), environment)
    print(f"rows in {output}")


if __name__ == "__main__":
    main()

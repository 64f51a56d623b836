# SPDX-License-Identifier: Apache-2.0
"""Times the FP8 quantisers from the QKV projection on, by the bytes they must move.

`stock` is what vLLM does: a copy of q and k, the rotary kernel and a quantising launch
for each of q, k and v at given scales. `plugin-blocks`, with and without given scales,
and `plugin-rows` are one launch each; those that are `counted` count blocks that their
given scales cut off, too. `copy` clones the projection: the bandwidth to measure by.
`tb_per_s` counts what must be read and written once, at the median.

    python benchmarks/bench_quantize.py
    python benchmarks/bench_quantize.py --smoke --output out/quantize.csv   # no GPU
"""

import argparse
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from correctness import check_error, relative_error
from csv_log import COLUMNS, DTYPES, CsvLog, result_row, results_path
from environment import Environment, device
from failures import Failures
from op_problems import CASES, SMOKE_CASES, Problem, make_problem, rotate_fp32
from op_providers import stock_rotary
from timing import Clock, Run, take_turns
from vllm_flashinfer_vit.choices.clock import capture
from vllm_flashinfer_vit.kernels.quantize_ref import column_order

BENCH_CASES = ("1x4096", "1x8160", "1x15376", "1x35344", "8x1024", "8x4096", "mixed")
BENCH_COLUMNS = tuple("tb_per_s" if name == "tflops" else name for name in COLUMNS)
PROVIDERS = (
    "copy",
    "stock",
    "plugin-blocks",
    "plugin-blocks_given",
    "plugin-blocks_counted",
    "plugin-rows",
    "plugin-rows_counted",
)
# Three bits of mantissa are off by 0.026 on inputs from N(0, 1).
GATE = 0.04
# Largest absolute values of N(0, 1) stay below it.
SCALE = 6 / 448


class Provider(NamedTuple):
    """One way to quantise a problem.

    Attributes:
        run: The call that is timed; it returns what `values` takes.
        values: Turns the outputs into q, k and v `[T, H, D]`.
        num_bytes: What must be read and written.
    """

    run: Callable[[], object]
    values: Callable[[object], tuple[torch.Tensor, ...]]
    num_bytes: int


def setup(name: str, problem: Problem) -> Provider:
    """Return a provider for a problem."""
    q, k, v = problem.parts()
    tokens, heads, head_dim = q.shape
    tables = problem.cos, problem.sin
    read = sum(x.numel() * x.element_size() for x in (problem.qkv, *tables))
    scales = torch.full((3,), SCALE, device=q.device)
    counts = None
    if name.endswith("_counted"):
        counts = torch.zeros(2, 3, dtype=torch.int64, device=q.device)
    if name == "copy":
        shape = (tokens, 3, heads, head_dim)
        num_bytes = 2 * problem.qkv.numel() * problem.qkv.element_size()
        return Provider(
            problem.qkv.clone, lambda out: out.view(shape).unbind(1), num_bytes
        )
    if name == "stock":
        written = 3 * tokens * heads * _round_up(head_dim, 16)
        run = stock_run(problem, scales)
        return Provider(run, lambda out: dequantize_rows(out, head_dim), read + written)
    if name.startswith("plugin-rows"):
        written = 3 * tokens * heads * _round_up(head_dim, 16)
        quantize_rows = plugin_function("quantize_rows")
        args = q, k, v, problem.cu_seqlens, scales, _round_up(head_dim, 16), *tables
        return Provider(
            lambda: quantize_rows(*args, counts=counts),
            lambda out: dequantize_rows(out, head_dim),
            read + written,
        )
    from vllm_flashinfer_vit.kernels.flash_fp8_ref import dequantize_ref

    width = 2 * _round_up(head_dim, 32) + _round_up(head_dim, 16)
    quantize_blocks = plugin_function("quantize_blocks")
    given = None if name == "plugin-blocks" else scales
    args = q, k, v, problem.cu_seqlens, *tables, given
    return Provider(
        lambda: quantize_blocks(*args, counts=counts),
        lambda out: dequantize_ref(out, problem.cu_seqlens, tokens, head_dim),
        read + tokens * heads * width,
    )


def plugin_function(name: str) -> Callable[..., object]:
    """Return a quantiser of this package, on the CPU its reference."""
    if device().type == "cpu":
        from vllm_flashinfer_vit.kernels import quantize_ref as reference

        return getattr(reference, f"{name}_ref")
    from vllm_flashinfer_vit.kernels import quantize, quantize_rows

    return getattr(quantize_rows if name == "quantize_rows" else quantize, name)


def stock_run(
    problem: Problem, scales: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return the steps of vLLM's Qwen2.5-VL and Qwen3-VL up to the FP8 attention."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.kernels.triton.qkv_padded_fp8_quant import quantize_fp8_maybe_pad_head_dim
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    with set_current_vllm_config(VllmConfig()):
        fp8_quant = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)
    rotary = stock_rotary()
    tokens, heads, head_dim = problem.q.shape

    def run() -> tuple[torch.Tensor, ...]:
        qkv = problem.qkv.view(1, tokens, 3, heads, head_dim)
        both = qkv[:, :, :2].permute(2, 0, 1, 3, 4).flatten(0, 1).contiguous()
        q, k = rotary(both, problem.cos, problem.sin).unsqueeze(1).unbind(0)
        return tuple(
            quantize_fp8_maybe_pad_head_dim(x, scale, fp8_quant).flatten(0, 1)
            for x, scale in zip((q, k, qkv[:, :, 2]), scales.split(1), strict=True)
        )

    return run


def dequantize_rows(
    out: tuple[torch.Tensor, ...], head_dim: int
) -> tuple[torch.Tensor, ...]:
    """Return fp32 `[T, H, D]` of e4m3 `[T, H, Dp]` at `SCALE`."""
    return tuple(x[..., :head_dim].float() * SCALE for x in out)


def error(provider: Provider, problem: Problem, name: str) -> float:
    """Return the largest relative error of q, k and v.

    Raises:
        WrongResultError: It is beyond the gate.
    """
    q, k, v = problem.parts()
    if name != "copy":
        q = rotate_fp32(q, problem.cos, problem.sin)
        k = rotate_fp32(k, problem.cos, problem.sin)
    if name.startswith("plugin"):
        order = column_order(q.shape[2], 2 * problem.cos.shape[1])
        q, k = q[..., order], k[..., order]
    values = provider.values(provider.run())
    rel_err = max(
        relative_error(x, ref.float()) for x, ref in zip(values, (q, k, v), strict=True)
    )
    check_error(rel_err, GATE)
    return rel_err


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def measure(
    case: str,
    problem: Problem,
    dtype: str,
    args: argparse.Namespace,
    environment: Environment,
    log: CsvLog,
    failures: Failures,
    clock: Clock,
) -> None:
    """Check and time all providers on one case, and write their rows."""
    head_dim = problem.q.shape[2]
    what = f"{case} D={head_dim} {dtype}"
    ready: dict[str, Provider] = {}
    for name in args.providers:
        with failures.noted(f"{what} {name}"):
            provider = setup(name, problem)
            error(provider, problem, name)
            ready[name] = provider
    for mode in args.modes:
        runs: dict[str, Run] = {}
        errors: dict[str, float] = {}
        for name, provider in ready.items():
            with failures.noted(f"{what} {name} {mode}"):
                run = capture(provider.run) if mode == "graph" else provider.run
                errors[name] = error(provider._replace(run=run), problem, name)
                runs[name] = run
        if not runs:
            continue
        samples = take_turns(clock, runs, mode, args.budget_s)
        for name, taken in samples.items():
            row = result_row(
                environment,
                bench="quantize",
                case=case,
                provider=name,
                model="",
                head_dim=head_dim,
                dtype=dtype,
                mode=mode,
                samples_ms=taken,
                flops=ready[name].num_bytes,
                rel_err=errors[name],
            )
            # Bytes take the place of operations: TB/s, not TFLOP/s.
            row["tb_per_s"] = row.pop("tflops")
            log.add(row)
            print(
                f"  {name:<20} {mode:<6} {row['p50_ms']:>9} ms "
                f"[{row['p20_ms']}, {row['p80_ms']}]  {row['tb_per_s']:>6} TB/s  "
                f"rel. err. {row['rel_err']}",
                flush=True,
            )


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *SMOKE_CASES])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[72, 80])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--modes", nargs="+", choices=("eager", "graph"))
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS)
    parser.add_argument(
        "--budget-s",
        type=float,
        default=0.4,
        help="time per case and mode, all providers together",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny cases, any machine")
    parser.add_argument("--output", help="CSV file to append to")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark."""
    args = parse_args()
    on_gpu = device().type == "cuda"
    if not on_gpu and not args.smoke:
        raise SystemExit("no GPU here: only --smoke runs on the CPU")
    args.modes = args.modes or (["eager", "graph"] if on_gpu else ["eager"])
    args.providers = args.providers or [
        name for name in PROVIDERS if on_gpu or name != "stock"
    ]
    environment = Environment.probe()
    output = results_path("quantize", environment.gpu, args.output)
    log = CsvLog(output, BENCH_COLUMNS)
    failures = Failures()
    clock = Clock(device())
    known = {**CASES, **SMOKE_CASES}
    names = args.cases or (SMOKE_CASES if args.smoke else BENCH_CASES)
    with torch.inference_mode():
        for dtype, head_dim, case in itertools.product(
            args.dtypes, args.head_dims, names
        ):
            print(f"{case} D={head_dim} {dtype}", flush=True)
            problem = make_problem(known[case], head_dim, DTYPES[dtype], device())
            measure(case, problem, dtype, args, environment, log, failures, clock)
    failures.end(output)


if __name__ == "__main__":
    main()

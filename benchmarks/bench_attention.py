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
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from correctness import FP8_GATE, GATES, attention_fp32, check_error, relative_error
from csv_log import DTYPES, CsvLog, attention_flops, print_row, result_row, results_path
from environment import Environment, device
from failures import Failures
from op_providers import layer_plan
from timing import Clock, Run, take_turns
from vllm_flashinfer_vit.choices.clock import capture
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS

NUM_HEADS = 16
# Six images: 256 x 256, 560 x 560, 1280 x 720, 1920 x 1080, 1024 x 1024 and 352 x 608
# pixels in patches of 16.
MIXED_LENS = (16 * 16, 36 * 36, 44 * 80, 68 * 120, 64 * 64, 22 * 38)
CASES: dict[str, tuple[int, ...]] = {
    "1x256": (256,),
    "1x1024": (1024,),
    "1x4096": (4096,),
    "1x8160": (8160,),
    "1x15376": (15376,),
    "1x35344": (35344,),
    "8x1024": (1024,) * 8,
    "8x4096": (4096,) * 8,
    "20x400": (400,) * 20,
    "video16x1024": (1024,) * 16,
    "mixed": MIXED_LENS,
    "win64x256": (64,) * 256,
    "win64x1024": (64,) * 1024,
}
SMOKE_CASES = {"1x64": (64,), "3x16": (16,) * 3, "ragged": (1, 40, 7)}
BENCHES = ("attention", "qkv_attention")
SWEEP_LENGTHS = tuple(2**i for i in range(4, 17))
SWEEP_COUNTS = tuple(2**i for i in range(11))
SWEEP_MAX_TOKENS = 2**17
SWEEP_MAX_FLOPS = 4e13


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, as a vision attention class has them.

    Attributes:
        lens: Sequence lengths in tokens; T is their sum.
        qkv: The projection's output, `[T, 3 * H * D]`.
        cos: Rotary table, `[T, D / 2]`, in the activation dtype.
        sin: See `cos`.
        q: Rotated, `[T, H, D]` contiguous.
        k: As `q`.
        v: View of `qkv`, `[T, H, D]` with row stride 3 * H * D.
        cu_seqlens: `[N + 1] int32` on the device.
        max_seqlen: `[] int32` on the CPU.
    """

    lens: tuple[int, ...]
    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: torch.Tensor

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return self.q.shape[2] ** -0.5

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return q, k and v before rotation, as views of the projection."""
        shape = (self.qkv.shape[0], 3, NUM_HEADS, self.q.shape[2])
        return self.qkv.view(shape).unbind(1)


def make_problem(
    lens: tuple[int, ...], head_dim: int, dtype: torch.dtype, on: torch.device
) -> Problem:
    """Draw the inputs of a case; the same ones in every run."""
    random = torch.Generator(on).manual_seed(0)
    tokens = sum(lens)
    width = 3 * NUM_HEADS * head_dim
    qkv = torch.randn(tokens, width, dtype=dtype, device=on, generator=random)
    angle = 100 * torch.rand(tokens, head_dim // 2, device=on, generator=random)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q, k, v = qkv.view(tokens, 3, NUM_HEADS, head_dim).unbind(1)
    return Problem(
        lens=lens,
        qkv=qkv,
        cos=cos,
        sin=sin,
        q=rotate_fp32(q, cos, sin).to(dtype),
        k=rotate_fp32(k, cos, sin).to(dtype),
        v=v,
        cu_seqlens=torch.tensor([0, *lens]).cumsum(0).to(on, torch.int32),
        max_seqlen=torch.tensor(max(lens), dtype=torch.int32),
    )


def rotate_fp32(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head of `[T, H, D]` against each other, in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1)


def stock_attend(backend: str, problem: Problem) -> Callable[..., torch.Tensor]:
    """Return vLLM's own attention with the metadata that it prepares for a backend.

    Args:
        backend: `flash_attn`, `flashinfer` or `torch_sdpa`.
        problem: The case, whose metadata are made here, once, as stock does.

    Returns:
        A call on `[1, T, H, D]` q, k and v.
    """
    from vllm.v1.attention.ops import vit_attn_wrappers as wrappers

    if backend == "torch_sdpa":
        return functools.partial(
            wrappers.vit_torch_sdpa_wrapper,
            scale=problem.scale,
            cu_seqlens=problem.cu_seqlens,
        )
    if backend == "flash_attn":
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        return functools.partial(
            wrappers.vit_flash_attn_wrapper,
            batch_size=1,
            is_rocm_aiter=False,
            fa_version=get_flash_attn_version(head_size=problem.q.shape[2]),
            scale=problem.scale,
            cu_seqlens=problem.cu_seqlens,
            max_seqlen=problem.max_seqlen,
        )
    from vllm.model_executor.layers.attention import mm_encoder_attention
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    class InTree(mm_encoder_attention.MMEncoderAttention):
        """vLLM looks a replaced layer up by its class name; this name has none."""

    kind = AttentionBackendEnum.FLASHINFER
    prefix_sums = problem.cu_seqlens.cpu().numpy()
    on = problem.q.device
    hidden_size = problem.q.shape[1] * problem.q.shape[2]
    max_seqlen = InTree.compute_max_seqlen(kind, prefix_sums)
    return functools.partial(
        wrappers.vit_flashinfer_wrapper,
        scale=problem.scale,
        workspace_buffer=mm_encoder_attention._get_flashinfer_workspace_buffer(),
        cu_seqlens=InTree.maybe_recompute_cu_seqlens(
            kind, prefix_sums, hidden_size, 1, on
        ),
        max_seqlen=torch.tensor(max_seqlen, dtype=torch.int32),
        sequence_lengths=InTree.maybe_compute_seq_lens(kind, prefix_sums, on),
    )


@functools.cache
def stock_rotary() -> torch.nn.Module:
    """Return the rotary operator of vLLM's vision attention."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    with set_current_vllm_config(VllmConfig()):
        return ApplyRotaryEmb(enforce_enable=True)


def stock_run(backend: str, bench: str, problem: Problem) -> Run:
    """Return the call of a stock provider; it gives `[1, T, H, D]`."""
    attend = stock_attend(backend, problem)
    if bench == "attention":
        q, k, v = (x.unsqueeze(0) for x in (problem.q, problem.k, problem.v))
        return lambda: attend(q=q, k=k, v=v)

    rotary = stock_rotary()
    tokens, heads, head_dim = problem.q.shape

    def run() -> torch.Tensor:
        # The steps of vLLM's Qwen2.5-VL and Qwen3-VL: one copy of q and k, rotation of
        # both in one call, v left where it is.
        qkv = problem.qkv.view(1, tokens, 3, heads, head_dim)
        both = qkv[:, :, :2].permute(2, 0, 1, 3, 4).flatten(0, 1).contiguous()
        q, k = rotary(both, problem.cos, problem.sin).unsqueeze(1).unbind(0)
        return attend(q=q, k=k, v=qkv[:, :, 2])

    return run


def plugin_run(kernel: str | None, bench: str, problem: Problem) -> Run:
    """Return the call of this package's op; it gives `[T, H, D]`.

    Args:
        kernel: A kernel's name, or None for the package's own choice; `fp8` for its
            choice of FP8 attention.
        bench: One of `BENCHES`.
        problem: The case.
    """
    from vllm_flashinfer_vit.choices.measure import own_scales
    from vllm_flashinfer_vit.kernels.catalog import KERNELS
    from vllm_flashinfer_vit.ops.attention import attention, fp8_attention
    from vllm_flashinfer_vit.ops.batch import Batch

    is_fp8 = is_fp8_provider(f"plugin-{kernel}")
    forced = None if kernel == "fp8" else kernel
    plan = layer_plan(problem.q.shape[2], problem.q.dtype, forced, is_fp8=is_fp8)
    if bench == "attention":
        q, k, v, cos, sin = problem.q, problem.k, problem.v, None, None
    else:
        (q, k, v), cos, sin = problem.parts(), problem.cos, problem.sin
    batch = Batch(q, k, v, cos, sin, problem.cu_seqlens, problem.max_seqlen)
    if is_fp8:
        record = KERNELS[plan.kernel_for(max(problem.lens))]
        fp8 = own_scales(record, q.device)
        return lambda: fp8_attention(batch, problem.scale, plan, fp8)
    return lambda: attention(batch, problem.scale, plan)


def is_fp8_provider(provider: str) -> bool:
    """Whether a provider may attend in FP8."""
    return provider.endswith("fp8")


def provider_names() -> list[str]:
    """Return the providers that this machine offers."""
    from vllm_flashinfer_vit.kernels.catalog import KERNELS

    if device().type == "cpu":
        # By its own choice, FP8 serves longer sequences than the smoke test has.
        return ["stock-torch_sdpa", "plugin", "plugin-reference_fp8"]
    forced = [f"plugin-{name}" for name, k in KERNELS.items() if not k.is_reference]
    return ["stock-flash_attn", "stock-flashinfer", "plugin", "plugin-fp8", *forced]


def setup(provider: str, bench: str, problem: Problem) -> Run:
    """Return the call that a provider is timed by."""
    origin, _, kernel = provider.partition("-")
    if origin == "stock":
        return stock_run(kernel, bench, problem)
    return plugin_run(kernel or None, bench, problem)


def reference(
    bench: str, problem: Problem, max_seqs: int | None, max_rows: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and their fp32 outputs; see `attention_fp32`."""
    q, k, v = problem.q, problem.k, problem.v
    if bench == "qkv_attention":
        q, k, v = problem.parts()
        q = rotate_fp32(q, problem.cos, problem.sin)
        k = rotate_fp32(k, problem.cos, problem.sin)
    return attention_fp32(q, k, v, problem.lens, problem.scale, max_seqs, max_rows)


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


def gate(provider: str, dtype: str) -> float:
    """Return the relative error beyond which a provider is not timed."""
    return FP8_GATE if is_fp8_provider(provider) else GATES[dtype]


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


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Times what the host spends on one call of a vision attention layer, in eager mode.

A call is the forward pass of vLLM's own module, from the QKV projection to the input of
the output projection; both GEMMs are replaced by tensors. Nothing waits for the device
within a batch of calls, and inputs are small, so that it keeps up with the host.

    python benchmarks/bench_host.py
    python benchmarks/bench_host.py --smoke --output out/host.csv   # no GPU
"""

import argparse
import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from bench_attention import Problem, gate, make_problem, reference
from common import (
    DTYPES,
    CsvLog,
    Environment,
    Failures,
    Run,
    check_error,
    device,
    print_row,
    relative_error,
    result_row,
    results_path,
)
from vllm_flashinfer_vit.choices.clock import order_of_turn
from vllm_flashinfer_vit.kernels.catalog import KERNELS, fp8_names
from vllm_flashinfer_vit.settings import ENV_KERNEL
from vllm_flashinfer_vit.towers.spec import resolve_spec
from vllm_flashinfer_vit.towers.tower import build_tower

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
DTYPE = "bf16"


class Layer:
    """A provider's vision attention module, its GEMMs replaced by tensors."""

    def __init__(self, provider: str, model: str) -> None:
        """Build a tower of one block."""
        origin, _, name = provider.partition("-")
        is_stock = origin == "stock"
        with _environment(ENV_KERNEL, "auto" if is_stock or not name else name):
            tower = build_tower(
                resolve_spec(model, random_weights=True, depth=1),
                backend=name.upper() if is_stock else "FLASHINFER",
                attn_dtype="fp8" if name in fp8_names() else None,
                dtype=DTYPES[DTYPE],
                device=device(),
                plugin=not is_stock,
            )
        self._module = tower.visual.get_submodule("blocks.0.attn")
        # Kept now: the plugin patches the class when it builds its first layer.
        self._forward = type(self._module).forward
        del self._module.qkv, self._module.proj
        self._module.proj = lambda context: (context, None)

    @property
    def head_dim(self) -> int:
        """D, in elements."""
        return self._module.hidden_size_per_attention_head

    def call(self, problem: Problem) -> Run:
        """Return the call on a case, until another is asked for; `[T, 1, H * D]`."""
        projection = problem.qkv.unsqueeze(1)
        self._module.qkv = lambda hidden: (projection, None)
        return functools.partial(
            self._forward,
            self._module,
            projection[..., : projection.shape[2] // 3],
            problem.cu_seqlens,
            problem.cos,
            problem.sin,
            problem.max_seqlen,
            None,
        )


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def provider_names() -> list[str]:
    """Return the providers that this machine offers."""
    if device().type == "cpu":
        return ["stock-torch_sdpa", "plugin"]
    forced = [f"plugin-{name}" for name, k in KERNELS.items() if not k.is_reference]
    return ["stock-flash_attn", "plugin", *forced]


def serves(provider: str, lens: Sequence[int]) -> bool:
    """Return whether a provider's kernel takes sequences of these lengths."""
    kernel = KERNELS.get(provider.partition("-")[2])
    return kernel is None or kernel.max_len is None or max(lens) <= kernel.max_len


def sample_ms(run: Run, calls: int) -> float:
    """Return the host's time for a call, the mean over a batch of them."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) * 1e3 / calls


def take_turns(
    runs: Mapping[str, Run], batches: int, calls: int
) -> dict[str, list[float]]:
    """Time a batch of every provider a round, in the order of `order_of_turn`."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(batches):
        for name in order_of_turn(list(runs), turn):
            samples[name].append(sample_ms(runs[name], calls))
    return samples


def build_layers(
    providers: Sequence[str], models: Sequence[str], failures: Failures
) -> dict[str, dict[str, Layer]]:
    """Build the layers by model and provider, stock's before the plugin is active."""
    layers: dict[str, dict[str, Layer]] = {model: {} for model in models}
    for provider in sorted(providers, key=lambda name: not name.startswith("stock-")):
        for model in models:
            with failures.noted(f"{model} {provider}"):
                layers[model][provider] = Layer(provider, model)
    return layers


def ready_calls(
    layers: Mapping[str, Layer], problem: Problem, what: str, failures: Failures
) -> tuple[dict[str, Run], dict[str, float]]:
    """Return each provider's call and its relative error; wrong ones are left out."""
    rows, ref = reference("qkv_attention", problem, None, None)
    runs, errors = {}, {}
    for provider, layer in layers.items():
        with failures.noted(f"{what} {provider}"):
            run = layer.call(problem)
            rel_err = relative_error(run().view(problem.q.shape)[rows], ref)
            check_error(rel_err, gate(provider, DTYPE))
            runs[provider], errors[provider] = run, rel_err
    return runs, errors


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *SMOKE_CASES])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--providers", nargs="+")
    parser.add_argument("--batches", type=int, default=40, help="samples of a provider")
    parser.add_argument("--calls", type=int, default=50, help="calls of a batch")
    parser.add_argument("--smoke", action="store_true", help="tiny cases, any machine")
    parser.add_argument("--output", help="CSV file to append to")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark."""
    args = parse_args()
    if device().type == "cpu" and not args.smoke:
        raise SystemExit("no GPU here: only --smoke runs on the CPU")
    environment = Environment.probe()
    output = results_path("host", environment.gpu, args.output)
    log, failures = CsvLog(output), Failures()
    known = {**CASES, **SMOKE_CASES}
    cases = args.cases or (SMOKE_CASES if args.smoke else CASES)
    layers = build_layers(args.providers or provider_names(), args.models, failures)
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
                samples = take_turns(runs, args.batches, args.calls)
                for provider, taken in samples.items():
                    row = result_row(
                        environment,
                        bench="host",
                        case=case,
                        provider=provider,
                        model=model,
                        head_dim=head_dim,
                        dtype=DTYPE,
                        mode="host",
                        samples_ms=taken,
                        flops=0,
                        rel_err=errors[provider],
                    )
                    log.add(row)
                    print_row(row)
    failures.summary()
    print(f"rows in {output}")


if __name__ == "__main__":
    main()

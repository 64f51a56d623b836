# SPDX-License-Identifier: Apache-2.0
"""Times whole vision towers: stock vLLM by its backends, and the plugin.

`stock-flash_attn` is FLASH_ATTN with the FlashAttention that vLLM picks, on Hopper 3,
and `stock-flash_attn4` with `attention_config.flash_attn_version=4`. With `-q8` at its
end a provider's linear layers are quantised as by `--quantization fp8`, with `-b8` as
by `fp8_per_block`.

Every provider has a process of its own, since the plugin would change stock. All hold
the same tower, and take turns on one GPU, one at a time. Outputs are compared with the
tower in fp32 on TORCH_SDPA, with the same weights.

    python benchmarks/bench_encoder.py --models Qwen/Qwen2.5-VL-7B-Instruct
    python benchmarks/bench_encoder.py --models dots.ocr SigLIP-So400m Qwen3-Omni-Audio
    python benchmarks/bench_encoder.py --models Kimi-K2.5 --cases 1x1024 8x4096
    python benchmarks/bench_encoder.py --smoke --output out/encoder.csv   # no GPU

`dots.ocr` and the others of `known_stacks.py` are the blocks alone of towers that take
no patches and grids.
"""

import argparse
import os

from contenders import MODES, default_providers
from csv_log import DTYPES, CsvLog, results_path
from environment import Environment, device
from failures import Failures
from host_load import load_text
from model_names import any_model, cases_of
from tower_bench import Bench
from tower_cases import AUDIO_CASES, CASES, DENSE_CASES, MODELS, SMOKE_CASES

_KNOWN_CASES = {**DENSE_CASES, **AUDIO_CASES, **CASES, **SMOKE_CASES}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", type=any_model, help="names or checkpoint folders"
    )
    parser.add_argument(
        "--cases", nargs="+", choices=_KNOWN_CASES, help="default each model's own"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument(
        "--stock-modes", nargs="+", choices=MODES, default=(), help="more for stock"
    )
    parser.add_argument(
        "--providers",
        nargs="+",
        help="stock-<backend>, stock-flash_attn4, plugin, plugin-fp8, plugin-<kernel>",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--depth", type=int, help="blocks to build; default all")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=1.0,
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
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    print(load_text())
    environment = Environment.probe()
    output = results_path("encoder", environment.gpu, args.output)
    bench = Bench(
        log=CsvLog(output),
        environment=environment,
        failures=Failures(),
        modes=args.modes or (("eager", "graph") if on_gpu else ("eager",)),
        stock_modes=args.stock_modes,
        dtype=args.dtype,
        budget_s=args.budget_s,
    )
    depth = args.depth or (2 if args.smoke else None)
    with bench.processes(args.providers or default_providers(on_gpu)) as remotes:
        for model in args.models or (MODELS[1:2] if args.smoke else MODELS):
            names = args.cases or (SMOKE_CASES if args.smoke else cases_of(model))
            cases = {name: _KNOWN_CASES[name] for name in names}
            head_dim, ready = bench.build(remotes, model, depth)
            bench.run_cases(model, head_dim, ready, cases)
    bench.failures.end(output)


if __name__ == "__main__":
    main()

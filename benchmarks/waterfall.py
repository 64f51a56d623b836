# SPDX-License-Identifier: Apache-2.0
"""Shows where a tower's GPU time goes, in stock vLLM and with the plugin.

Each contender has a process of its own, as in bench_encoder.py. The time is of kernels
alone, from torch's profiler, so it leaves out gaps between launches; kernels are told
apart by their names. The figure is drawn from the CSV file.

    python benchmarks/waterfall.py --figure docs/figures/waterfall.svg
    python benchmarks/waterfall.py --contenders stock-flash_attn-q8:compiled \\
        plugin-q8:eager plugin-fp8-q8:eager --output waterfall_quantized.csv
    python benchmarks/waterfall.py --draw benchmarks/results/h200/waterfall.csv \\
        --figure docs/figures/waterfall.svg
"""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chosen_rows import Row, of_last_run, of_one_vllm, read
from contenders import BLOCKS, Contender
from csv_log import CsvLog, results_path
from environment import ENVIRONMENT_COLUMNS, Environment, device
from failures import Failures
from model_names import any_model
from remote import close_all
from tower_cases import CASES, MODELS, SMOKE_CASES
from tower_worker import RemoteTower, build_towers, title_of

# The first that is found in a kernel's name decides.
CLASSES: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "quantizer": r"quantize|_absmax_kernel|_update_kernel|_factors_kernel",
        "rotary": r"rotary|_rope_kernel|_turn_kernel",
        "attention": r"flash(?!infer_?vit)|fmha|sdpa|attention|hopper|_window_kernel"
        r"|mask_padding|_clear_kernel|_redo_kernel|_seqlens_kernel|_constants_kernel"
        r"|_finish_kernel",
        "GEMM": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|mm\b|::linear",
        "norm": r"layer_?norm|rms_?norm|rsqrt|pow_tensor|meanops|sum_norm|norm_add",
        "activation": r"gelu|silu|sigmoid|act_and_mul",
        "copy": r"copy|cat(array|_)|memcpy|memset|index|gather|scatter|_to_copy",
        "addition": r"functor_?add|\badd\b|fused_add",
    }.items()
}
OTHER = "other element-wise"
CONTENDERS = (
    "stock-flash_attn:eager",
    "stock-flash_attn:fused",
    "stock-flash_attn:compiled",
    "plugin:eager",
    "plugin-fp8:eager",
)
SMOKE_CONTENDERS = ("stock-torch_sdpa:eager", "plugin:eager")
COLUMNS = ("model", "case", "provider", "blocks", "dtype", "class", "ms", "kernels")
# Enough to average over; one call takes up to half a second.
_CALLS = 5


def class_of(kernel: str) -> str:
    """Return the class of a kernel's name: a key of `CLASSES`, or `OTHER`."""
    found = (name for name, pattern in CLASSES.items() if pattern.search(kernel))
    return next(found, OTHER)


def class_times(kernels: Mapping[str, float]) -> dict[str, tuple[float, int]]:
    """Sum kernels' times by class; each comes with how many names it has."""
    totals: dict[str, tuple[float, int]] = {}
    for name, time_ms in kernels.items():
        total, count = totals.get(class_of(name), (0.0, 0))
        totals[class_of(name)] = total + time_ms, count + 1
    return {name: totals[name] for name in (*CLASSES, OTHER) if name in totals}


def measure(
    log: CsvLog,
    environment: Environment,
    failures: Failures,
    model: str,
    case: str,
    contenders: Sequence[Contender],
    depth: int | None,
) -> None:
    """Build one model's towers side by side, and profile them one after another."""
    grids = {**CASES, **SMOKE_CASES}[case]
    remotes = [RemoteTower(contender) for contender in contenders]
    for remote in build_towers(remotes, model, depth, failures, f"{model} {case}"):
        provider, blocks = remote.contender.provider, remote.contender.blocks
        with failures.noted(f"{model} {case} {title_of(remote)}"):
            remote.call("load", grids, None)
            kernels = remote.call("kernel_times", _CALLS)
            for name, (time_ms, count) in class_times(kernels).items():
                row = {
                    "model": model,
                    "case": case,
                    "provider": provider,
                    "blocks": blocks,
                    "dtype": "bf16",
                    "class": name,
                    "ms": f"{time_ms:.4f}",
                    "kernels": count,
                }
                log.add({**row, **asdict(environment)})
            total = sum(kernels.values())
            print(f"{model} {case} {provider} {blocks}: {total:.4g} ms")
            for name, time_ms in sorted(kernels.items(), key=lambda item: -item[1])[
                :12
            ]:
                print(f"  {time_ms:9.4f} ms  {class_of(name):<18} {name[:80]}")
    close_all(remotes)


def draw(source: Path, target: Path, vllm: str | None = None) -> None:
    """Draw stacked bars from a CSV file: a panel per model and case.

    Args:
        source: Results file.
        target: SVG file to write.
        vllm: Of which version; needed if there are more.

    Raises:
        SystemExit: As `read` and `of_one_vllm`.
    """
    from matplotlib import pyplot as plt

    from figures import CLASS_COLOURS, STYLE, say_where, write_svg

    rows = of_one_vllm(read(source), vllm, source)
    rows = of_last_run(rows, ("model", "case"), ("provider", "blocks", "class"))
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((row["model"], row["case"]), []).append(row)
    colours = dict(zip((*CLASSES, OTHER), CLASS_COLOURS, strict=True))
    heights = [0.8 + 0.3 * len({_bar_name(r) for r in p}) for p in panels.values()]
    with plt.rc_context(STYLE):
        figure, all_axes = plt.subplots(
            len(panels),
            1,
            figsize=(9, sum(heights) + 1),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        for axes, (title, bars) in zip(all_axes[:, 0], panels.items(), strict=True):
            _stack(axes, bars, colours)
            axes.set_title(", ".join(title), loc="left")
            axes.set_xlabel("GPU time, ms (lower is better)")
        used = [name for name in colours if any(r["class"] == name for r in rows)]
        handles = [plt.Rectangle((0, 0), 1, 1, color=colours[name]) for name in used]
        figure.legend(handles, used, loc="outside upper right", ncols=5)
        say_where(figure, "NxL: N images of L patches each.", rows)
        write_svg(figure, target)


def _bar_name(row: Row) -> str:
    return f"{row['provider']}, {row['blocks']}"


def _stack(axes: Any, rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    from figures import draw_part

    names = list(dict.fromkeys(_bar_name(row) for row in rows))
    ends = dict.fromkeys(names, 0.0)
    longest = max(
        sum(float(row["ms"]) for row in rows if _bar_name(row) == name)
        for name in names
    )
    for row in rows:
        name = _bar_name(row)
        length, colour = float(row["ms"]), colours[row["class"]]
        draw_part(axes, name, ends[name], length, colour, 0.04 * longest)
        ends[name] += length
    for name, end in ends.items():
        axes.text(end + 0.01 * longest, name, f"{end:.4g}", va="center", fontsize=8)
    axes.invert_yaxis()


def contender_option(text: str) -> Contender:
    """Return the contender that `PROVIDER:BLOCKS` stands for, for argparse."""
    provider, _, blocks = text.partition(":")
    if blocks not in BLOCKS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write PROVIDER:BLOCKS, blocks as one of {', '.join(BLOCKS)}"
        )
    try:
        return Contender.of(provider, "bf16", blocks)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", type=any_model, help="names or checkpoint folders"
    )
    parser.add_argument("--case", choices=[*CASES, *SMOKE_CASES])
    parser.add_argument("--depth", type=int, help="blocks to build; default all")
    parser.add_argument(
        "--contenders",
        nargs="+",
        type=contender_option,
        metavar="PROVIDER:BLOCKS",
        help="default: " + " ".join(CONTENDERS),
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny case, any machine")
    parser.add_argument("--output", help="CSV file to append to")
    parser.add_argument("--draw", type=Path, help="draw this CSV file, measure nothing")
    parser.add_argument("--figure", type=Path, help="SVG file to draw")
    parser.add_argument("--vllm", help="with --draw: rows of this version")
    args = parser.parse_args()
    if args.vllm and not args.draw:
        parser.error("--vllm picks rows that are there: it needs --draw")
    return args


def main() -> None:
    """Profile, then draw."""
    args = parse_args()
    failures = Failures()
    source, vllm = args.draw, args.vllm
    if source is None:
        if device().type != "cuda" and not args.smoke:
            raise SystemExit("no GPU here: only --smoke runs on the CPU")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        environment = Environment.probe()
        vllm = environment.vllm
        source = results_path("waterfall", environment.gpu, args.output)
        log = CsvLog(source, (*COLUMNS, *ENVIRONMENT_COLUMNS))
        names = SMOKE_CONTENDERS if args.smoke else CONTENDERS
        contenders = args.contenders or [contender_option(name) for name in names]
        for model in args.models or (MODELS[1:2] if args.smoke else MODELS):
            measure(
                log,
                environment,
                failures,
                model,
                args.case or ("1x64" if args.smoke else "8x4096"),
                contenders,
                args.depth or (2 if args.smoke else None),
            )
    if args.figure:
        draw(source, args.figure, vllm)
        print(f"drew {args.figure}")
    failures.end(source)


if __name__ == "__main__":
    main()

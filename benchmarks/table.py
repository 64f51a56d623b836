# SPDX-License-Identifier: Apache-2.0
"""Prints result files as the Markdown tables of README and docs.

    python benchmarks/table.py summary benchmarks/results/h200 --vllm 0.33.0
    python benchmarks/table.py best benchmarks/results/h200/encoder.csv --vllm 0.33.0
    python benchmarks/table.py best_eager benchmarks/results/h200/eager.csv
    python benchmarks/table.py modes benchmarks/results/h200/encoder.csv --vllm 0.33.0
    python benchmarks/table.py serve benchmarks/results/h200/serve.csv
    python benchmarks/table.py attention benchmarks/results/h200/attention.csv \
        --bench qkv_attention --providers stock-flash_attn plugin plugin-hopper_fp8

A file with rows of several versions of vLLM needs `--vllm`. Of repeated measurements
the newest counts. A speed-up is only printed for two rows of one run, by one command of
one commit: measurements of two runs differ by more than what is compared.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench_tables import (
    best_table,
    case_table,
    error_table,
    host_table,
    modes_table,
    quantize_table,
)
from chosen_rows import Row, check_names, of_one_vllm, read, run_of
from engine_tables import graph_table, memory_table, serve_table, summary_table

KINDS: Mapping[str, Callable[[list[Row]], str]] = {
    "encoder": lambda rows: case_table(rows, "model"),
    "best": best_table,
    "best_eager": lambda rows: best_table(rows, "eager"),
    "best_new": lambda rows: best_table(rows, "new"),
    "best_quantized": lambda rows: best_table(rows, quantized=True),
    "best_quantized_eager": lambda rows: best_table(rows, "eager", quantized=True),
    "modes": modes_table,
    "attention": lambda rows: case_table(rows, "head_dim"),
    "errors": error_table,
    "graphs": graph_table,
    "memory": memory_table,
    "host": host_table,
    "quantize": quantize_table,
    "serve": serve_table,
}
# Kinds of which only one mode is compared.
_DEFAULT_MODES = {
    **dict.fromkeys(("encoder", "attention", "errors", "quantize"), "graph"),
    "host": "host",
}
# Kinds that compare with the best of stock's modes: none may be left out.
_ALL_MODES = ("summary", *(kind for kind in KINDS if kind.startswith("best")))
# Kinds whose file also has rows of benches that are read by their names.
_DEFAULT_BENCHES = {"host": "host", "attention": "qkv_attention"}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("summary", *KINDS))
    parser.add_argument(
        "source", type=Path, help="a results file; for summary their folder"
    )
    parser.add_argument("--vllm", help="rows of this version; needed if there are more")
    parser.add_argument("--mode", help="default: graph, where one mode is compared")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument(
        "--bench", help="default: host or qkv_attention, for host and attention"
    )
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--providers", nargs="+")
    args = parser.parse_args(argv)
    if args.mode and args.kind in _ALL_MODES:
        parser.error(f"--mode: {args.kind} compares all of stock's modes")
    return args


def wanted_rows(path: Path, args: argparse.Namespace, mode: str | None) -> list[Row]:
    """Return the rows of a file that the options ask for.

    Raises:
        SystemExit: As `of_one_vllm` and `check_names`, the file has no such column, or
            the mode leaves out what servers of a run are compared with.
    """
    rows = read(path)
    lists = {"model": args.models, "case": args.cases, "provider": args.providers}
    for name, values in lists.items():
        if values is not None and rows and name not in rows[0]:
            raise SystemExit(f"{path} has no column {name!r}: leave out --{name}s")
    check_names(rows, {"model": args.models, "case": args.cases}, path)
    wanted = {
        "dtype": args.dtype,
        "bench": args.bench or _DEFAULT_BENCHES.get(args.kind),
    }
    rows = [
        row
        for row in rows
        if all(v is None or row.get(name, v) == v for name, v in wanted.items())
        and all(v is None or row[name] in v for name, v in lists.items())
    ]
    of_mode = [row for row in rows if mode is None or row.get("mode", mode) == mode]
    if args.kind == "serve":
        _check_servers(rows, of_mode)
    return of_one_vllm(of_mode, args.vllm, path)


def _check_servers(rows: list[Row], shown: list[Row]) -> None:
    """Refuse a mode without which servers are not compared with stock's best.

    Raises:
        SystemExit: Stock ran in another mode beside them.
    """
    runs = {run_of(row) for row in shown}
    for row in rows:
        is_stock = row["provider"].startswith("stock-")
        if is_stock and run_of(row) in runs and row not in shown:
            raise SystemExit(
                f"--mode leaves out {row['provider']} {row['mode']} of a run that is "
                "shown, and with it what may be stock's best: leave --mode out"
            )


def render(argv: Sequence[str] | None = None) -> str:
    """Return the table that the arguments ask for.

    Raises:
        NoRowsError: Nothing is left to show.
        SystemExit: As `wanted_rows`, or the arguments are wrong.
    """
    args = parse_args(argv)
    if args.kind == "summary":
        encoder = wanted_rows(args.source / "encoder.csv", args, None)
        eager = wanted_rows(args.source / "eager.csv", args, None)
        graphs = wanted_rows(args.source / "graphs.csv", args, None)
        return summary_table(encoder, eager, graphs)
    mode = args.mode or _DEFAULT_MODES.get(args.kind)
    return KINDS[args.kind](wanted_rows(args.source, args, mode))


if __name__ == "__main__":
    print(render())

# SPDX-License-Identifier: Apache-2.0
"""Drops rows of results that newer ones of the same stack replace.

A row is replaced by a later one that measured the same thing with the same GPU, vLLM,
torch, Triton, FlashInfer, QuACK and cuDNN. A version that one of the two does not know
counts as equal. The history of the file keeps what is dropped. Contenders are compared
within a run, so that all rows of a run and a case stay while one of them does: a later
run may have timed fewer, or have ended early. `--commits` also drops the rows of every
other commit, for contenders that nobody measured again and that have changed since.

    python benchmarks/prune.py benchmarks/results/h200/attention.csv
    python benchmarks/prune.py benchmarks/results/h200/encoder.csv \
        --commits c244f98 814b4e4
"""

import argparse
import csv
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

from environment import ENVIRONMENT_COLUMNS, STACK_COLUMNS

# What was measured, in the columns that a file has of these.
IDENTITY = (
    *("bench", "level", "config", "input", "seed", "method", "model", "case"),
    *("provider", "kernel", "blocks", "class", "head_dim", "dtype", "mode", "tokens"),
    *("workload", "concurrency", "answer_tokens", "serve_args", "server"),
    *("stage", "engine_args", "line"),
    # Ten random requests do not stand for a hundred.
    "requests",
)
# In which of these contenders differ that are compared.
CONTENDER = ("method", "provider", "kernel", "blocks", "class", "mode", "stage", "line")
# What was found. Each column of each file but bits.csv is of one of the three.
MEASURED = (
    *("p20_ms", "p50_ms", "p80_ms", "tflops", "tb_per_s", "rel_err", "ms", "kernels"),
    *("err_fp32", "cos_fp32", "err_bf16", "cos_bf16"),
    # Of engines.
    *("answered_image", "answered_video", "answered_multi", "attention_share"),
    *("graph_hits", "graph_misses", "graph_rel_err", "graph_bitwise", "bitwise"),
    *("same_kernel_rel_err", "same_kernel_bitwise", "layer_class", "compiled_modules"),
    *("patches", "padded_over_real", "total_ms", "triton_kernels", "cudnn_plans"),
    *("workspace_bytes", "reserved_bytes", "peak_memory_mib", "start_s"),
    # Of servers.
    *("completed", "req_s", "image_tokens_s", "ttft_p50_ms", "ttft_p99_ms"),
    "gpu_busy",
    *("sent", "answered", "refused", "cancelled", "faults", "sampled", "wrong"),
    *("median_diff", "worst_diff", "noticed", "rss_growth", "device_growth"),
    *("built_after_start", "scale_file_changes", "scales_saved", "scales_not_saved"),
    *("device_of", "done", "rss_mib", "device_mib"),
    # Of commands in pages, which may move to another page.
    *("page", "outcome", "seconds"),
)
UNKNOWN = "unknown"

Row = dict[str, str]


def newest_rows(rows: Sequence[Row], commits: Collection[str] = ()) -> list[Row]:
    """Return the rows that stay, in the order of the file.

    Args:
        rows: Oldest first.
        commits: Whose rows stay at all; empty for every commit.
    """
    # Each an object of its own, told from rows that are equal to it.
    wanted = [dict(row) for row in rows if not commits or row["commit"] in commits]
    groups: dict[tuple[str | None, ...], list[Row]] = defaultdict(list)
    for row in wanted:
        groups[_of_group(row)].append(row)
    kept = {_of_group(row) for row in _not_replaced(wanted)}
    stay = {id(row) for group in kept for row in _not_replaced(groups[group])}
    return [row for row in wanted if id(row) in stay]


def _of_group(row: Row) -> tuple[str | None, ...]:
    """Return what rows have alike that are compared with each other."""
    names = (name for name in IDENTITY if name not in CONTENDER)
    return tuple(row.get(name) for name in (*names, *ENVIRONMENT_COLUMNS))


def _not_replaced(rows: Sequence[Row]) -> list[Row]:
    newer: dict[tuple[str | None, ...], list[Row]] = defaultdict(list)
    kept = []
    for row in reversed(rows):
        same = newer[tuple(row.get(name) for name in IDENTITY)]
        if not any(is_same_stack(row, other) for other in same):
            same.append(row)
            kept.append(row)
    return kept[::-1]


def is_same_stack(one: Row, other: Row) -> bool:
    """Whether two rows name no GPU or version that differs."""
    return all(
        one[name] == other[name] or UNKNOWN in (one[name], other[name])
        for name in STACK_COLUMNS
    )


def main() -> None:
    """Rewrite one file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="not bits.csv: it compares commits")
    parser.add_argument("--commits", nargs="+", default=(), help="keep only these")
    args = parser.parse_args()
    with args.source.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    columns = reader.fieldnames or []
    if "sha256" in columns:
        raise SystemExit(f"{args.source} compares commits: nothing in it is replaced")
    if odd := set(columns) - {*IDENTITY, *MEASURED, *ENVIRONMENT_COLUMNS}:
        names = ", ".join(sorted(odd))
        raise SystemExit(f"{args.source}: add {names} to IDENTITY or MEASURED first")
    kept = newest_rows(rows, args.commits)
    if not kept:
        raise SystemExit(f"{args.source} has no rows of {', '.join(args.commits)}")
    with args.source.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
    by_commit = Counter(row["commit"] for row in kept)
    print(f"{args.source}: {len(kept)} of {len(rows)} rows stay: {dict(by_commit)}")


if __name__ == "__main__":
    main()

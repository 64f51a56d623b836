# SPDX-License-Identifier: Apache-2.0
"""Hashes what the vision towers return, so that two commits can be compared bit by bit.

A change that must not change any number, such as a move of modules, is shown by equal
hashes of its own commit and the one before it, on the same GPU and the same versions.
Weights and pixels are random, the same for every commit. Each output is computed twice;
two that differ are an error.

    python benchmarks/bits.py                                   # about 3 minutes
    python benchmarks/bits.py --compare 7d9efbd HEAD_COMMIT --vllm 0.25.1   # no GPU
    python benchmarks/bits.py --smoke --output out/bits.csv     # no GPU
"""

import argparse
import gc
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from chosen_rows import of_one_vllm, read
from csv_log import DTYPES, CsvLog, results_path
from environment import ENVIRONMENT_COLUMNS, STACK_COLUMNS, Environment, device
from failures import Failures
from model_names import named_model
from tower_cases import CASES, MODELS, SMOKE_CASES, Grids

# The only imports of the package: an older commit may have them elsewhere.
from vllm_flashinfer_vit.choices.clock import capture
from vllm_flashinfer_vit.towers.spec import resolve_spec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

Key = tuple[str, ...]

# One short image, one for which FP8 and QuACK run, and six sizes in one batch.
BITS_CASES = ("1x256", "1x4096", "mixed")
ATTN_DTYPES = ("bf16", "fp8")
MODES = ("eager", "graph")
KEY_COLUMNS = ("model", "case", "attn_dtype", "mode")
COLUMNS = (*KEY_COLUMNS, "kernels", "shape", "sha256", *ENVIRONMENT_COLUMNS)


def digest(output: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in row-major order."""
    flat = output.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).hexdigest()


def draw_pixels(patches: int, width: int) -> torch.Tensor:
    """Return `[patches, width]` bf16, drawn on the CPU: equal on every machine."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(patches, width, generator=random).to(DTYPES["bf16"])


def prepared(tower: Tower, grids: Grids, mode: str) -> Callable[[], torch.Tensor]:
    """Return a call that encodes one case, in eager mode or by a CUDA graph."""
    pixels = draw_pixels(sum(map(math.prod, grids)), tower.spec.patch_dim)
    pixels = pixels.to(tower.device)
    shapes = [list(grid) for grid in grids]
    if mode == "eager":
        return lambda: tower.visual(pixels, shapes)
    # vLLM too prepares the metadata outside its encoder graphs.
    metadata = tower.visual.prepare_encoder_metadata(shapes)
    return capture(lambda: tower.visual(pixels, None, encoder_metadata=dict(metadata)))


def tower_rows(
    model: str,
    attn_dtype: str,
    cases: Mapping[str, Grids],
    modes: Sequence[str],
    depth: int | None,
    failures: Failures,
) -> Iterator[dict[str, str]]:
    """Hash one tower's outputs; yield the part of a row that is not the environment.

    Args:
        model: A name in `NAMED_MODELS`.
        attn_dtype: One of `ATTN_DTYPES`.
        cases: Grids by the case's name.
        modes: Some of `MODES`.
        depth: Blocks to build; None for all.
        failures: Where a case that does not run, or not twice alike, is noted.
    """
    tower = build_tower(
        resolve_spec(model, random_weights=True, depth=depth),
        backend="FLASHINFER",
        dtype=DTYPES["bf16"],
        device=device(),
        attn_dtype="fp8" if attn_dtype == "fp8" else None,
    )
    for case, grids in cases.items():
        for mode in modes:
            row = None
            with (
                failures.noted(f"{model} {attn_dtype} {case} {mode}"),
                tower.running(),
            ):
                row = _case_row(tower, grids, mode)
            if row is not None:
                yield {
                    "model": model,
                    "case": case,
                    "attn_dtype": attn_dtype,
                    "mode": mode,
                    **row,
                }


def _case_row(tower: Tower, grids: Grids, mode: str) -> dict[str, str]:
    run = prepared(tower, grids, mode)
    output = run()
    # Hashed at once: a replay writes to the same memory again.
    shape, first = "x".join(map(str, output.shape)), digest(output)
    if digest(run()) != first:
        raise RuntimeError("two runs on the same input differ in bits")
    kernels = tower.kernels([list(grid) for grid in grids])
    return {
        "kernels": ", ".join(f"{layers}: {name}" for layers, name in kernels.items()),
        "shape": shape,
        "sha256": first,
    }


def hashes(
    path: Path, commit: str, vllm: str | None = None
) -> dict[Key, Mapping[str, str]]:
    """Return a commit's rows, the newest of each case.

    Args:
        path: A results file of this script.
        commit: As in the rows.
        vllm: Of which version; needed if the commit ran with more.

    Raises:
        SystemExit: The file has no row of this commit, or as `of_one_vllm`.
    """
    rows = read(path)
    mine = [row for row in rows if row["commit"] == commit]
    if not mine:
        commits = ", ".join(dict.fromkeys(row["commit"] for row in rows)) or "none"
        raise SystemExit(f"{path} has no rows of commit {commit!r}; it has: {commits}")
    return {_key(row): row for row in of_one_vllm(mine, vllm, path)}


def compare(path: Path, before: str, after: str, vllm: str | None = None) -> list[str]:
    """Return a line for each case in which two commits differ; none if all are equal.

    Args:
        path: As for `hashes`.
        before: A commit.
        after: Another one.
        vllm: As for `hashes`.

    Raises:
        SystemExit: As `hashes`, for one of the commits.
    """
    old, new = hashes(path, before, vllm), hashes(path, after, vllm)
    lines = []
    for key in dict.fromkeys([*old, *new]):
        name = " ".join(key)
        if key not in old or key not in new:
            lines.append(f"{name}: only in {before if key in old else after}")
        elif old[key]["sha256"] != new[key]["sha256"]:
            causes = [
                f"{column}: {old[key][column]} and {new[key][column]}"
                for column in ("kernels", "shape", *STACK_COLUMNS)
                if old[key][column] != new[key][column]
            ]
            reason = f" ({'; '.join(causes)})" if causes else ""
            lines.append(f"{name}: other bits{reason}")
    return lines


def _key(row: Mapping[str, str]) -> Key:
    return tuple(row[column] for column in KEY_COLUMNS)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        type=named_model,
        default=MODELS,
        help="names or checkpoint folders",
    )
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *SMOKE_CASES])
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--depth", type=int, help="blocks to build; default all")
    parser.add_argument("--smoke", action="store_true", help="tiny cases, any machine")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="run nothing; print which cases differ between the rows of two commits",
    )
    parser.add_argument("--vllm", help="with --compare: rows of this version")
    parser.add_argument(
        "--output", help="CSV file to append to, or to compare in (the H200's)"
    )
    args = parser.parse_args()
    if args.vllm and not args.compare:
        parser.error("--vllm picks rows that are there: it needs --compare")
    return args


def main() -> None:
    """Hash the towers' outputs, or compare two commits."""
    args = parse_args()
    if args.compare:
        before, after = args.compare
        path = results_path("bits", "h200", args.output)
        lines = compare(path, before, after, args.vllm)
        if lines:
            print("\n".join(lines))
            raise SystemExit(f"{before} and {after} differ in {len(lines)} cases")
        cases = len(hashes(path, after, args.vllm))
        print(f"{before} and {after} have the same bits in all {cases} cases")
        return
    on_gpu = device().type == "cuda"
    if not on_gpu and not args.smoke:
        raise SystemExit("no GPU here: only --smoke and --compare run on the CPU")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    known = {**CASES, **SMOKE_CASES}
    names = args.cases or (SMOKE_CASES if args.smoke else BITS_CASES)
    environment = Environment.probe()
    log = CsvLog(results_path("bits", environment.gpu, args.output), COLUMNS)
    failures = Failures()
    for model in args.models:
        for attn_dtype in ATTN_DTYPES:
            rows = tower_rows(
                model,
                attn_dtype,
                {name: known[name] for name in names},
                args.modes or (MODES if on_gpu else MODES[:1]),
                args.depth or (1 if args.smoke else None),
                failures,
            )
            with failures.noted(f"{model} {attn_dtype}"):
                for row in rows:
                    log.add({**row, **asdict(environment)})
                    values = " ".join(row[column] for column in KEY_COLUMNS)
                    print(f"  {values} {row['sha256'][:16]}", flush=True)
            # A tower refers to itself, so its memory comes back here.
            gc.collect()
    failures.end(log.path)


if __name__ == "__main__":
    main()

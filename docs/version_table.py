# SPDX-License-Identifier: Apache-2.0
"""The table of docs/compatibility.md: what runs with each vLLM, and who says so."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for folder in ("benchmarks", "tools"):
    sys.path.append(str(ROOT / folder))

import canary  # noqa: E402
import chosen_rows  # noqa: E402
from table_text import table_head, table_line  # noqa: E402

# Packages of a column, in the order of its head.
_REQUIRED = ("torch", "flashinfer-python", "quack-kernels")
_HEADS = (
    "vLLM",
    "runner with encoder graphs",
    "patches that fit",
    "kernels",
    "torch, FlashInfer, QuACK that it requires",
    "state",
)


def compatibility() -> str:
    """Write a line for each vLLM that was read."""
    from vllm_flashinfer_vit.machine.versions import runner_note
    from vllm_flashinfer_vit.patches.fingerprints import known

    measured = _measured()
    runs = canary.recorded()
    lines = table_head(_HEADS)
    for version, release in known().releases.items():
        run = runs.get(version)
        wanted = {name: text.strip("=") for name, text in release.libraries.items()}
        cells = (
            version,
            "V1" if runner_note(version, {}) else "V1, V2",
            _patches({*release.left_out, *(run.patches.left_out if run else ())}),
            _kernels(wanted.get("flashinfer-python"), run),
            ", ".join(wanted.get(name, "-") for name in _REQUIRED),
            _state(measured.get(version, set()), run),
        )
        lines.append(table_line(cells))
    return "\n".join(lines)


def _measured() -> Mapping[str, set[str]]:
    """Return the GPUs that have rows, by the version of vLLM."""
    measured: dict[str, set[str]] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*/*.csv")):
        for row in chosen_rows.read(path):
            measured.setdefault(row["vllm"], set()).add(row["gpu"])
    return measured


def _patches(left_out: set[str]) -> str:
    """Write how many of today's patches fit, and which do not."""
    from vllm_flashinfer_vit.plugin import all_patches

    names = [patch.name for patch in all_patches()]
    missing = [name for name in names if name in left_out]
    fitting = f"{len(names) - len(missing)} of {len(names)}"
    return f"{fitting}; not {', '.join(missing)}" if missing else fitting


def _kernels(required: str | None, run: canary.Run | None) -> str:
    """Write which kernels the libraries allow: those of a run, or what vLLM requires.

    Args:
        required: FlashInfer's version.
        run: What was recorded, if something was.
    """
    from vllm_flashinfer_vit.kernels.catalog import KERNELS
    from vllm_flashinfer_vit.machine.versions import FLASHINFER_RANGE

    flashinfer = run.stack["flashinfer"] if run else required
    refused = set()
    if flashinfer is None or not FLASHINFER_RANGE.contains(flashinfer):
        refused |= {name for name, one in KERNELS.items() if one.needs.on_cudnn}
    if run and 4 not in run.flash_attn:
        libraries = {name: one.needs.library for name, one in KERNELS.items()}
        refused |= {n for n, library in libraries.items() if library == "flash_attn_4"}
    return f"all but {', '.join(sorted(refused))}" if refused else "all"


def _state(gpus: set[str], run: canary.Run | None) -> str:
    """Write how far a release was tried: on GPUs, on the CPU, or as text alone."""
    states = [f"measured: {', '.join(sorted(gpus))}"] if gpus else []
    if run:
        record = os.path.relpath(canary.RECORDS / f"{run.vllm}.json", ROOT / "docs")
        tests = run.tests
        passed = f"{tests.passed} tests pass, {sum(tests.skipped.values())} are skipped"
        if run.failures:
            states.append(f"[fails on the CPU]({record}): {run.failures}; {passed}")
        else:
            states.append(f"[tested on the CPU]({record}): {passed}")
    return "; ".join(states) or "read"

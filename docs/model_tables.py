# SPDX-License-Identifier: Apache-2.0
"""The tables of models.md: what `models.toml` says, and what the code knows.

`generate.py` writes them into the page.
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import chosen_rows  # noqa: E402
from block_stacks import STACKS  # noqa: E402

FACTS = Path(__file__).with_name("models.toml")
_RESULTS = ROOT / "benchmarks" / "results" / "h200" / "encoder.csv"
_GPU = "NVIDIA H200"
_HEADS = (
    *("module", "serves", "head dims", "longest length", "blocks"),
    *("encoder graphs", "FP8 on an H200", "by name", "gain", "tested", "stock 0.25.1"),
)
# Of packed sequences alone.
_PACKED_HEADS = ("longest length", "stock 0.25.1")


def read() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return what the file says of each encoder, by `packed` and `dense`."""
    return tomllib.loads(FACTS.read_text(encoding="utf-8"))


def packed() -> str:
    """Write a line for each encoder of packed sequences."""
    return _table(read()["packed"], _HEADS)


def dense() -> str:
    """Write a line for each encoder of dense batches."""
    heads = [head for head in _HEADS if head not in _PACKED_HEADS]
    return _table(read()["dense"], heads)


def _table(towers: Sequence[Mapping[str, Any]], heads: Sequence[str]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    gains, known = dict(_gains()), _known()
    for tower in towers:
        cells = _cells(tower, gains, known)
        lines.append(f"| {' | '.join(cells[head] for head in heads)} |")
    return "\n".join(lines)


def _cells(
    tower: Mapping[str, Any], gains: Mapping[str, str], known: Mapping[str, bool]
) -> dict[str, str]:
    module, part = tower["module"], tower.get("part")
    fp8 = dict.fromkeys(map(_fp8, tower.get("head_dims", ())))
    graphs = tower.get("graphs", "-")
    # Of two encoders in one module, the names are of the first.
    is_first = part in (None, "vision")
    if is_first and known.get(module):
        graphs = f"{graphs}, exact sizes"
    return {
        "module": f"`{module}`" + (f" ({part})" if part else ""),
        "serves": tower.get("serves", ""),
        "head dims": ", ".join(map(str, tower.get("head_dims", ()))),
        "longest length": tower.get("length", ""),
        "blocks": "programs" if tower.get("blocks") else "-",
        "encoder graphs": graphs,
        "FP8 on an H200": "; ".join(fp8),
        "by name": "yes" if is_first and module in known else "-",
        "gain": gains.get(module, "-") if is_first else "-",
        "tested": tower["tested"],
        "stock 0.25.1": tower.get("stock", ""),
    }


def _fp8(head_dim: int) -> str:
    """Say from which length on the bundled table attends in FP8, for a head dim."""
    from vllm_flashinfer_vit.choices.table import BUNDLED, read
    from vllm_flashinfer_vit.kernels.catalog import KERNELS

    table = read(BUNDLED, _GPU)
    assert table is not None
    parts = table.classes.get(f"float8_e4m3fn/{head_dim}", ())
    if not parts or not KERNELS[parts[-1].kernel].is_fp8:
        return "-"
    above = f", above {parts[-2].max_len}" if len(parts) > 1 else ""
    return f"`{parts[-1].kernel}`{above}"


def _known() -> dict[str, bool]:
    """Return the modules that `encode` knows, and whether graphs have exact sizes."""
    from vllm_flashinfer_vit.graphs.manager import EXACT
    from vllm_flashinfer_vit.towers.spec import FAMILIES

    return {one.module: one.model in EXACT for one in FAMILIES.values()}


def _gains() -> Iterator[tuple[str, str]]:
    """Yield modules and the geometric means of what was measured last of a model."""
    from vllm_flashinfer_vit.towers.spec import FAMILIES, NAMED_MODELS

    modules = {name: stack.module for name, stack in STACKS.items()}
    modules |= {name: FAMILIES[kind].module for name, (kind, _) in NAMED_MODELS.items()}
    rows = chosen_rows.read(_RESULTS)
    newest = max((row["vllm"] for row in rows), key=_number)
    best = chosen_rows.Best([row for row in rows if row["vllm"] == newest])
    for model in best.models:
        if model not in modules or not best.mean(chosen_rows.PLUGIN, model):
            continue
        text = f"{best.mean(chosen_rows.PLUGIN, model)}x"
        if with_fp8 := best.mean(chosen_rows.PLUGIN_FP8, model):
            text += f", with FP8 attention {with_fp8}x"
        yield modules[model], text


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))

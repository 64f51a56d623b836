# SPDX-License-Identifier: Apache-2.0
"""docs/models.toml has a row for every encoder, and agrees with vLLM as installed."""

import ast
import csv
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from vllm_flashinfer_vit.machine.versions import TESTED_VLLM
from vllm_flashinfer_vit.patches.fingerprints import known
from vllm_flashinfer_vit.towers.spec import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests" / "integration")]

import model_tables  # noqa: E402
from _encoders import CROSS, DENSE, PACKED, WHISPER  # noqa: E402

# Names are of one of the two: Molmo2 has an encoder here, and pooling elsewhere.
ENCODERS = {
    "served": {**PACKED, **DENSE},
    "outside": {**CROSS, "whisper": WHISPER},
}
ROWS = [
    (kind, tower) for kind, towers in model_tables.read().items() for tower in towers
]
SERVED = [tower for kind, tower in ROWS if kind != "outside"]
VLLM = Version(version("vllm")).base_version
LAYER = "MMEncoderAttention"
by_row = pytest.mark.parametrize(
    "tower",
    [tower for _, tower in ROWS],
    ids=[f"{tower['module']}-{tower.get('part')}" for _, tower in ROWS],
)
as_tested = pytest.mark.skipif(
    VLLM not in TESTED_VLLM, reason="rows are of the releases that were tested"
)


def modules(towers: list[Any]) -> set[str]:
    return {model_tables.full_name(tower["module"]) for tower in towers}


def release_range(tower: Any) -> tuple[str, str]:
    return tower.get("since", TESTED_VLLM[0]), tower.get("until", TESTED_VLLM[1])


def is_in(tower: Any) -> bool:
    since, until = map(Version, release_range(tower))
    return since <= Version(VLLM) <= until


@cache
def sources() -> dict[str, str]:
    """Return vLLM's models as installed, by their names below `vllm`."""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    paths = (
        path
        for folder in ("model_executor/models", "models")
        for path in (package / folder).rglob("*.py")
    )
    return {
        ".".join(path.relative_to(package).with_suffix("").parts): path.read_text(
            encoding="utf-8"
        )
        for path in paths
    }


def builds_layer(source: str) -> bool:
    """Whether a module calls the layer's class, hands it on or derives from it."""
    # Parsing all of vLLM's models takes seconds.
    if LAYER not in source:
        return False

    def used(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.Call):
            yield node.func
        elif isinstance(node, ast.keyword):
            yield node.value
        elif isinstance(node, ast.ClassDef):
            yield from node.bases

    return any(
        isinstance(found, ast.Name) and found.id == LAYER
        for node in ast.walk(ast.parse(source))
        for found in used(node)
    )


@cache
def captured() -> set[str]:
    """Return the names of vLLM's classes whose encoder graphs it captures."""
    bases: dict[str, set[str]] = {}
    found = {"SupportsEncoderCudaGraph"}
    unread = dict(sources())
    # A class derives from one that its module names.
    while names := [n for n, text in unread.items() if any(f in text for f in found)]:
        for node in (
            n for name in names for n in ast.walk(ast.parse(unread.pop(name)))
        ):
            if isinstance(node, ast.ClassDef):
                of = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                bases.setdefault(node.name, set()).update(of)
        while more := {name for name, of in bases.items() if of & found} - found:
            found |= more
    return found


@pytest.mark.parametrize("where", ENCODERS)
def test_every_encoder_that_is_built_in_tests_is_in_one_row(where: str) -> None:
    named = [
        (name, model_tables.full_name(tower["module"]))
        for kind, tower in ROWS
        for name in tower.get("encoders", ())
        if (kind == "outside") == (where == "outside")
    ]
    built = [(name, encoder.module) for name, encoder in ENCODERS[where].items()]
    assert sorted(named) == sorted(built)


def test_modules_with_a_block_patch_have_a_row_that_says_programs() -> None:
    patched = model_tables.with_block_patch()
    assert len(patched) > 10
    knows = model_tables._Known()
    runs = [tower for tower in SERVED if knows.runs_programs(tower)]
    assert patched <= modules(runs)
    # The file says what runs, and why, where no program does, and only there.
    assert [tower for tower in SERVED if "blocks" not in tower] == runs


def test_families_and_what_is_measured_have_one_row() -> None:
    whole = [tower["module"] for tower in SERVED if "part" not in tower]
    assert {family.module for family in FAMILIES.values()} <= set(whole)
    parts = {f"{t['module']} ({t['part']})" for t in SERVED if "part" in t}
    assert set(model_tables.built()) <= set(whole) | parts
    assert len(whole) == len(set(whole))


def test_the_file_does_not_repeat_head_dims_that_the_code_knows() -> None:
    known_dims = model_tables.built()
    for tower in SERVED:
        part = f" ({tower['part']})" if "part" in tower else ""
        dims = {dim for _, dim in known_dims.get(tower["module"] + part, ())}
        assert not dims & set(tower.get("head_dims", ())), tower["module"]


@by_row
def test_releases_were_read(tower: Any) -> None:
    named = {*release_range(tower), *tower.get("graphs", {}).values()}
    assert named <= set(known().releases)


@as_tested
@by_row
def test_modules_are_in_this_vllm(tower: Any) -> None:
    source = sources().get(model_tables.full_name(tower["module"]))
    if is_in(tower):
        assert source is not None
    else:
        assert source is None or not builds_layer(source)


@as_tested
def test_every_module_that_builds_the_layer_has_a_row() -> None:
    building = {name for name, source in sources().items() if builds_layer(source)}
    assert len(building) > 30
    assert building <= modules([tower for _, tower in ROWS if is_in(tower)])


@as_tested
@by_row
def test_graphs_are_captured_by_this_vllm(tower: Any) -> None:
    for name, since in tower.get("graphs", {}).items() if is_in(tower) else ():
        if tower["module"] == "glm_ocr" and Version(since) > Version(VLLM):
            # It derives from what is captured, and stops there.
            continue
        assert (name in captured()) == (Version(since) <= Version(VLLM)), name


def row(
    vllm: str, model: str, provider: str, ms: float, mode: str = "graph"
) -> dict[str, str]:
    return {
        **{"vllm": vllm, "model": model, "provider": provider, "p50_ms": str(ms)},
        **{"mode": mode, "case": "a", "dtype": "bf16", "commit": vllm},
        "command": "",
    }


def timed(
    vllm: str, model: str, ours: float, mode: str = "graph"
) -> list[dict[str, str]]:
    """Rows of stock and of this package, which stock's 8 ms are compared with."""
    times = {"stock-flash_attn": 8.0, "plugin": ours}
    return [row(vllm, model, provider, ms, mode) for provider, ms in times.items()]


def test_gains_are_of_the_newest_vllm_with_rows() -> None:
    rows = [
        *timed("0.33.0", "Qwen/A-7B-Instruct", 4.0),
        *timed("0.4.0", "Qwen/A-7B-Instruct", 5.0),
        *timed("0.4.0", "B", 8.0),
    ]
    assert model_tables.gains(rows) == {
        "Qwen/A-7B-Instruct": "A-7B 2.00",
        "B": "B 1.00",
    }


def test_gains_are_without_graphs_only_where_stock_has_none() -> None:
    rows = [
        *timed("0.4.0", "A", 4.0),
        *timed("0.33.0", "A", 2.0, "eager"),
        *timed("0.33.0", "B", 2.0, "eager"),
        row("0.33.0", "B", "plugin", 1.0),
    ]
    assert model_tables.gains(rows) == {"A": "A 2.00", "B": "B 4.00 without graphs"}


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_another_gpu_is_named_and_shown_only_for_models_without_rows_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_tables, "RESULTS", tmp_path)
    rows = [
        timed("0.33.0", "A", 4.0),
        [*timed("0.33.0", "A", 5.0), *timed("0.33.0", "B", 2.0)],
    ]
    for gpu, of_gpu in zip(model_tables.GPUS.values(), rows, strict=True):
        write(tmp_path / gpu / "encoder.csv", of_gpu)
    assert model_tables.measured() == {"A": "A 2.00", "B": "H100: B 4.00"}


def test_rows_without_graphs_stand_in_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_tables, "RESULTS", tmp_path)
    for gpu in model_tables.GPUS.values():
        write(tmp_path / gpu / "encoder.csv", timed("0.33.0", "A", 4.0))
    eager = [*timed("0.33.0", "A", 1.0), *timed("0.33.0", "B", 2.0, "eager")]
    write(tmp_path / model_tables.GPUS[""] / "eager.csv", eager)
    assert model_tables.measured() == {"A": "A 2.00", "B": "B 4.00 without graphs"}


def cells(table: str, module: str) -> dict[str, str]:
    lines = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in table.splitlines()
    ]
    (found,) = (line for line in lines if line[0] == f"`{module}`")
    return dict(zip(lines[0], found, strict=True))


def test_cells_are_of_the_code_and_the_rows() -> None:
    qwen = cells(model_tables.packed(), "qwen2_5_vl")
    assert qwen["blocks"] == "programs"
    assert qwen["encoder graphs"] == "exact: Qwen2_5_VL"
    assert "Qwen2.5-VL-72B" in qwen["by name"]
    assert qwen["gain"].startswith("Qwen2.5-VL-7B 1.")
    assert qwen["FP8 on an H200"] == "from 1025 tokens"
    kimi = cells(model_tables.packed(), "kimi_k25_vit")
    assert kimi["head dims"] == "72, 128"
    assert kimi["by name"] == "Kimi-K2.5, Kimi-K3"
    assert kimi["FP8 on an H200"] == "72: from 1025 tokens; 128: from 2049 tokens"
    assert kimi["encoder graphs"].startswith("exact: KimiK25 from 0.28.0")
    gemma = cells(model_tables.transformers(), "gemma4_mm")
    assert gemma["head dims"] == "64, 72" and "`gemma4_blocks`" in gemma["blocks"]

# SPDX-License-Identifier: Apache-2.0
"""docs/models.toml says of every encoder what the tests and the code do."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_flashinfer_vit.plugin import all_patches
from vllm_flashinfer_vit.towers.spec import FAMILIES, NAMED_MODELS

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests" / "integration")]

import model_tables  # noqa: E402
from _encoders import DENSE, PACKED  # noqa: E402

TOWERS = {
    (tower["module"], tower.get("part")): tower
    for kind in ("packed", "dense")
    for tower in model_tables.read()[kind]
}
# Built by name or checkpoint in tests of their own.
QWEN = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}


def test_every_encoder_that_is_tested_has_one_row():
    named = [name for tower in TOWERS.values() for name in tower.get("encoders", ())]
    assert sorted(named) == sorted([*PACKED, *DENSE])


def test_programs_are_where_a_test_counts_them():
    for (module, _), tower in TOWERS.items():
        encoders = [{**PACKED, **DENSE}[name] for name in tower.get("encoders", ())]
        runs = module in QWEN or any(encoder.programs for encoder in encoders)
        assert tower.get("blocks", False) == runs, module


def test_modules_with_a_block_patch_have_programs():
    patched = {
        patch.target.partition(":")[0].rpartition(".")[2]
        for patch in all_patches()
        if patch.name.endswith("-blocks")
    }
    assert len(patched) > 10
    with_blocks = {module for (module, _), one in TOWERS.items() if one.get("blocks")}
    assert patched <= with_blocks


def test_named_families_have_a_row():
    modules = {module for module, _ in TOWERS}
    assert {family.module for family in FAMILIES.values()} <= modules
    head, _, *lines = (line.split("|") for line in model_tables.packed().splitlines())
    at = head.index(" by name ")
    named = [line for line in lines if line[at] == " yes "]
    assert len(named) == len({family for family, _ in NAMED_MODELS.values()})


@pytest.mark.parametrize(("module", "part"), TOWERS)
def test_modules_exist(module, part):
    if part is not None and part.startswith(("not ", "until ")):
        pytest.skip(f"{module}: {part}")
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    places = package / "model_executor" / "models" / module, package / module
    assert any(path.with_suffix(".py").exists() or path.is_dir() for path in places)


def test_gains_are_of_rows():
    (line,) = (
        line
        for line in model_tables.packed().splitlines()
        if line.startswith("| `qwen2_5_vl`")
    )
    assert "x, with FP8 attention " in line
    assert "`hopper_fp8`, above 2048" in line and "exact sizes" in line

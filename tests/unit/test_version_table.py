# SPDX-License-Identifier: Apache-2.0
"""The table of docs/compatibility.md: it stands on rows, records and what was read."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from _benchmarks import BENCHMARKS
from _canary import RUN, canary

import chosen_rows
from vllm_flashinfer_vit.patches import fingerprints

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import version_table  # noqa: E402

RECORD = "../tests/results/0.99.0.json"
PASSED = "2 tests pass, 2 are skipped"
PASSES = replace(RUN, vllm="0.99.0", tests=replace(RUN.tests, failed={}), problems=())


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch):
    """Return the cells of a release, as it was read and by what was recorded."""

    def of(run: canary.Run | None = None, **read) -> list[str]:
        releases = dict(fingerprints.known().releases)
        releases["0.99.0"] = replace(releases["0.33.0"], **read)
        known = replace(fingerprints.known(), releases=releases)
        monkeypatch.setattr(fingerprints, "known", lambda: known)
        runs = {run.vllm: run} if run else {}
        monkeypatch.setattr(canary, "recorded", lambda: runs)
        line = version_table.compatibility().splitlines()[-1]
        return [cell.strip() for cell in line.strip("|").split("|")]

    return of


def test_what_was_measured_has_rows() -> None:
    paths = (BENCHMARKS / "results").glob("*/*.csv")
    found = {row["vllm"] for path in paths for row in chosen_rows.read(path)}
    lines = version_table.compatibility().splitlines()[2:]
    measured = {line.split("|")[1].strip() for line in lines if "measured" in line}
    assert measured == found


def test_each_record_has_its_state_in_the_table() -> None:
    lines = version_table.compatibility().splitlines()[2:]
    state_of = {
        line.split("|")[1].strip(): line.split("|")[-2].strip() for line in lines
    }
    runs = canary.recorded()
    for version, state in state_of.items():
        run = runs.get(version)
        assert ("tested on the CPU" in state) == (run is not None and not run.failures)


def test_a_release_without_a_package_has_a_dash_in_its_place(cells) -> None:
    found = cells(libraries={"quack-kernels": "==0.7", "torch": "==2.15"})
    assert found[3:5] == ["all but cudnn, cudnn_fp8", "2.15, -, 0.7"]


def test_a_release_without_a_record_was_read(cells) -> None:
    left_out = ("glm_ocr-prepared",)
    _, _, patches, kernels, _, state = cells(left_out=left_out)
    assert patches.endswith("; not glm_ocr-prepared") and kernels == "all"
    assert state == "read"


def test_a_record_says_what_passed_and_which_patches_fit(cells) -> None:
    left_out = {"glm_ocr-prepared": "it differs", "gone": "no such patch any more"}
    run = replace(PASSES, patches=canary.Fit(50, left_out))
    _, _, patches, kernels, _, state = cells(run, left_out=("pixtral_hf-blocks",))
    assert patches.endswith("; not pixtral_hf-blocks, glm_ocr-prepared")
    assert kernels == "all"
    assert state == f"[tested on the CPU]({RECORD}): {PASSED}"


def test_a_record_with_failures_is_not_tested(cells) -> None:
    for run in (
        replace(PASSES, tests=RUN.tests),
        replace(PASSES, problems=("no vLLM", "no torch")),
    ):
        assert cells(run)[-1] == f"[fails on the CPU]({RECORD}): 2; {PASSED}"


def test_a_record_has_the_libraries_that_kernels_ran_on(cells) -> None:
    run = replace(PASSES, stack={**PASSES.stack, "flashinfer": "0.9"}, flash_attn=(2,))
    assert cells(run)[3] == "all but cudnn, cudnn_fp8, flash_attn_4"


def test_a_release_that_is_measured_says_both(
    cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_table, "_measured", lambda: {"0.99.0": {"B", "A"}})
    assert cells()[-1] == "measured: A, B"
    tested = f"[tested on the CPU]({RECORD}): {PASSED}"
    assert cells(PASSES)[-1] == f"measured: A, B; {tested}"

# SPDX-License-Identifier: Apache-2.0
"""Versions: which vLLM is served, and how they are written."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vllm_flashinfer_vit.machine import versions
from vllm_flashinfer_vit.machine.versions import (
    ENV_V2_RUNNER,
    TESTED_VLLM,
    check_vllm,
    format_cudnn,
    newer_note,
    runner_note,
    vllm_version,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "version",
    [
        "0.25.1",
        "0.25.1rc2",
        "0.25.1.post1",
        "0.25.1+cu129",
        "0.28.0",
        "0.33.0",
        "0.33.0rc1",
        "0.33.0.dev7+gabc",
    ],
)
def test_what_was_tested_is_served(version: str) -> None:
    assert check_vllm(version) is None
    assert newer_note(version) is None


@pytest.mark.parametrize(
    "version", ["0.33.1", "0.33.1.dev300+gabc", "0.34.0", "0.34.0rc1", "1.0.0"]
)
def test_what_is_newer_is_served_and_told(version: str) -> None:
    assert check_vllm(version) is None
    note = newer_note(version)
    assert note is not None
    assert version in note
    assert "0.25.1 and 0.33.0" in note


@pytest.mark.parametrize(
    "version", ["0.25.0", "0.24.0", "0.20.2", "0.1.dev1+g0123abc", "unknown"]
)
def test_what_is_older_is_refused_and_told_the_oldest(version: str) -> None:
    problem = check_vllm(version)
    assert problem is not None
    assert version in problem
    assert "0.25.1 and newer" in problem


def test_the_package_metadata_agrees() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    vllm = next(
        r for r in map(Requirement, project["dependencies"]) if r.name == "vllm"
    )
    for version in ("0.24.0", "0.25.0", "0.25.1", "0.33.0", "0.33.1", "0.34.0"):
        assert vllm.specifier.contains(version) == (check_vllm(version) is None)


def test_ci_tests_what_counts_as_tested() -> None:
    oldest, newest = TESTED_VLLM
    assert f"VLLM ?= {newest}\n" in (ROOT / "Makefile").read_text()
    assert f" VLLM={oldest}\n" in (ROOT / ".ci" / "run").read_text()
    for version in TESTED_VLLM:
        assert (ROOT / "constraints" / f"vllm-{version}.txt").exists()


@pytest.mark.parametrize(
    ("number", "text"), [(91900, "9.19.0"), (91002, "9.10.2"), (None, "none")]
)
def test_format_cudnn(number: int | None, text: str) -> None:
    assert format_cudnn(number) == text


@pytest.mark.parametrize(
    ("vllm", "env", "noted"),
    [
        ("0.25.1", {}, True),
        ("0.25.1", {ENV_V2_RUNNER: "1"}, True),
        ("0.25.1", {ENV_V2_RUNNER: "0"}, False),
        ("0.25.1", {ENV_V2_RUNNER: " False "}, False),
        ("0.27.1", {}, True),
        ("0.28.0", {}, False),
        ("0.33.0", {ENV_V2_RUNNER: "1"}, False),
    ],
)
def test_the_runner_note_is_only_for_versions_that_it_is_true_for(
    vllm: str, env: dict[str, str], noted: bool
) -> None:
    assert (runner_note(vllm, env) is not None) is noted


def test_the_runner_note_says_who_chose_the_runner() -> None:
    assert "its default for dense models" in str(runner_note("0.25.1", {}))
    assert f"set by {ENV_V2_RUNNER}" in str(runner_note("0.25.1", {ENV_V2_RUNNER: "1"}))


def test_the_installed_vllm_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def found(package: str) -> str:
        read.append(package)
        return "0.33.0"

    monkeypatch.setattr(versions, "version", found)
    vllm_version.cache_clear()
    try:
        assert [vllm_version() for _ in range(3)] == ["0.33.0"] * 3
    finally:
        vllm_version.cache_clear()
    assert read == ["vllm"]

# SPDX-License-Identifier: Apache-2.0
"""Versions: the window of vLLM, and how they are written."""

import pytest

from vllm_flashinfer_vit.machine.versions import (
    ENV_V2_RUNNER,
    check_vllm,
    format_cudnn,
    runner_note,
)


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
        "0.33.1",
    ],
)
def test_supported_vllm(version: str) -> None:
    assert check_vllm(version) is None


@pytest.mark.parametrize(
    "version",
    [
        "0.25.0",
        "0.24.0",
        "0.20.2",
        "0.1.dev1+g0123abc",
        "0.33.1.dev300+gabc",
        "0.34.0",
        "0.34.0rc1",
        "1.0.0",
        "unknown",
    ],
)
def test_unsupported_vllm_is_told_the_window(version: str) -> None:
    problem = check_vllm(version)
    assert problem is not None
    assert version in problem
    assert "0.25.1 to 0.33.0" in problem


def test_window_agrees_with_the_package_metadata() -> None:
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    lines = requires("vllm-flashinfer-vit") or []
    vllm = next(r for r in map(Requirement, lines) if r.name == "vllm")
    for version in ("0.24.0", "0.25.0", "0.25.1", "0.33.0", "0.33.1", "0.34.0"):
        assert vllm.specifier.contains(version) == (check_vllm(version) is None)


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

# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of settings that are bad or misspelt."""

from collections.abc import Mapping
from typing import Any

import pytest
from _doctor import PATCH, PLUGIN, judge, text_of
from _stacks import STACK
from rich.console import Console

from vllm_flashinfer_vit.commands import doctor
from vllm_flashinfer_vit.settings import (
    ENV_DISABLE_PATCHES,
    ENV_FP8_SCALES,
    ENV_KERNEL,
    ENV_STRICT,
    ENV_TUNED_DIR,
    Settings,
    unknown_variables,
)


@pytest.mark.parametrize(
    ("env", "what", "remedy"),
    [
        pytest.param(
            {ENV_KERNEL: "fa9"},
            f"{ENV_KERNEL}='fa9': use one of auto",
            f"unset {ENV_KERNEL}",
            id="kernel",
        ),
        pytest.param(
            {ENV_STRICT: "yes"},
            f"{ENV_STRICT}='yes': use 0 or 1",
            f"unset {ENV_STRICT}",
            id="strict",
        ),
        pytest.param(
            {ENV_DISABLE_PATCHES: "qwen9-fused,typo"},
            "names 'typo', which is no patch or optimisation",
            "qwen9-fused",
            id="patch",
        ),
        pytest.param(
            {"VLLM_PLUGINS": "other"},
            "VLLM_PLUGINS='other' keeps vLLM from loading flashinfer_vit",
            "export VLLM_PLUGINS=other,flashinfer_vit",
            id="excluded",
        ),
        pytest.param(
            {"VLLM_PLUGINS": ""},
            "keeps vLLM from loading flashinfer_vit",
            "export VLLM_PLUGINS=flashinfer_vit",
            id="excluded-all",
        ),
    ],
)
def test_a_bad_environment_is_a_problem(
    env: dict[str, str], what: str, remedy: str
) -> None:
    report = judge(env=env)
    assert not report.ok
    (problem,) = report.problems
    assert what in problem.what
    assert problem.remedy is not None
    assert remedy in problem.remedy


def test_an_allowed_plugin_is_no_problem() -> None:
    assert judge(env={"VLLM_PLUGINS": "a,flashinfer_vit"}).problems == ()


def test_invalid_settings_are_null_in_the_document() -> None:
    assert judge(env={ENV_STRICT: "yes"}).to_json()["settings"] is None


def test_a_bad_setting_does_not_hide_the_state_of_the_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {}

    def run(report: str, *, env: Mapping[str, str], **_: Any) -> tuple[Any, None]:
        seen.update(env)
        return PLUGIN, None

    monkeypatch.setattr(doctor, "run_isolated", run)
    monkeypatch.setattr(doctor, "probe", lambda **_: STACK)
    env = {
        ENV_KERNEL: "fa9",
        ENV_FP8_SCALES: "static",
        ENV_TUNED_DIR: "",
        ENV_DISABLE_PATCHES: "qwen9-fused",
        "VLLM_FLASHINFER_VIT_KERNAL": "1",
        "HOME": "/home/me",
    }
    report = doctor.examine(Console(quiet=True), env)
    assert Settings.from_env(seen).disabled_patches == {"qwen9-fused"}
    assert unknown_variables(seen) == []
    assert seen["HOME"] == "/home/me"
    assert report.patches == (PATCH,)
    assert [problem.what.split("=")[0].split()[0] for problem in report.problems] == [
        ENV_KERNEL,
        ENV_TUNED_DIR,
        ENV_FP8_SCALES,
        "VLLM_FLASHINFER_VIT_KERNAL",
    ]


def test_all_bad_settings_are_shown_at_once() -> None:
    env = {ENV_KERNEL: "fa9", ENV_STRICT: "yes", "VLLM_FLASHINFER_VIT_KERNAL": "x"}
    report = judge(env=env)
    assert [problem.fatal for problem in report.problems] == [True, True, False]
    text = text_of(report)
    assert "VLLM_FLASHINFER_VIT_KERNEL='fa9': use one of" in text
    assert "VLLM_FLASHINFER_VIT_STRICT='yes': use 0 or 1" in text
    assert "VLLM_FLASHINFER_VIT_KERNAL has no effect" in text
    assert f"did you mean {ENV_KERNEL}?" in " ".join(text.split())
    assert "2 problems" in report.summary


def test_a_bad_setting_does_not_hide_a_misspelt_patch() -> None:
    names = "quack_mlp,typo"
    report = judge(env={ENV_STRICT: "yes", ENV_DISABLE_PATCHES: names})
    strict, patch = report.problems
    assert f"{ENV_STRICT}='yes'" in strict.what
    assert "names 'typo', which is no patch or optimisation" in patch.what
    states = {row["name"]: row["state"] for row in report.optimisations}
    assert states["quack_mlp"] == "disabled"


def test_a_misspelt_patch_is_told_the_nearest_name() -> None:
    (problem,) = judge(env={ENV_DISABLE_PATCHES: "qwen9_fused"}).problems
    assert problem.remedy is not None
    assert "perhaps qwen9-fused was meant" in problem.remedy


def test_a_misspelt_optimisation_is_told_the_nearest_name() -> None:
    (problem,) = judge(env={ENV_DISABLE_PATCHES: "quack_mlps"}).problems
    assert problem.remedy is not None
    assert "perhaps quack_mlp was meant" in problem.remedy


def test_what_an_engine_does_not_leave_out_is_a_problem() -> None:
    """`plugin.apply_model_patches` raises on it."""
    rows = [{**PATCH, "name": name} for name in ("select-cuda", "qwen9-fused")]
    plugin = {**PLUGIN, "patches": rows}
    report = judge(plugin=plugin, env={ENV_DISABLE_PATCHES: "select-cuda,qwen9-fused"})
    (problem,) = report.problems
    assert "names 'select-cuda', which is no patch or" in problem.what
    assert "select-cuda" not in (problem.remedy or "")
    assert problem.fatal

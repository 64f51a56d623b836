# SPDX-License-Identifier: Apache-2.0
"""Settings: defaults, valid values, and errors that list them."""

import dataclasses
from pathlib import Path

import pytest

from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.settings import (
    ENV_DISABLE_PATCHES,
    ENV_FIX_GRAPH_PADDING,
    ENV_FP8_SCALES,
    ENV_FP8_SKIP_LAYERS,
    ENV_KERNEL,
    ENV_STRICT,
    ENV_TUNED_DIR,
    VARIABLES,
    Settings,
    Variable,
    bad_values,
    is_strict,
    unknown_variables,
)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert Settings.from_env({}) == Settings()
    assert Settings() == Settings(
        kernel=None,
        strict=False,
        disabled_patches=frozenset(),
        tuned_dir=Path.home() / ".config/vllm-flashinfer-vit",
        fp8_scales=None,
        fp8_skip_layers=frozenset(),
        fix_graph_padding=False,
    )


def test_each_setting_has_one_variable() -> None:
    fields = [field.name for field in dataclasses.fields(Settings)]
    assert [variable.field for variable in VARIABLES] == fields
    assert len({variable.name for variable in VARIABLES}) == len(fields)


def test_all_bad_values_are_named_at_once() -> None:
    env = {ENV_KERNEL: "fa9", ENV_STRICT: "yes", ENV_FP8_SCALES: "auto"}
    with pytest.raises(ValueError) as caught:
        Settings.from_env(env)
    text = str(caught.value)
    assert f"{ENV_KERNEL}='fa9': use one of auto, cudnn" in text
    assert f"; {ENV_STRICT}='yes': use 0 or 1" in text
    assert ENV_FP8_SCALES not in text
    problems = bad_values(env)
    assert [problem.remedy for problem in problems] == [
        f"unset {ENV_KERNEL}",
        f"unset {ENV_STRICT}",
    ]
    assert all(problem.fatal for problem in problems)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("VLLM_FLASHINFER_VIT_KERNAL", f"did you mean {ENV_KERNEL}?"),
        ("VLLM_FLASHINFER_VIT_FP8_SCALE", f"did you mean {ENV_FP8_SCALES}?"),
        ("VLLM_FLASHINFER_VIT_DISABLED_PATCHES", f"mean {ENV_DISABLE_PATCHES}?"),
        ("vllm_flashinfer_vit_strict", f"did you mean {ENV_STRICT}?"),
        ("VLLM_FLASHINFER_VIT_", "the names are "),
        ("VLLM_FLASHINFER_VIT_XYZZY", "the names are "),
    ],
)
def test_a_variable_that_does_not_exist_is_named(name: str, advice: str) -> None:
    env = {name: "1", "VLLM_PLUGINS": "a", **{v.name: "?" for v in VARIABLES}}
    (problem,) = unknown_variables(env)
    assert problem.what.startswith(f"{name} has no effect")
    assert advice in problem.what
    assert problem.remedy == f"unset {name}"
    assert not problem.fatal
    # An engine warns of it; what is known holds.
    assert Settings.from_env({name: "1", ENV_KERNEL: "triton"}).kernel == "triton"


def test_the_names_are_listed_where_none_is_near() -> None:
    (problem,) = unknown_variables({"VLLM_FLASHINFER_VIT_XYZZY": "1"})
    for variable in VARIABLES:
        assert variable.name in problem.what


def test_strict_is_known_while_other_settings_are_bad() -> None:
    assert is_strict({ENV_STRICT: "1", ENV_KERNEL: "fa9"})
    assert not is_strict({ENV_STRICT: "0"})
    assert not is_strict({})


def test_the_settings_as_json() -> None:
    env = {
        ENV_FP8_SKIP_LAYERS: "31,0",
        ENV_TUNED_DIR: "/tuned",
        ENV_FIX_GRAPH_PADDING: "1",
    }
    assert Settings.from_env(env).to_json() == {
        "kernel": "auto",
        "strict": False,
        "disabled_patches": [],
        "tuned_dir": "/tuned",
        "fp8_scales": "auto",
        "fp8_skip_layers": ["0", "31"],
        "fix_graph_padding": True,
    }


def test_auto_means_no_forced_kernel() -> None:
    assert Settings.from_env({ENV_KERNEL: "auto"}).kernel is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_can_be_forced(kernel: str) -> None:
    assert Settings.from_env({ENV_KERNEL: kernel}).kernel == kernel


@pytest.mark.parametrize(("text", "strict"), [("0", False), ("1", True)])
def test_strict(text: str, strict: bool) -> None:
    assert Settings.from_env({ENV_STRICT: text}).strict is strict


def test_disabled_patches_are_split_and_stripped() -> None:
    settings = Settings.from_env({ENV_DISABLE_PATCHES: " a, b,,a "})
    assert settings.disabled_patches == {"a", "b"}


@pytest.mark.parametrize("bad", ["", "fa3", "CUDNN", "cudnn "])
def test_bad_kernel_names_the_variable_and_the_good_values(bad: str) -> None:
    with pytest.raises(ValueError, match=ENV_KERNEL) as caught:
        Settings.from_env({ENV_KERNEL: bad})
    assert repr(bad) in str(caught.value)
    for name in ("auto", *KERNELS):
        assert name in str(caught.value)


@pytest.mark.parametrize("bad", ["", "true", "2"])
def test_bad_strict_names_the_variable_and_the_good_values(bad: str) -> None:
    with pytest.raises(ValueError, match=f"{ENV_STRICT}.*use 0 or 1"):
        Settings.from_env({ENV_STRICT: bad})


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({}, "/home/me/.config/vllm-flashinfer-vit"),
        ({"XDG_CONFIG_HOME": ""}, "/home/me/.config/vllm-flashinfer-vit"),
        ({"XDG_CONFIG_HOME": "/cfg"}, "/cfg/vllm-flashinfer-vit"),
        ({"XDG_CONFIG_HOME": "/cfg", ENV_TUNED_DIR: "/mine"}, "/mine"),
        ({ENV_TUNED_DIR: "~/mine"}, "/home/me/mine"),
    ],
)
def test_the_folder_of_tuned_choices(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], folder: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert Settings.from_env(env).tuned_dir == Path(folder)


def test_an_empty_folder_of_tuned_choices_is_refused() -> None:
    with pytest.raises(ValueError, match=f"{ENV_TUNED_DIR}='': use the path"):
        Settings.from_env({ENV_TUNED_DIR: ""})


@pytest.mark.parametrize(
    ("text", "method"), [("auto", None), ("block", "block"), ("dynamic", "dynamic")]
)
def test_the_method_of_fp8_scales(text: str, method: str | None) -> None:
    assert Settings.from_env({ENV_FP8_SCALES: text}).fp8_scales == method


@pytest.mark.parametrize("bad", ["", "static", "Block"])
def test_a_bad_method_of_fp8_scales(bad: str) -> None:
    with pytest.raises(ValueError, match=f"{ENV_FP8_SCALES}.*auto, block, dynamic"):
        Settings.from_env({ENV_FP8_SCALES: bad})


def test_fp8_layers_to_skip_are_split_and_stripped() -> None:
    settings = Settings.from_env({ENV_FP8_SKIP_LAYERS: "0, 31,visual.blocks.5,"})
    assert settings.fp8_skip_layers == {"0", "31", "visual.blocks.5"}


def test_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_KERNEL, "reference")
    assert Settings.from_env().kernel == "reference"


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().strict = True  # type: ignore[misc]


def test_fix_graph_padding() -> None:
    assert not Settings.from_env({}).fix_graph_padding
    assert Settings.from_env({ENV_FIX_GRAPH_PADDING: "1"}).fix_graph_padding
    with pytest.raises(ValueError, match=f"{ENV_FIX_GRAPH_PADDING}='yes': use 0 or 1"):
        Settings.from_env({ENV_FIX_GRAPH_PADDING: "yes"})


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_every_variable_is_documented(variable: Variable) -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    rows = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert f"\n| `{variable.name}` |" in rows
    assert variable.summary.endswith(".")

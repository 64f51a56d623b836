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
    Settings,
)


def test_defaults() -> None:
    assert Settings.from_env({}) == Settings(None, False, frozenset())


def test_auto_means_no_forced_kernel() -> None:
    assert Settings.from_env({ENV_KERNEL: "auto"}).kernel is None


@pytest.mark.parametrize("kernel", tuple(KERNELS))
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
    for name in ("auto", *tuple(KERNELS)):
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

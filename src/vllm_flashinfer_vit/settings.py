# SPDX-License-Identifier: Apache-2.0
"""The plugin's settings: every environment variable, its default and its values."""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.machine.stack import Problem

ScaleMethod = Literal["block", "dynamic"]

SCALE_METHODS: tuple[ScaleMethod, ...] = get_args(ScaleMethod)

PREFIX = "VLLM_FLASHINFER_VIT_"

ENV_KERNEL = f"{PREFIX}KERNEL"
ENV_STRICT = f"{PREFIX}STRICT"
ENV_DISABLE_PATCHES = f"{PREFIX}DISABLE_PATCHES"
ENV_TUNED_DIR = f"{PREFIX}TUNED_DIR"
ENV_FP8_SCALES = f"{PREFIX}FP8_SCALES"
ENV_FP8_SKIP_LAYERS = f"{PREFIX}FP8_SKIP_LAYERS"
ENV_FIX_GRAPH_PADDING = f"{PREFIX}FIX_GRAPH_PADDING"

_AUTO = "auto"


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Its name.
        field: The attribute of `Settings` that it sets.
        values: The good values, for people, to follow "use".
        default: What holds without it, for people.
        summary: What it does, for people: one sentence, with its full stop.
        parse: Makes the attribute's value of a text, and raises ValueError on a bad
            one.
    """

    name: str
    field: str
    values: str
    default: str
    summary: str
    parse: Callable[[str], Any]


def _one_of(*names: str) -> Callable[[str], str | None]:
    """Accept `auto`, which is None, and names."""

    def parse(text: str) -> str | None:
        if text not in (_AUTO, *names):
            raise ValueError
        return None if text == _AUTO else text

    return parse


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _folder(text: str) -> Path:
    if not text:
        raise ValueError
    return Path(os.path.expanduser(text))


def _default_tuned_dir(env: Mapping[str, str] = os.environ) -> Path:
    return _folder(env.get("XDG_CONFIG_HOME") or "~/.config") / "vllm-flashinfer-vit"


VARIABLES: tuple[Variable, ...] = (
    Variable(
        name=ENV_KERNEL,
        field="kernel",
        values=f"one of {', '.join((_AUTO, *KERNELS))}",
        default=_AUTO,
        summary="Forces one kernel for every length that it takes. An FP8 kernel can "
        "be forced with FP8 attention only, and then no other kind.",
        parse=_one_of(*KERNELS),
    ),
    Variable(
        name=ENV_STRICT,
        field="strict",
        values="0 or 1",
        default="0",
        summary="1: an error where the plugin cannot serve a layer or a call, instead "
        "of a warning and vLLM's own kernel.",
        parse=_flag,
    ),
    Variable(
        name=ENV_DISABLE_PATCHES,
        field="disabled_patches",
        values="names of patches and optimisations, comma-separated",
        default="none",
        summary="Patches, and optimisations of all towers' blocks, that are left out; "
        "`vllm-flashinfer-vit doctor` lists all.",
        parse=_names,
    ),
    Variable(
        name=ENV_TUNED_DIR,
        field="tuned_dir",
        values="the path of a folder",
        default="$XDG_CONFIG_HOME/vllm-flashinfer-vit, or "
        "~/.config/vllm-flashinfer-vit without XDG_CONFIG_HOME",
        summary="Where `vllm-flashinfer-vit tune` keeps the choices that it measured.",
        parse=_folder,
    ),
    Variable(
        name=ENV_FP8_SCALES,
        field="fp8_scales",
        values=f"one of {', '.join((_AUTO, *SCALE_METHODS))}",
        default=_AUTO,
        summary="Scales of FP8 attention without a file of scales. block: one for each "
        "block of 128 tokens and head. dynamic: one for each tensor, from the last 16 "
        "passes. auto: what the layer's kernels take.",
        parse=_one_of(*SCALE_METHODS),
    ),
    Variable(
        name=ENV_FP8_SKIP_LAYERS,
        field="fp8_skip_layers",
        values="indices of blocks or names of layers, comma-separated",
        default="none",
        summary="Layers that keep the model's dtype while others attend in FP8; a name "
        "may also be of a module above them.",
        parse=_names,
    ),
    Variable(
        name=ENV_FIX_GRAPH_PADDING,
        field="fix_graph_padding",
        values="0 or 1",
        default="0",
        summary="1: encoder CUDA graphs are padded correctly with backends other than "
        "FLASHINFER, too.",
        parse=_flag,
    ),
)


@dataclass(frozen=True)
class Settings:
    """Settings of one engine process; `VARIABLES` says what sets them, and to what.

    Attributes:
        kernel: The kernel that every FLASHINFER layer uses, or None to choose by
            the tables of `choices`.
        strict: Whether a layer or call that the plugin cannot serve is an error
            instead of a logged fall-back to the kernel in vLLM's tree.
        disabled_patches: Names of patches that are not applied, and of what blocks do
            without.
        tuned_dir: Folder of the choices that were measured on this machine.
        fp8_scales: Scales of FP8 attention where no scale file is given, or None for
            what the layer's kernels take.
        fp8_skip_layers: Layers without FP8 attention.
        fix_graph_padding: Whether encoder CUDA graphs are padded correctly with every
            backend.
    """

    kernel: str | None = None
    strict: bool = False
    disabled_patches: frozenset[str] = frozenset()
    tuned_dir: Path = field(default_factory=_default_tuned_dir)
    fp8_scales: ScaleMethod | None = None
    fp8_skip_layers: frozenset[str] = frozenset()
    fix_graph_padding: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings from the environment.

        A variable that does not exist is no error here: see `unknown_variables`.

        Raises:
            ValueError: Variables hold values that are not valid; all are named.
        """
        if problems := bad_values(env):
            raise ValueError("; ".join(problem.what for problem in problems))
        values = {v.field: v.parse(env[v.name]) for v in VARIABLES if v.name in env}
        return cls(**{"tuned_dir": _default_tuned_dir(env), **values})

    def to_json(self) -> dict[str, Any]:
        """Return each setting, by its attribute's name, as JSON data."""
        return {v.field: _plain(getattr(self, v.field)) for v in VARIABLES}


def _plain(value: Any) -> Any:
    if value is None:
        return _AUTO
    if isinstance(value, frozenset):
        return sorted(value)
    return str(value) if isinstance(value, Path) else value


def bad_values(env: Mapping[str, str]) -> list[Problem]:
    """List the variables whose values are not valid, each with the valid ones."""
    problems = []
    for variable in VARIABLES:
        if (text := env.get(variable.name)) is None:
            continue
        try:
            variable.parse(text)
        except ValueError:
            what = f"{variable.name}={text!r}: use {variable.values}"
            problems.append(Problem(what, f"unset {variable.name}", True))
    return problems


def unknown_variables(env: Mapping[str, str] = os.environ) -> list[Problem]:
    """List the variables that look like this plugin's and are not.

    An engine names them in a warning: they may be of another version.
    """
    names = {variable.name for variable in VARIABLES}
    problems = []
    for name in sorted(env):
        if not name.upper().startswith(PREFIX) or name in names:
            continue
        # Without the prefix, which would make any two names alike.
        known = {known.removeprefix(PREFIX): known for known in names}
        rest = name.upper().removeprefix(PREFIX)
        near = difflib.get_close_matches(rest, known, n=1)
        advice = (
            f"did you mean {known[near[0]]}?"
            if near
            else f"the names are {', '.join(sorted(names))}"
        )
        shown = name if name.isprintable() else repr(name)
        what = (
            f"{shown} has no effect: vllm-flashinfer-vit has no variable of this name"
        )
        # A shell unsets no other names, such as those with a hyphen.
        remedy = f"unset {name}" if re.fullmatch(r"\w+", name, re.ASCII) else None
        problems.append(Problem(f"{what}; {advice}", remedy))
    return problems


def is_strict(env: Mapping[str, str] = os.environ) -> bool:
    """Whether errors shall be raised, even where other settings are not valid."""
    return env.get(ENV_STRICT) == "1"


def disabled_patches(env: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return `Settings.disabled_patches` alone, whatever other variables hold.

    That is quick enough to ask for each image.
    """
    return _names(env.get(ENV_DISABLE_PATCHES, ""))

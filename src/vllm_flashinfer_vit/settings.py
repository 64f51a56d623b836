# SPDX-License-Identifier: Apache-2.0
"""The plugin's settings: every environment variable, its default and its values."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, cast, get_args

from vllm_flashinfer_vit.kernels.catalog import KERNELS

ScaleMethod = Literal["block", "dynamic"]

SCALE_METHODS: tuple[ScaleMethod, ...] = get_args(ScaleMethod)

ENV_KERNEL = "VLLM_FLASHINFER_VIT_KERNEL"
ENV_STRICT = "VLLM_FLASHINFER_VIT_STRICT"
ENV_DISABLE_PATCHES = "VLLM_FLASHINFER_VIT_DISABLE_PATCHES"
ENV_TUNED_DIR = "VLLM_FLASHINFER_VIT_TUNED_DIR"
ENV_FIX_GRAPH_PADDING = "VLLM_FLASHINFER_VIT_FIX_GRAPH_PADDING"
ENV_FP8_SCALES = "VLLM_FLASHINFER_VIT_FP8_SCALES"
ENV_FP8_SKIP_LAYERS = "VLLM_FLASHINFER_VIT_FP8_SKIP_LAYERS"

_CONFIG_HOME = "~/.config"
_FOLDER = "vllm-flashinfer-vit"


@dataclass(frozen=True)
class Settings:
    """Settings of one engine process.

    Attributes:
        kernel: The kernel that every FLASHINFER layer uses, or None to choose by
            the tables of `choices`. `VLLM_FLASHINFER_VIT_KERNEL`, default `auto`.
        strict: Whether a layer or call that the plugin cannot serve is an error
            instead of a logged fall-back to the kernel in vLLM's tree.
            `VLLM_FLASHINFER_VIT_STRICT`, 0 or 1, default 0.
        disabled_patches: Names of model patches that are not applied, as
            `vllm-flashinfer-vit doctor` lists them.
            `VLLM_FLASHINFER_VIT_DISABLE_PATCHES`, comma-separated, default empty.
        tuned_dir: Folder of the choices that `vllm-flashinfer-vit tune` measured on
            this machine. `VLLM_FLASHINFER_VIT_TUNED_DIR`, default
            `$XDG_CONFIG_HOME/vllm-flashinfer-vit`, `~/.config` without that variable.
        fp8_scales: Scales of FP8 attention where no scale file is given: one for each
            block of 128 tokens and head, or one for each tensor from the last 16
            passes; None for what the layer's kernels take.
            `VLLM_FLASHINFER_VIT_FP8_SCALES`, `auto`, `block` or `dynamic`, default
            `auto`.
        fp8_skip_layers: Layers without FP8 attention: indices of blocks, or names of
            layers or of modules above them.
            `VLLM_FLASHINFER_VIT_FP8_SKIP_LAYERS`, comma-separated, default empty.
        fix_graph_padding: Whether encoder CUDA graphs are padded rightly with every
            backend, where FLASHINFER was not asked for.
            `VLLM_FLASHINFER_VIT_FIX_GRAPH_PADDING`, 0 or 1, default 0.
    """

    kernel: str | None = None
    strict: bool = False
    disabled_patches: frozenset[str] = frozenset()
    tuned_dir: Path = Path(os.path.expanduser(_CONFIG_HOME), _FOLDER)
    fp8_scales: ScaleMethod | None = None
    fp8_skip_layers: frozenset[str] = frozenset()
    fix_graph_padding: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings from the environment.

        Raises:
            ValueError: A variable holds a value that is not listed as valid.
        """
        kernel = env.get(ENV_KERNEL, "auto")
        if kernel not in ("auto", *KERNELS):
            good = ", ".join(("auto", *KERNELS))
            raise ValueError(f"{ENV_KERNEL}={kernel!r}: use one of {good}")
        strict = _flag(env, ENV_STRICT)
        fp8_scales = env.get(ENV_FP8_SCALES, "auto")
        if fp8_scales not in ("auto", *SCALE_METHODS):
            good = ", ".join(("auto", *SCALE_METHODS))
            raise ValueError(f"{ENV_FP8_SCALES}={fp8_scales!r}: use one of {good}")
        folder = env.get(ENV_TUNED_DIR)
        if folder is None:
            folder = os.path.join(env.get("XDG_CONFIG_HOME") or _CONFIG_HOME, _FOLDER)
        elif not folder:
            raise ValueError(f"{ENV_TUNED_DIR}='': use the path of a folder")
        return cls(
            kernel=None if kernel == "auto" else kernel,
            strict=strict,
            disabled_patches=_names(env.get(ENV_DISABLE_PATCHES, "")),
            tuned_dir=Path(os.path.expanduser(folder)),
            fp8_scales=None if fp8_scales == "auto" else cast(ScaleMethod, fp8_scales),
            fp8_skip_layers=_names(env.get(ENV_FP8_SKIP_LAYERS, "")),
            fix_graph_padding=_flag(env, ENV_FIX_GRAPH_PADDING),
        )


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name}={value!r}: use 0 or 1")
    return value == "1"


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())

# SPDX-License-Identifier: Apache-2.0
"""The plugin's settings: every environment variable, its default and its values."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self, cast, get_args

KernelName = Literal["cudnn", "flash_attn", "reference", "triton", "triton_window"]

KERNEL_NAMES: tuple[KernelName, ...] = get_args(KernelName)

# Longest sequence, in tokens, that a kernel takes; the others take any.
SERVES_UP_TO: Mapping[KernelName, int] = MappingProxyType({"triton_window": 128})

ENV_KERNEL = "VLLM_FLASHINFER_VIT_KERNEL"
ENV_STRICT = "VLLM_FLASHINFER_VIT_STRICT"
ENV_DISABLE_PATCHES = "VLLM_FLASHINFER_VIT_DISABLE_PATCHES"
ENV_TUNED_DIR = "VLLM_FLASHINFER_VIT_TUNED_DIR"

_CONFIG_HOME = "~/.config"
_FOLDER = "vllm-flashinfer-vit"


@dataclass(frozen=True)
class Settings:
    """Settings of one engine process.

    Attributes:
        kernel: The kernel that every FLASHINFER layer uses, or None to choose by
            the table in `choices.py`. `VLLM_FLASHINFER_VIT_KERNEL`, default `auto`.
        strict: Whether a layer or call that the plugin cannot serve is an error
            instead of a logged fall-back to the kernel in vLLM's tree.
            `VLLM_FLASHINFER_VIT_STRICT`, 0 or 1, default 0.
        disabled_patches: Names of model patches that are not applied, as
            `vllm-flashinfer-vit doctor` lists them.
            `VLLM_FLASHINFER_VIT_DISABLE_PATCHES`, comma-separated, default empty.
        tuned_dir: Folder of the choices that `vllm-flashinfer-vit tune` measured on
            this machine. `VLLM_FLASHINFER_VIT_TUNED_DIR`, default
            `$XDG_CONFIG_HOME/vllm-flashinfer-vit`, `~/.config` without that variable.
    """

    kernel: KernelName | None = None
    strict: bool = False
    disabled_patches: frozenset[str] = frozenset()
    tuned_dir: Path = Path(os.path.expanduser(_CONFIG_HOME), _FOLDER)

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings from the environment.

        Raises:
            ValueError: A variable holds a value that is not listed as valid.
        """
        kernel = env.get(ENV_KERNEL, "auto")
        if kernel not in ("auto", *KERNEL_NAMES):
            good = ", ".join(("auto", *KERNEL_NAMES))
            raise ValueError(f"{ENV_KERNEL}={kernel!r}: use one of {good}")
        strict = env.get(ENV_STRICT, "0")
        if strict not in ("0", "1"):
            raise ValueError(f"{ENV_STRICT}={strict!r}: use 0 or 1")
        names = env.get(ENV_DISABLE_PATCHES, "").split(",")
        folder = env.get(ENV_TUNED_DIR)
        if folder is None:
            folder = os.path.join(env.get("XDG_CONFIG_HOME") or _CONFIG_HOME, _FOLDER)
        elif not folder:
            raise ValueError(f"{ENV_TUNED_DIR}='': use the path of a folder")
        return cls(
            kernel=None if kernel == "auto" else cast(KernelName, kernel),
            strict=strict == "1",
            disabled_patches=frozenset(name.strip() for name in names if name.strip()),
            tuned_dir=Path(os.path.expanduser(folder)),
        )

# SPDX-License-Identifier: Apache-2.0
"""Versions: those that the package was written for, and how they are written."""

import functools
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

# The oldest and the newest that CI tests with; no older one is served.
TESTED_VLLM = ("0.25.1", "0.33.0")

# vLLM's own switch between its two model runners.
ENV_V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

FLASHINFER_RANGE = SpecifierSet(">=0.6.11,<0.8")
CUDNN_FRONTEND_RANGE = SpecifierSet(">=1.18")

# cudnn-frontend refuses fp16 and bf16 attention on 9.10.0 and 9.10.1 (known bugs), and
# head dims above 128 came with 9.10: sdpa_support_surface.h, TransformerEngine #1797.
MIN_CUDNN = 91002
# Ragged batches on Ampere, Ada and consumer Blackwell: sdpa_support_surface.h ("THD"),
# TransformerEngine #2693.
MIN_CUDNN_RAGGED_EVERYWHERE = 91801
# Major compute capabilities that had ragged batches before.
RAGGED_FIRST = (9, 10)
# The first with the FP8 forward pass for prefill: FlashInfer #2241, vLLM's own gate.
MIN_CUDNN_FP8 = 91701
# Packed FP8 batches by TransformerEngine's gate (#2994). On an H200, 9.19's kernel runs
# an illegal instruction, which no process survives: it must not even be tried.
MIN_CUDNN_FP8_HOPPER = 92300


def installed(package: str) -> str | None:
    """Return an installed package's version, or None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.cache
def vllm_version() -> str:
    """Return the installed vLLM's, which takes milliseconds to read: layers ask, too.

    Raises:
        PackageNotFoundError: There is none.
    """
    return version("vllm")


def check_vllm(version: str) -> str | None:
    """Say what is wrong with a vLLM version, or None if it is served.

    A release candidate or a development build counts as its release.
    """
    first = Version(TESTED_VLLM[0])
    wanted = f"vllm-flashinfer-vit serves vLLM {first} and newer"
    try:
        found = Version(version)
    except InvalidVersion:
        return f"{wanted}; {version!r} is not a version."
    if found.release < first.release:
        return f"{wanted}; vLLM {version} is installed."
    return None


def newer_note(version: str) -> str | None:
    """Say that a vLLM version, which is served, is newer than those that were tested.

    A release candidate or a development build counts as its release.
    """
    first, last = TESTED_VLLM
    if Version(version).release <= Version(last).release:
        return None
    return (
        f"vLLM {version} is newer than those that vllm-flashinfer-vit was tested with "
        f"({first} and {last}). Patches that do not fit it are left out; the rest runs."
    )


def runner_note(vllm: str, env: Mapping[str, str]) -> str | None:
    """Say if this vLLM's model runner would ignore encoder CUDA graphs.

    Args:
        vllm: vLLM's version.
        env: The environment to judge.
    """
    # The V2 runner is the default for dense models, and has encoder CUDA graphs from
    # 0.28 on.
    if Version(vllm).release[:2] >= (0, 28):
        return None
    asked = env.get(ENV_V2_RUNNER, "").strip().lower()
    if asked in ("0", "false"):
        return None
    who = f"set by {ENV_V2_RUNNER}" if asked else "its default for dense models"
    return (
        f"vLLM {vllm} ignores cudagraph_mm_encoder with the V2 model runner ({who}); "
        f"set {ENV_V2_RUNNER}=0 for encoder CUDA graphs."
    )


def public(version: str) -> str:
    """Leave out what a build adds to a version: 2.11.0 of 2.11.0+cu130."""
    return version.partition("+")[0]


def format_cudnn(version: int | None) -> str:
    """Write a cuDNN version number, 91900, as people do: 9.19.0."""
    if version is None:
        return "none"
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"

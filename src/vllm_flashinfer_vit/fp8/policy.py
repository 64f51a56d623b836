# SPDX-License-Identifier: Apache-2.0
"""What vLLM's settings and this package's mean for FP8 attention of a layer.

vLLM tells models FLASH_ATTN for FLASHINFER, so its own gate for FP8 never sees the
truth; the gate is here, and it runs the kernel instead of comparing versions.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.models.vision import get_multimodal_config

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.choices.lookup import (
    PORTABLE_FP8,
    Choice,
    fp8_lengths,
    fp8_ranges,
)
from vllm_flashinfer_vit.choices.resolve import choices_here
from vllm_flashinfer_vit.choices.usable import NotServedError
from vllm_flashinfer_vit.kernels.catalog import KERNELS, fp8_names
from vllm_flashinfer_vit.kernels.formats import BLOCK, HISTORY
from vllm_flashinfer_vit.settings import (
    ENV_FP8_SCALES,
    ENV_FP8_SKIP_LAYERS,
    ENV_KERNEL,
    Settings,
)

logger = init_logger("vllm.plugins.flashinfer_vit")

_BLOCK_INDEX = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True)
class Policy:
    """How one layer attends in FP8.

    Attributes:
        choices: Kernels by length; those for short sequences are no FP8 kernels.
        method: Where scales come from: `static`, a file; `dynamic`, the largest
            absolute values of the last 16 passes; `block`, each block of tokens.
        scale_path: The file of static scales, or None.
        save_path: The file that scales are saved to, or None.
        save_margin: What the abs-max is multiplied by for scales that are saved.
    """

    choices: tuple[Choice, ...]
    method: Literal["static", "dynamic", "block"]
    scale_path: Path | None = None
    save_path: Path | None = None
    save_margin: float = 1.0

    @property
    def save(self) -> bool:
        """Whether every pass counts for scales to be saved, FP8 or not."""
        return self.save_path is not None

    @property
    def observes(self) -> bool:
        """Whether the layer keeps track of its abs-max."""
        return self.method == "dynamic" or self.save

    @property
    def has_state(self) -> bool:
        """Whether the layer has tensors of its own."""
        return self.method == "static" or self.observes

    @property
    def summary(self) -> str:
        """What the log says about it."""
        scales = {
            "static": f"static scales from {self.scale_path}",
            "dynamic": f"dynamic scales, from the last {HISTORY} passes",
            "block": f"a scale for each block of {BLOCK} tokens and head",
        }[self.method]
        lengths = fp8_lengths(self.choices)
        if not lengths:
            return "FP8 attention runs for no length: on this GPU it is not faster"
        return (
            f"FP8 attention runs for sequences {lengths}, with {scales}; other lengths "
            "run in the model's dtype, where FP8 is not faster"
        )


def requested() -> bool:
    """Whether the engine that is being built asks for FP8 encoder attention."""
    config = get_multimodal_config()
    return config is not None and config.mm_encoder_attn_dtype is not None


def policy_for(
    layer_name: str, head_dim: int, dtype: torch.dtype, settings: Settings
) -> Policy | None:
    """Return how a layer attends in FP8, or None if it does not.

    Args:
        layer_name: The layer's name in vLLM.
        head_dim: Head dim in elements.
        dtype: Activation dtype.
        settings: The settings in force.

    Raises:
        NotServedError: FP8 was asked for and cannot be had, or settings contradict.
    """
    config = get_multimodal_config()
    if config is None or config.mm_encoder_attn_dtype is None:
        return None
    if config.mm_encoder_attn_dtype != "fp8":
        raise NotServedError(
            f"mm_encoder_attn_dtype={config.mm_encoder_attn_dtype!r} is not known to "
            f"vllm-flashinfer-vit {__version__}; use fp8"
        )
    compilation = get_current_vllm_config().compilation_config
    if settings.fp8_skip_layers and compilation.compile_mm_encoder:
        # vLLM's cache of compiled code takes all blocks of a tower for the same.
        raise NotServedError(
            f"{ENV_FP8_SKIP_LAYERS} cannot be combined with compile_mm_encoder; unset "
            "one of them"
        )
    if any(names(entry, layer_name) for entry in settings.fp8_skip_layers):
        logger.info_once(
            "layer %s attends in %s, as %s says",
            layer_name,
            dtype,
            ENV_FP8_SKIP_LAYERS,
        )
        return None
    choices = resolve_fp8(head_dim, dtype, settings.kernel, settings.tuned_dir)
    if not fp8_ranges(choices):
        logger.warning_once(
            "mm_encoder_attn_dtype=fp8 has no effect on layers of head dim %d: none of "
            "the FP8 kernels that were measured is faster at any length. They attend "
            "in %s.",
            head_dim,
            dtype,
        )
        if config.mm_encoder_fp8_scale_save_path is None:
            return None
    path, save_path = (
        None if text is None else Path(text)
        for text in (
            config.mm_encoder_fp8_scale_path,
            config.mm_encoder_fp8_scale_save_path,
        )
    )
    method = _method(choices, path, settings)
    margin = config.mm_encoder_fp8_scale_save_margin
    return Policy(choices, method, path, save_path, margin)


def _method(
    choices: Iterable[Choice], path: Path | None, settings: Settings
) -> Literal["static", "dynamic", "block"]:
    wanted = settings.fp8_scales
    if path is not None:
        if wanted is not None:
            raise NotServedError(
                f"{ENV_FP8_SCALES}={wanted} contradicts mm_encoder_fp8_scale_path="
                f"{str(path)!r}, whose scales are static; unset one of them"
            )
        return "static"
    if wanted == "dynamic" and envs.VLLM_BATCH_INVARIANT:
        raise NotServedError(
            f"{ENV_FP8_SCALES}=dynamic contradicts VLLM_BATCH_INVARIANT: such scales "
            "follow from batches before; unset one of them"
        )
    kernels = {choice.kernel for choice in choices} & fp8_names()
    whole_tensor = {k for k in kernels if not KERNELS[k].takes_block_scales}
    if not whole_tensor:
        return wanted or "block"
    if wanted == "block":
        which = ", ".join(sorted(whole_tensor))
        raise NotServedError(
            f"{ENV_FP8_SCALES}=block, but {which} takes one scale for each tensor; set "
            f"{ENV_KERNEL}={PORTABLE_FP8} too"
        )
    return "dynamic"


@functools.cache
def resolve_fp8(
    head_dim: int, dtype: torch.dtype, forced: str | None, tuned_dir: Path | None
) -> tuple[Choice, ...]:
    """Return the choices of FP8 layers that this machine can run.

    The first call with its arguments decides for the process: each FP8 kernel then runs
    once on the GPU, on a small batch. The choices have no FP8 kernel where FP8 was at
    no length faster when the GPU was measured.

    Args:
        head_dim: Head dim in elements.
        dtype: Activation dtype.
        forced: The kernel that the user forces, or None.
        tuned_dir: Folder of the user's measurements, or None to ignore them.

    Raises:
        NotServedError: No FP8 kernel can run, or the forced kernel is none.
        TableError: A file of measured choices cannot be used.
    """
    if forced is not None and forced not in fp8_names():
        raise NotServedError(
            f"{ENV_KERNEL}={forced} contradicts mm_encoder_attn_dtype=fp8: use one of "
            + ", ".join(sorted(fp8_names()))
        )
    try:
        return choices_here(head_dim, dtype, forced, tuned_dir, fp8=True)
    except NotServedError as error:
        raise NotServedError(
            "mm_encoder_attn_dtype=fp8 was asked for, and no FP8 kernel serves head "
            f"dim {head_dim} in {dtype}: {error}. Leave --mm-encoder-attn-dtype out to "
            "run in the model's dtype"
        ) from None


def names(entry: str, layer_name: str) -> bool:
    """Whether an entry of `ENV_FP8_SKIP_LAYERS` names a layer.

    Args:
        entry: The index of a block, or the name of a layer or of a module above it.
        layer_name: The layer's name in vLLM.
    """
    if entry.isdecimal():
        index = _BLOCK_INDEX.search(layer_name)
        return index is not None and int(index[1]) == int(entry)
    return layer_name == entry or layer_name.startswith(f"{entry}.")

# SPDX-License-Identifier: Apache-2.0
"""FP8 attention: what vLLM's settings mean for a layer, and the scales that it keeps.

vLLM tells models FLASH_ATTN for FLASHINFER, so its own gate for FP8 never sees the
truth; the gate is here, and it runs the kernel instead of comparing versions.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.models.vision import get_multimodal_config

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.choices.lookup import Choice, fp8_ranges
from vllm_flashinfer_vit.choices.trial import attempt
from vllm_flashinfer_vit.choices.usable import (
    NotServedError,
    serves_fp8,
    usable_choices,
)
from vllm_flashinfer_vit.fp8 import scale_files as scales
from vllm_flashinfer_vit.fp8.scale_files import QKV, ScaleError, ScaleFile
from vllm_flashinfer_vit.kernels.catalog import KERNELS, fp8_names
from vllm_flashinfer_vit.kernels.formats import HISTORY, DynamicScales
from vllm_flashinfer_vit.machine.probe import probe
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
        save: Whether every pass counts for scales to be saved, FP8 or not.
    """

    choices: tuple[Choice, ...]
    method: Literal["static", "dynamic", "block"]
    scale_path: Path | None = None
    save: bool = False

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
            "dynamic": f"dynamic scales, of {HISTORY} passes",
            "block": "a scale for each block of 128 tokens and head",
        }[self.method]
        spans = " and ".join(
            f"from {first} tokens on"
            if last is None
            else f"of {first} to {last} tokens"
            for first, last in fp8_ranges(self.choices)
        )
        return (
            f"FP8 attention for sequences {spans or 'of no length'}, {scales}; "
            "others, for which it does not pay, stay in the model's dtype"
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
        ScaleError: A file of scales cannot be used, or not for this layer.
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
            f"{ENV_FP8_SKIP_LAYERS} cannot be combined with compile_mm_encoder; leave "
            "one of them out"
        )
    if _is_skipped(layer_name, settings.fp8_skip_layers):
        logger.info_once(
            "layer %s stays in %s: %s", layer_name, dtype, ENV_FP8_SKIP_LAYERS
        )
        return None
    choices = resolve_fp8(head_dim, dtype, settings.kernel)
    if not fp8_ranges(choices):
        logger.warning_once(
            "FP8 attention was asked for, but for head dim %d no length was measured "
            "on this GPU at which it pays: attention stays in %s",
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
    policy = Policy(
        choices, _method(choices, path, settings), path, save=save_path is not None
    )
    if path is not None:
        _read(path)
    if save_path is not None:
        _prepare_saving(save_path, config.mm_encoder_fp8_scale_save_margin)
    return policy


def _method(
    choices: Iterable[Choice], path: Path | None, settings: Settings
) -> Literal["static", "dynamic", "block"]:
    wanted = settings.fp8_scales
    if path is not None:
        if wanted is not None:
            raise NotServedError(
                f"{ENV_FP8_SCALES}={wanted} contradicts mm_encoder_fp8_scale_path="
                f"{str(path)!r}, whose scales are static; leave one of them out"
            )
        return "static"
    kernels = {choice.kernel for choice in choices} & fp8_names()
    whole_tensor = {k for k in kernels if not KERNELS[k].takes_block_scales}
    if not whole_tensor:
        return wanted or "block"
    if wanted == "block":
        names = ", ".join(sorted(whole_tensor))
        raise NotServedError(
            f"{ENV_FP8_SCALES}=block, but {names} takes one scale for each tensor; set "
            f"{ENV_KERNEL}=triton_fp8 too"
        )
    return "dynamic"


@functools.cache
def resolve_fp8(
    head_dim: int, dtype: torch.dtype, forced: str | None
) -> tuple[Choice, ...]:
    """Return the choices of FP8 layers that this machine can run.

    Each FP8 kernel runs once on the GPU first, on a small batch. There is none among
    them where FP8 never paid when the GPU was measured.

    Args:
        head_dim: Head dim in elements.
        dtype: Activation dtype.
        forced: The kernel that the user forces, or None.

    Raises:
        NotServedError: No FP8 kernel can run, or the forced kernel is none.
        TableError: A file of measured choices cannot be used.
    """
    if forced is not None and forced not in fp8_names():
        raise NotServedError(
            f"{ENV_KERNEL}={forced} contradicts mm_encoder_attn_dtype=fp8: use one of "
            + ", ".join(sorted(fp8_names()))
        )
    choices, refusals = usable_choices(
        probe(libraries=False),
        head_dim,
        dtype,
        forced,
        Settings.from_env().tuned_dir,
        fp8=True,
        attempt=functools.partial(attempt, head_dim=head_dim, dtype=dtype),
    )
    if not serves_fp8(choices, refusals):
        raise NotServedError(
            "mm_encoder_attn_dtype=fp8 was asked for, and no FP8 kernel serves head "
            f"dim {head_dim} in {dtype}: {'; '.join(refusals.values())}. Leave "
            "--mm-encoder-attn-dtype out to run in the model's dtype"
        )
    for refusal in refusals.values():
        logger.warning_once("vllm-flashinfer-vit does without %s", refusal)
    return choices


def _read(path: Path) -> ScaleFile:
    file = scales.read(path)
    if file.is_upstream:
        logger.warning_once(
            "%s was written by vLLM itself, whose scales come from signed maxima: "
            "negative values beyond them are cut off. `vllm-flashinfer-vit calibrate "
            "--merge` makes a file of absolute maxima.",
            path,
        )
    else:
        model = get_current_vllm_config().model_config.model
        if file.made_by["model"] != model:
            logger.warning_once(
                "the FP8 scales of %s were made with model %s, this one is %s",
                path,
                file.made_by["model"],
                model,
            )
    return file


def _block_index(layer_name: str) -> str | None:
    found = _BLOCK_INDEX.search(layer_name)
    return found[1] if found else None


def _names(layer_name: str, entry: str) -> bool:
    """Whether an entry of the list of layers to skip names a layer."""
    if entry.isdecimal():
        index = _block_index(layer_name)
        return index is not None and int(index) == int(entry)
    return layer_name == entry or layer_name.startswith(f"{entry}.")


def _is_skipped(layer_name: str, entries: Iterable[str]) -> bool:
    return any(_names(layer_name, entry) for entry in entries)


# Every FLASHINFER layer of this process whose engine asks for FP8, and all that have
# scales of their own. A model that is gone takes its layers with it.
_layers: "WeakSet[nn.Module]" = WeakSet()
_states: "WeakSet[ScaleState]" = WeakSet()


def enroll(layer: nn.Module) -> None:
    """Count a layer among those that settings and scale files may name."""
    _layers.add(layer)


def check_names(policy: Policy | None, settings: Settings) -> None:
    """Check that settings and the scale file name only layers that there are.

    Call it when the whole model is built.

    Raises:
        NotServedError: `ENV_FP8_SKIP_LAYERS` names another one.
        ScaleError: The scale file does.
    """
    layer_names = [str(layer.layer_name) for layer in _layers]
    for entry in sorted(settings.fp8_skip_layers):
        if not any(_names(name, entry) for name in layer_names):
            raise NotServedError(
                f"{ENV_FP8_SKIP_LAYERS} names {entry!r}, which is no layer or block; "
                f"the layers are {', '.join(sorted(layer_names))}"
            )
    if policy is not None and policy.scale_path is not None:
        path = policy.scale_path
        scales.check_no_others(scales.read(path), path, layer_names)


class ScaleState(nn.Module):
    """One layer's scales on the device, so that a captured graph moves them on.

    Its tensors are those of `formats.DynamicScales`; static scales are `scales`.
    """

    amax: torch.Tensor
    history: torch.Tensor
    position: torch.Tensor
    scales: torch.Tensor

    def __init__(self, policy: Policy, layer_name: str, head_dim: int) -> None:
        """Make the buffers on the default device.

        Raises:
            ScaleError: The file of static scales cannot be used for this layer.
        """
        super().__init__()
        self.layer_name = layer_name
        self.head_dim = head_dim
        self.save = policy.save
        self._static = QKV(1.0, 1.0, 1.0)
        if policy.scale_path is not None:
            file = scales.read(policy.scale_path)
            self._static = scales.scales_for(
                file, policy.scale_path, layer_name, head_dim
            ).scale
        # Not persistent: no checkpoint has them, and dummy weights overwrite the rest.
        for name, value in (
            ("amax", torch.zeros(3, dtype=torch.float32)),
            ("history", torch.zeros(HISTORY, 3, dtype=torch.float32)),
            ("position", torch.zeros(1, dtype=torch.int32)),
            ("scales", torch.ones(3, dtype=torch.float32)),
        ):
            self.register_buffer(name, value, persistent=False)
        self.reset()
        _states.add(self)

    @property
    def scales_on_device(self) -> DynamicScales:
        """The same tensors as the op takes them."""
        return DynamicScales(self.amax, self.history, self.position, self.scales)

    def reset(self) -> None:
        """Forget what was seen, in place."""
        self.amax.zero_()
        self.history.zero_()
        self.position.zero_()
        self.scales.copy_(torch.tensor(self._static, dtype=torch.float32, device="cpu"))


def forget_dummies() -> None:
    """Forget what all layers saw; call it when an engine has warmed up."""
    for state in _states:
        state.reset()
    if _saving is not None:
        _saving.passes = 0


@dataclass
class _Saving:
    path: Path
    margin: float
    made_by: dict[str, str]
    passes: int = 0
    done: bool = False


_saving: _Saving | None = None


def _prepare_saving(path: Path, margin: float) -> None:
    global _saving
    if _saving is not None and _saving.path == path and not _saving.done:
        return
    model = get_current_vllm_config().model_config.model
    scales.check_mergeable(path, model)
    made_by = made_by_engine(model)
    _saving = _Saving(path, margin, made_by)


def made_by_engine(model: str) -> dict[str, str]:
    from importlib.metadata import version

    return {
        "command": "vLLM's mm_encoder_fp8_scale_save_path",
        "version": __version__,
        "vllm": version("vllm"),
        "model": model,
        "method": f"abs-max of {HISTORY} passes",
    }


def after_step(scheduler_output: Any) -> None:
    """Count a step of the engine, and save scales after the 16th with an encoder pass.

    Nothing is read from the device before that, and all layers' history in one go then.
    """
    if (
        _saving is None
        or _saving.done
        or not getattr(scheduler_output, "scheduled_encoder_inputs", None)
    ):
        return
    _saving.passes += 1
    if _saving.passes < HISTORY:
        return
    seen = observed(state for state in _states if state.save)
    # A rank of a data-parallel encoder may have had no image yet.
    if not seen:
        return
    _saving.done = True
    try:
        file = scales.save(
            scales.from_amax(seen, _saving.margin, _saving.made_by), _saving.path
        )
    except (OSError, ScaleError) as error:
        logger.error("the FP8 scales were not saved to %s: %s", _saving.path, error)
        return
    logger.info("Saved FP8 scales of %d layers to %s", len(file.layers), _saving.path)


def observed(states: Iterable[ScaleState]) -> dict[str, tuple[QKV, int]]:
    """Read the abs-max and head dim of layers that saw anything, by name."""
    states = sorted(states, key=lambda state: state.layer_name)
    if not states:
        return {}
    rows = torch.stack([state.history for state in states]).amax(dim=1).tolist()
    return {
        state.layer_name: (QKV(*row), state.head_dim)
        for state, row in zip(states, rows, strict=True)
        if any(row)
    }

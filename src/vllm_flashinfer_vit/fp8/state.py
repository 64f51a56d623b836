# SPDX-License-Identifier: Apache-2.0
"""The FP8 scales that the layers of an engine keep, and how they are saved.

A layer has its own on the device. What concerns all layers of an engine, such as names
and saving, is in one record, which each of them holds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.choices.usable import NotServedError
from vllm_flashinfer_vit.fp8 import scale_files as scales
from vllm_flashinfer_vit.fp8.policy import Policy, names
from vllm_flashinfer_vit.fp8.scale_files import QKV, ScaleError, ScaleFile
from vllm_flashinfer_vit.kernels.formats import HISTORY, DeviceScales
from vllm_flashinfer_vit.machine.files import FileError
from vllm_flashinfer_vit.machine.per_engine import PerEngine
from vllm_flashinfer_vit.machine.versions import vllm_version
from vllm_flashinfer_vit.settings import ENV_FP8_SKIP_LAYERS, Settings

logger = init_logger("vllm.plugins.flashinfer_vit")


class ScaleState(nn.Module):
    """One layer's scales on the device, so that a captured graph moves them on.

    Its tensors are those of `formats.DeviceScales`; static scales are `scales`.

    Attributes:
        is_static: Whether the scales are a file's, and may cut values off.
    """

    amax: torch.Tensor
    history: torch.Tensor
    position: torch.Tensor
    scales: torch.Tensor
    clip_counts: torch.Tensor

    def __init__(self, layer_name: str, head_dim: int, given: QKV | None) -> None:
        """Make the buffers on the default device.

        Args:
            layer_name: The layer's name in vLLM.
            head_dim: Its head dim in elements.
            given: Its static scales, or None.
        """
        super().__init__()
        self.layer_name = layer_name
        self.head_dim = head_dim
        self.is_static = given is not None
        self._first = QKV(1.0, 1.0, 1.0) if given is None else given
        self._make(torch.get_default_device())
        self.reset()

    def _make(self, device: torch.device | str) -> None:
        for name, value in DeviceScales.on(device)._asdict().items():
            # vLLM's reload would wait for elements that nobody loads, and warn.
            value.weight_loader_numel = 0
            # Not persistent: no checkpoint has them, and dummy weights overwrite the
            # rest.
            self.register_buffer(name, value, persistent=False)

    @property
    def scales_on_device(self) -> DeviceScales:
        """The same tensors as the op takes them."""
        # Not as attributes, which a module looks up in Python: eager blocks ask often.
        return DeviceScales(**self._buffers)  # type: ignore[arg-type]

    def materialize(self) -> None:
        """Make the tensors of a model that was built without memory.

        `--load-format ipc_cache` builds it so, and maps another process's tensors: that
        one has none of these.
        """
        if self.scales.is_meta:
            self._make(current_platform.device_type)

    def reset(self) -> None:
        """Forget what was seen, in place."""
        self.amax.zero_()
        self.history.zero_()
        self.position.zero_()
        self.clip_counts.zero_()
        self.scales.copy_(torch.tensor(self._first, dtype=torch.float32, device="cpu"))


@dataclass
class _Saving:
    """What is to be saved, and how far it is.

    Attributes:
        path: The file.
        margin: What the abs-max is multiplied by.
        states: Of the layers that are still to be saved.
        passes: Steps with an encoder pass so far.
        due: At how many of them to read what layers saw.
        done: Whether all layers are saved, or an error came up.
    """

    path: Path
    margin: float
    states: list[ScaleState]
    passes: int = 0
    due: int = HISTORY
    done: bool = False


class EngineScales(PerEngine):
    """One engine's layers that are asked for FP8: names, scale file, states, saving."""

    def __init__(self, vllm_config: Any) -> None:
        """Begin without layers; use `of`."""
        super().__init__(vllm_config)
        self._model: str = vllm_config.model_config.model
        self._layer_names: set[str] = set()
        # The file of static scales, read by the first layer that asks for it.
        self._file: tuple[Path, ScaleFile] | None = None
        self._states: list[ScaleState] = []
        self._saving: _Saving | None = None

    def enroll(
        self, layer_name: str, head_dim: int, policy: Policy | None
    ) -> ScaleState | None:
        """Count a layer among those that settings and scale files may name.

        Args:
            layer_name: The layer's name in vLLM.
            head_dim: Its head dim in elements.
            policy: How it attends in FP8, or None if it does not.

        Returns:
            What the layer keeps on the default device, or None if it keeps nothing.

        Raises:
            ScaleError: The file of static scales cannot be used, or not for this head
                dim; or the margin cannot; or the file to save to holds scales that
                cannot be widened, or cannot be written.
        """
        self._layer_names.add(layer_name)
        if policy is None or not policy.has_state:
            return None
        given = None
        if policy.scale_path is not None:
            file = self._read(policy.scale_path)
            given = QKV(1.0, 1.0, 1.0)
            if layer_name in file.layers:
                found = scales.scales_for(file, policy.scale_path, layer_name, head_dim)
                given = found.scale
        state = ScaleState(layer_name, head_dim, given)
        self._states.append(state)
        if policy.save_path is not None:
            if self._saving is None or self._saving.done:
                scales.check_margin(
                    policy.save_margin, "mm_encoder_fp8_scale_save_margin"
                )
                self._check_save_path(policy.save_path)
                self._saving = _Saving(policy.save_path, policy.save_margin, [])
            self._saving.states.append(state)
        return state

    def _read(self, path: Path) -> ScaleFile:
        if self._file is None:
            self._file = path, scales.read(path)
            _warn_of_origin(*self._file, self._model)
        return self._file[1]

    def _check_save_path(self, path: Path) -> None:
        try:
            scales.check_mergeable(path, self._model)
        except FileError as error:
            raise ScaleError(f"mm_encoder_fp8_scale_save_path: {error}") from None

    def check_names(self, settings: Settings) -> None:
        """Check that settings and the scale file name only layers that there are.

        Call it when the whole model is built.

        Raises:
            NotServedError: `ENV_FP8_SKIP_LAYERS` names another one.
            ScaleError: The scale file does.
        """
        layer_names = sorted(self._layer_names)
        for entry in sorted(settings.fp8_skip_layers):
            if not any(names(entry, layer_name) for layer_name in layer_names):
                raise NotServedError(
                    f"{ENV_FP8_SKIP_LAYERS} names {entry!r}, which is no layer or "
                    f"block; the layers are {', '.join(layer_names)}"
                )
        if self._file is not None:
            path, file = self._file
            scales.check_no_others(file, path, layer_names)

    def check_has_scales(self, layer_name: str) -> None:
        """Check that the scale file does not lack a layer that the model kept.

        Call it for each layer of the loaded model. MiniCPM-V builds one block too many
        and drops it: what never runs is in no file.

        Raises:
            ScaleError: The file lacks it.
        """
        if self._file is None:
            return
        path, file = self._file
        for state in self._states:
            if state.layer_name == layer_name:
                scales.scales_for(file, path, layer_name, state.head_dim)

    def forget_dummies(self) -> None:
        """Forget what all layers saw; call it when the engine has warmed up."""
        for state in self._states:
            state.reset()
        if self._saving is not None:
            self._saving.passes, self._saving.due = 0, HISTORY

    def after_step(self, scheduler_output: Any) -> None:
        """Count a step of the engine; save scales after the 16th with an encoder pass.

        Nothing is read from the device before that, and all layers' history in one go
        then; layers that saw nothing are asked again after twice as many.
        """
        saving = self._saving
        if (
            saving is None
            or saving.done
            or not getattr(scheduler_output, "scheduled_encoder_inputs", None)
        ):
            return
        saving.passes += 1
        if saving.passes < saving.due:
            return
        seen = _observed(saving.states)
        # A rank of a data-parallel encoder may have had no image yet, an encoder of
        # sounds no sound, and a later pipeline stage never has: it is asked less often.
        saving.due *= 2
        if not seen:
            return
        saving.states = [s for s in saving.states if s.layer_name not in seen]
        saving.done = not saving.states
        path = saving.path
        try:
            new = scales.from_amax(seen, saving.margin, made_by_engine(self._model))
            file = scales.save(new, path)
        except (OSError, ScaleError) as error:
            saving.done = True
            logger.error("the FP8 scales were not saved to %s: %s", path, error)
            return
        logger.info("Saved FP8 scales of %d layers to %s", len(file.layers), path)


def _warn_of_origin(path: Path, file: ScaleFile, model: str) -> None:
    """Say if a file of scales is of vLLM's own making or of another model."""
    if file.has_signed_maxima:
        logger.warning_once(
            "scales of %s were written by vLLM itself, whose scales come from signed "
            "maxima: negative values beyond them are cut off. `vllm-flashinfer-vit "
            "calibrate` without `--merge` makes a file of absolute maxima.",
            path,
        )
    if not file.is_upstream and file.made_by["model"] != model:
        logger.warning_once(
            "the FP8 scales of %s were made with model %s, this one is %s",
            path,
            file.made_by["model"],
            model,
        )


def made_by_engine(model: str) -> dict[str, str]:
    """Return the fingerprint of a file that an engine saves."""
    return {
        "command": "vLLM's mm_encoder_fp8_scale_save_path",
        "version": __version__,
        "vllm": vllm_version(),
        "model": model,
        "method": f"abs-max of {HISTORY} passes",
    }


def _observed(states: Iterable[ScaleState]) -> dict[str, tuple[QKV, int]]:
    """Read the abs-max and head dim of layers that saw anything, by name."""
    # Of a tower that another pipeline stage runs, vLLM leaves nothing on the device.
    kept = (state for state in states if not state.history.is_meta)
    states = sorted(kept, key=lambda state: state.layer_name)
    if not states:
        return {}
    rows = torch.stack([state.history for state in states]).amax(dim=1).tolist()
    return {
        state.layer_name: (QKV(*row), state.head_dim)
        for state, row in zip(states, rows, strict=True)
        if any(row)
    }

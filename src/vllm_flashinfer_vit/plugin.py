# SPDX-License-Identifier: Apache-2.0
"""Activation: what is registered in vLLM, what is patched, and when."""

import importlib
import logging
import os
from collections.abc import Iterable
from types import ModuleType

from vllm_flashinfer_vit.blocks.spec import OPTIMISATIONS
from vllm_flashinfer_vit.machine.versions import check_vllm, newer_note, vllm_version
from vllm_flashinfer_vit.models import exact_graphs, families, transformers_towers
from vllm_flashinfer_vit.patches import (
    counters,
    encoder_graphs,
    fp8_scales,
    image_frames,
    image_patches,
    image_text,
    platform,
)
from vllm_flashinfer_vit.patches.patch import (
    Patch,
    PatchError,
    apply_fitting,
    revert_group,
)
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES, Settings, is_strict

logger = logging.getLogger("vllm.plugins.flashinfer_vit")

_MODEL_PATCHES = (
    *families.PATCHES,
    *exact_graphs.PATCHES,
    *encoder_graphs.PATCHES,
    *counters.PATCHES,
)
# Applied at once: such towers have no layer of vLLM's, and images are prepared in
# processes without a model. Each asks for itself whether FLASHINFER is served, but what
# receives images: they may be prepared elsewhere.
_EARLY = (transformers_towers, image_patches, image_frames, image_text)
# Inherited by the processes that an engine starts: the first one speaks for all.
_ENV_WARNED = "_VLLM_FLASHINFER_VIT_WARNED"


def register() -> None:
    """Wrap the backend selection and register the layer; see `__init__.register`.

    Nothing else changes until a model asks for FLASHINFER; model patches follow when
    the first FLASHINFER layer is built. As soon as FLASHINFER is asked for, the wrapped
    selection raises where no layer is registered, and the layer raises where the
    selection is not wrapped.

    Raises:
        PatchError: A patch does not fit, and the settings are strict.
        RuntimeError: Another plugin replaces MMEncoderAttention already.
    """
    refusal = apply_platform_patches()
    if problem := check_vllm(vllm_version()):
        if os.environ.get(_ENV_WARNED) != problem:
            os.environ[_ENV_WARNED] = problem
            logger.warning("%s Without FLASHINFER, vLLM runs as ever.", problem)
        return
    if refusal is not None:
        logger.error("%s Without FLASHINFER, vLLM runs as ever.", refusal)
    _register_layer(refusal)
    for error in apply_early_patches():
        logger.warning("%s", error)


def _register_layer(refusal: str | None) -> None:
    """Make vLLM build this package's layer wherever it builds MMEncoderAttention.

    Args:
        refusal: Why no layer may serve FLASHINFER in this process, or None.

    Raises:
        RuntimeError: Another plugin replaces MMEncoderAttention already.
    """
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.attention.mm_encoder_attention import (
        MMEncoderAttention,
    )

    from vllm_flashinfer_vit.engine.hooks import Hooks
    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

    taken = op_registry_oot.get(MMEncoderAttention.__name__)
    if taken is None:
        FlashInferViTAttention.hooks = Hooks(
            refusal=refusal,
            model_patches=apply_model_patches,
            fp8_patches=apply_fp8_patches,
            graph_patches=apply_graph_patches,
        )
        MMEncoderAttention.register_oot(FlashInferViTAttention)
    elif taken is not FlashInferViTAttention:
        raise RuntimeError(
            f"{taken.__module__}.{taken.__qualname__} already replaces "
            "MMEncoderAttention; disable one of the two plugins with VLLM_PLUGINS"
        )


def all_patches() -> tuple[Patch, ...]:
    """Return every patch, as `doctor` lists them."""
    return (
        *platform.PATCHES,
        *(patch for module in _EARLY for patch in module.PATCHES),
        *_MODEL_PATCHES,
        *fp8_scales.PATCHES,
    )


def apply_platform_patches() -> str | None:
    """Wrap the backend selection of the platforms that are loaded.

    Returns:
        Why FLASHINFER cannot be served, or None: the selection of the platform that is
        in use is not what its patch was written for.

    Raises:
        PatchError: As above, and the settings are strict.
    """
    # Resolving the platform loads its module; no device is initialised.
    from vllm.platforms import current_platform  # noqa: F401

    errors = apply_fitting(platform.PATCHES)
    if not errors:
        return None
    from vllm_flashinfer_vit.engine.selection import selection_is_wrapped

    if selection_is_wrapped():
        return None
    if is_strict():
        raise errors[0]
    return (
        "vllm-flashinfer-vit cannot serve FLASHINFER: "
        f"{'; '.join(map(str, errors))}. Install a vLLM that was tested, or leave "
        "--mm-encoder-attn-backend FLASHINFER out."
    )


def apply_early_patches() -> tuple[PatchError, ...]:
    """Apply the patches that wait for no layer; see `_EARLY`.

    Returns:
        Why others do not fit, or cannot be had.

    Raises:
        PatchError: One of them does not fit, and the settings are strict.
    """
    errors: list[PatchError] = []
    for module in _EARLY:
        if missing := _missing(module):
            errors.append(missing)
        else:
            errors += apply_fitting(module.PATCHES)
    if errors and is_strict():
        raise errors[0]
    return tuple(errors)


def apply_model_patches(settings: Settings) -> tuple[str, ...]:
    """Apply the patches of the models that are loaded, once a FLASHINFER layer exists.

    One that does not fit is left out: vLLM runs what it would replace, and attention
    runs here all the same.

    Args:
        settings: The settings in force.

    Returns:
        The names of the model patches in place that code may hold which vLLM compiles.

    Raises:
        PatchError: A patch does not fit, and the settings are strict.
        ValueError: The settings disable a patch that does not exist.
    """
    own = {patch.name for patch in platform.PATCHES}
    names = {patch.name for patch in all_patches()} - own
    names.update(OPTIMISATIONS)
    if unknown := settings.disabled_patches - names:
        raise ValueError(
            f"no model patch or optimisation is named {', '.join(sorted(unknown))}; "
            f"the names are {', '.join(sorted(names))}"
        )
    # Runners import it after the model is built.
    missing = _missing(encoder_graphs)
    if note := newer_note(vllm_version()):
        _warn_once(note)
    _leave_out(apply_fitting(_MODEL_PATCHES, settings.disabled_patches), settings)
    graphs = {patch.name for patch in encoder_graphs.PATCHES}
    if missing is not None and not graphs <= settings.disabled_patches:
        _leave_out([missing], settings)
    in_place = [patch for patch in _MODEL_PATCHES if patch.applied]
    late = [p.name for p in in_place if p.name in settings.disabled_patches]
    if late:
        _warn_once(
            f"{ENV_DISABLE_PATCHES} comes too late for {', '.join(late)}: an earlier "
            "engine of this process runs with it. Set it before the process starts."
        )
    return tuple(patch.name for patch in in_place if patch.compiled)


def apply_graph_patches() -> None:
    """Mend the padding of encoder CUDA graphs in an engine without FLASHINFER.

    Raises:
        PatchError: vLLM's manager is not what this package was written for. The user
            asked for right results where vLLM's may be wrong.
    """
    if missing := _missing(encoder_graphs):
        raise missing
    if errors := apply_fitting(encoder_graphs.PATCHES):
        raise errors[0]


def apply_fp8_patches(settings: Settings) -> None:
    """Tell layers with FP8 scales of their own what the engine's worker does.

    Raises:
        PatchError: A patch does not fit, and the settings are strict.
    """
    _leave_out(apply_fitting(fp8_scales.PATCHES, settings.disabled_patches), settings)


def _missing(home: ModuleType) -> PatchError | None:
    """Import the module that patches are of; return why it cannot be had, or None."""
    try:
        importlib.import_module(home.MODULE)
    except ImportError as error:
        names = ", ".join(patch.name for patch in home.PATCHES)
        return PatchError(f"patch {names} does not fit this vLLM: {error}")
    return None


def _leave_out(errors: Iterable[PatchError], settings: Settings) -> None:
    """Say once in a process which patches do not fit, or raise if that is strict."""
    for error in errors:
        if settings.strict:
            raise error
        _warn_once(
            f"vllm-flashinfer-vit leaves a patch out, and serves on: {error}. Install "
            "a vLLM that was tested, or name the patch in "
            f"{ENV_DISABLE_PATCHES} to silence this."
        )


def _warn_once(text: str) -> None:
    from vllm.logger import init_logger

    init_logger(logger.name).warning_once("%s", text)


def revert_all() -> None:
    """Put every original object back."""
    revert_group(all_patches())

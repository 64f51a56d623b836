# SPDX-License-Identifier: Apache-2.0
"""Activation on one screen: what is registered in vLLM, what is patched, and when."""

import importlib
import logging
import os
from importlib.metadata import version

from vllm_flashinfer_vit.blocks.spec import OPTIMISATIONS
from vllm_flashinfer_vit.machine.versions import check_vllm
from vllm_flashinfer_vit.models import qwen2_5_vl, qwen2_vl, qwen3_vl
from vllm_flashinfer_vit.patches import encoder_graphs, fp8_scales, platform
from vllm_flashinfer_vit.patches.patch import (
    Patch,
    PatchError,
    apply_group,
    revert_group,
)
from vllm_flashinfer_vit.settings import Settings, is_strict

logger = logging.getLogger("vllm.plugins.flashinfer_vit")

_MODEL_PATCHES = (
    *qwen2_vl.PATCHES,
    *qwen2_5_vl.PATCHES,
    *qwen3_vl.PATCHES,
    *encoder_graphs.PATCHES,
)
# Inherited by the processes that an engine starts: the first one speaks for all.
_ENV_WARNED = "_VLLM_FLASHINFER_VIT_WARNED"


def register() -> None:
    """Wrap the backend selection and register the layer; see `__init__.register`.

    Nothing else changes until a model asks for FLASHINFER; model patches follow when
    the first FLASHINFER layer is built. What goes wrong here is logged; the wrapped
    selection raises as soon as FLASHINFER is asked for and no layer is registered.
    """
    try:
        apply_platform_patches()
        if problem := check_vllm(version("vllm")):
            if os.environ.get(_ENV_WARNED) != problem:
                os.environ[_ENV_WARNED] = problem
                logger.warning("%s Without FLASHINFER, vLLM runs as ever.", problem)
            return
        _register_layer()
    except Exception:
        logger.exception(
            "vllm-flashinfer-vit is not active in this process; vLLM runs without it"
        )
        if is_strict():
            raise


def _register_layer() -> None:
    """Make vLLM build this package's layer wherever it builds MMEncoderAttention.

    Raises:
        RuntimeError: Another plugin replaces MMEncoderAttention already.
    """
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.attention.mm_encoder_attention import (
        MMEncoderAttention,
    )

    from vllm_flashinfer_vit.engine.activation import Activation
    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

    taken = op_registry_oot.get(MMEncoderAttention.__name__)
    if taken is None:
        FlashInferViTAttention.activation = Activation(
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
    return (*platform.PATCHES, *_MODEL_PATCHES, *fp8_scales.PATCHES)


def apply_platform_patches() -> None:
    """Wrap the backend selection of the platforms that are loaded.

    Raises:
        PatchError: A platform's selection is not what this package was written for.
    """
    # Resolving the platform loads its module; no device is initialised.
    from vllm.platforms import current_platform  # noqa: F401

    apply_group(platform.PATCHES)


def apply_model_patches(settings: Settings) -> tuple[str, ...]:
    """Apply the patches of the models that are loaded, once a FLASHINFER layer exists.

    A patch that does not fit leaves all model patches out: the models run on the
    q, k, v entry of the layer, right but with stock's other kernels.

    Args:
        settings: The settings in force.

    Returns:
        The names of all model patches that are in place.

    Raises:
        PatchError: A patch does not fit, and the settings are strict.
        ValueError: The settings disable a patch that does not exist.
    """
    names = {patch.name for patch in (*_MODEL_PATCHES, *fp8_scales.PATCHES)}
    names.update(OPTIMISATIONS)
    if unknown := settings.disabled_patches - names:
        raise ValueError(
            f"no model patch or optimisation is named {', '.join(sorted(unknown))}; "
            f"the names are {', '.join(sorted(names))}"
        )
    # Runners import it after the model is built.
    importlib.import_module(encoder_graphs.MODULE)
    try:
        apply_group(_MODEL_PATCHES, settings.disabled_patches)
    except PatchError as error:
        if settings.strict:
            raise
        from vllm.logger import init_logger

        init_logger(logger.name).warning_once(
            "vllm-flashinfer-vit leaves model patches out: %s", str(error)
        )
    return tuple(patch.name for patch in _MODEL_PATCHES if patch.applied)


def apply_graph_patches() -> None:
    """Mend the padding of encoder CUDA graphs in an engine without FLASHINFER.

    Raises:
        PatchError: vLLM's manager is not what this package was written for.
    """
    importlib.import_module(encoder_graphs.MODULE)
    apply_group(encoder_graphs.PATCHES)


def apply_fp8_patches(settings: Settings) -> None:
    """Tell layers with FP8 scales of their own what the engine's worker does.

    Raises:
        PatchError: vLLM's worker is not what this package was written for.
    """
    apply_group(fp8_scales.PATCHES, settings.disabled_patches)


def revert_all() -> None:
    """Put every original object back."""
    revert_group(all_patches())

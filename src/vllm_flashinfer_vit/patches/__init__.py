# SPDX-License-Identifier: Apache-2.0
"""Every change to vLLM's objects: the list, and when each is applied."""

import importlib
import logging
from collections.abc import Iterable

from vllm_flashinfer_vit.models import positions as qwen_metadata
from vllm_flashinfer_vit.models import qwen_ops, qwen_vl
from vllm_flashinfer_vit.patches import encoder_graphs, fp8_scales, platform
from vllm_flashinfer_vit.patches.patch import Patch, PatchError
from vllm_flashinfer_vit.settings import Settings

__all__ = [
    "Patch",
    "PatchError",
    "all_patches",
    "apply_fp8_patches",
    "apply_graph_patches",
    "apply_model_patches",
    "apply_platform_patches",
    "revert_all",
]

logger = logging.getLogger("vllm.plugins.flashinfer_vit")

_MODEL_PATCHES = (
    *qwen_vl.PATCHES,
    *qwen_ops.PATCHES,
    *qwen_metadata.PATCHES,
    *encoder_graphs.PATCHES,
)


def all_patches() -> tuple[Patch, ...]:
    """Return every patch, in the order in which they are applied."""
    return (*platform.PATCHES, *_MODEL_PATCHES, *fp8_scales.PATCHES)


def apply_platform_patches() -> None:
    """Wrap the backend selection of the platforms that are loaded.

    Raises:
        PatchError: A platform's selection is not what this package was written for.
    """
    # Resolving the platform loads its module; no device is initialised.
    from vllm.platforms import current_platform  # noqa: F401

    _apply(platform.PATCHES)


def apply_model_patches(settings: Settings, plan: str = "") -> None:
    """Apply the patches of the models that are loaded, once a FLASHINFER layer exists.

    A patch that does not fit leaves all model patches out: the models run on the
    q, k, v entry of the layer, right but with stock's other kernels.

    Args:
        settings: The settings in force.
        plan: What the layer hands to its op, and compiled code therefore holds.

    Raises:
        PatchError: A patch does not fit, and the settings are strict.
        ValueError: The settings disable a patch that does not exist.
    """
    names = {patch.name for patch in (*_MODEL_PATCHES, *fp8_scales.PATCHES)}
    if unknown := settings.disabled_patches - names:
        raise ValueError(
            f"no model patch is named {', '.join(sorted(unknown))}; "
            f"the names are {', '.join(sorted(names))}"
        )
    # Runners import it after the model is built.
    importlib.import_module(encoder_graphs.MODULE)
    wanted = (p for p in _MODEL_PATCHES if p.name not in settings.disabled_patches)
    try:
        _apply(wanted)
    except PatchError as error:
        if settings.strict:
            raise
        logger.warning("vllm-flashinfer-vit leaves model patches out: %s", error)
    _name_in_compile_cache(plan)


def apply_graph_patches() -> None:
    """Pad encoder CUDA graphs rightly in an engine without a FLASHINFER layer.

    Raises:
        PatchError: vLLM's manager is not what this package was written for.
    """
    importlib.import_module(encoder_graphs.MODULE)
    _apply(encoder_graphs.PATCHES)


def apply_fp8_patches(settings: Settings) -> None:
    """Tell layers with FP8 scales of their own what the engine's worker does.

    Raises:
        PatchError: vLLM's worker is not what this package was written for.
    """
    _apply(p for p in fp8_scales.PATCHES if p.name not in settings.disabled_patches)


def _name_in_compile_cache(plan: str) -> None:
    """Keep code that vLLM compiled with other patches or plans out of this engine.

    Its cache goes by the engine's configuration and by sources that did not change. A
    configuration that another plugin made an object of its own stays as it is.
    """
    from vllm.config import get_current_vllm_config_or_none

    from vllm_flashinfer_vit import __version__

    config = get_current_vllm_config_or_none()
    if config is None or not isinstance(config.additional_config, dict):
        return
    applied = [patch.name for patch in _MODEL_PATCHES if patch.applied]
    config.additional_config["vllm_flashinfer_vit"] = [__version__, *applied, plan]


def _apply(patches: Iterable[Patch]) -> None:
    pending = [patch for patch in patches if patch.loaded and not patch.applied]
    for patch in pending:
        patch.check()
    for patch in pending:
        patch.apply()


def revert_all() -> None:
    """Put every original object back."""
    for patch in reversed(all_patches()):
        patch.revert()

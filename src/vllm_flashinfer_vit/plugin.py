# SPDX-License-Identifier: Apache-2.0
"""Activation: what the package changes in a vLLM process, and when."""

import logging
import os
from importlib.metadata import version

from vllm_flashinfer_vit import patches
from vllm_flashinfer_vit.machine.versions import check_vllm
from vllm_flashinfer_vit.settings import ENV_STRICT

logger = logging.getLogger("vllm.plugins.flashinfer_vit")


def register() -> None:
    """Wrap the backend selection and register the layer; see `__init__.register`.

    Nothing else changes until a model asks for FLASHINFER; model patches follow when
    the first FLASHINFER layer is built. What goes wrong here is logged; the wrapped
    selection raises as soon as FLASHINFER is asked for and no layer is registered.
    """
    try:
        patches.apply_platform_patches()
        if problem := check_vllm(version("vllm")):
            logger.warning("%s Without FLASHINFER, vLLM runs as ever.", problem)
            return
        _register_layer()
    except Exception:
        logger.exception(
            "vllm-flashinfer-vit is not active in this process; vLLM runs without it"
        )
        if os.environ.get(ENV_STRICT) == "1":
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

    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

    taken = op_registry_oot.get(MMEncoderAttention.__name__)
    if taken is None:
        MMEncoderAttention.register_oot(FlashInferViTAttention)
    elif taken is not FlashInferViTAttention:
        raise RuntimeError(
            f"{taken.__module__}.{taken.__qualname__} already replaces "
            "MMEncoderAttention; disable one of the two plugins with VLLM_PLUGINS"
        )

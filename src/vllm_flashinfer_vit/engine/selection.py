# SPDX-License-Identifier: Apache-2.0
"""Whether this package serves FLASHINFER, by which kernels, and what models are told.

A model that asks for its attention backend is told FLASH_ATTN where FLASHINFER was set.
It then hands over plain token prefix sums and a real longest length, instead of the
packed element offsets of vLLM's own FLASHINFER; the layer takes it from there.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.models.vision import get_multimodal_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.choices.lookup import Choice
from vllm_flashinfer_vit.choices.resolve import choices_here
from vllm_flashinfer_vit.choices.usable import NotServedError
from vllm_flashinfer_vit.kernels.catalog import fp8_names
from vllm_flashinfer_vit.machine.versions import check_vllm, vllm_version
from vllm_flashinfer_vit.settings import ENV_KERNEL, Settings

logger = init_logger("vllm.plugins.flashinfer_vit")

# What the layer in vLLM's tree is built with in every release that was read.
_ARGUMENTS = {"self", "num_heads", "head_size", "scale", "num_kv_heads", "prefix"}


def flashinfer_requested() -> bool:
    """Whether the engine that is being built asks for FLASHINFER encoder attention."""
    config = get_multimodal_config()
    return (
        config is not None
        and config.mm_encoder_attn_backend == AttentionBackendEnum.FLASHINFER
    )


@functools.cache
def resolve(
    head_dim: int, dtype: torch.dtype, forced: str | None, tuned_dir: Path | None
) -> tuple[Choice, ...]:
    """Return the choices that this machine can run for a head dim and dtype.

    The first call for its arguments decides for the process, and may run a kernel.

    Args:
        head_dim: Head dim in elements.
        dtype: Activation dtype.
        forced: The kernel that the user forces, or None.
        tuned_dir: Folder of the user's measurements, or None to ignore them.

    Raises:
        NotServedError: No kernel can run, or the forced one cannot; or this vLLM is not
            supported.
        TableError: A file of measured choices cannot be used.
    """
    if problem := check_vllm(vllm_version()):
        raise NotServedError(problem)
    try:
        return choices_here(head_dim, dtype, forced, tuned_dir)
    except NotServedError as error:
        advice = f". Unset {ENV_KERNEL}={forced}" if forced else ""
        raise NotServedError(
            f"no kernel of vllm-flashinfer-vit serves head dim {head_dim} in {dtype}: "
            f"{error}{advice}"
        ) from None


def served(
    head_dim: int, dtype: torch.dtype, settings: Settings
) -> tuple[Choice, ...] | None:
    """Return a layer's choices, or None where the kernel in vLLM's tree runs instead.

    Args:
        head_dim: Head dim in elements.
        dtype: Activation dtype.
        settings: The settings in force.

    Raises:
        NotServedError: Nothing can serve the layer, and the settings are strict or
            force a kernel, or this vLLM is not supported.
    """
    forced = settings.kernel
    config = get_multimodal_config()
    if forced in fp8_names() and config and config.mm_encoder_attn_dtype is not None:
        # Forced for what runs in FP8; `fp8.policy_for` takes care of that.
        forced = None
    try:
        return resolve(head_dim, dtype, forced, settings.tuned_dir)
    except NotServedError as error:
        if settings.strict or forced or check_vllm(vllm_version()):
            raise
        logger.warning_once(
            "FLASHINFER was asked for, but %s. vLLM's own kernel runs instead.",
            # Text is told apart from what was said before, an exception is not.
            str(error),
        )
        return None


def name_and_head_dim(
    stock: Any, args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[str, int]:
    """Return the name and the head dim of a layer that vLLM builds.

    Args:
        stock: vLLM's `MMEncoderAttention`.
        args: What it is given by position.
        named: What it is given by name.

    Raises:
        NotServedError: A newer vLLM gives it what is unknown here.
    """
    build = inspect.signature(stock.__init__)
    given = build.bind(stock, *args, **named).arguments
    name = given.get("prefix", "")
    if unknown := given.keys() - _ARGUMENTS:
        raise NotServedError(
            f"layer {name!r}: this vLLM gives MMEncoderAttention "
            f"{', '.join(sorted(unknown))}, which vllm-flashinfer-vit {__version__} "
            "does not know; install a vLLM that was tested, or leave "
            "--mm-encoder-attn-backend FLASHINFER out"
        )
    return name, given["head_size"]


def layer_is_registered() -> bool:
    """Whether vLLM builds this package's layer in place of `MMEncoderAttention`."""
    layer = op_registry_oot.get("MMEncoderAttention")
    # By name: the layer imports this module.
    return layer is not None and layer.__module__ == f"{__package__}.layer"


def selection_is_wrapped() -> bool:
    """Whether the platform in use selects backends by `answer_flash_attn`.

    Another plugin's wrapper may be around it.
    """
    layer: Any = current_platform.get_vit_attn_backend
    while layer is not None:
        function = getattr(layer, "__func__", layer)
        if getattr(function, "__globals__", None) is globals():
            return True
        layer = getattr(function, "__wrapped__", None)
    return False


def answer_flash_attn(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Platform.get_vit_attn_backend`; see this module's docstring."""

    @functools.wraps(original)
    def get_vit_attn_backend(
        cls: type,
        head_size: int,
        dtype: torch.dtype,
        backend: AttentionBackendEnum | None = None,
    ) -> AttentionBackendEnum:
        serving = current_platform.is_cuda() or current_platform.is_cpu()
        if backend != AttentionBackendEnum.FLASHINFER or not serving:
            return original(cls, head_size, dtype, backend)
        if served(head_size, dtype, Settings.from_env()) is None:
            return original(cls, head_size, dtype, None)
        if not layer_is_registered():
            raise NotServedError(
                "FLASHINFER was asked for, but vllm-flashinfer-vit could not register "
                "its layer in this process; the log says why"
            )
        logger.info_once(
            "vllm-flashinfer-vit serves FLASHINFER for multimodal encoders; models are "
            "told FLASH_ATTN, which also runs what this package does not replace."
        )
        return AttentionBackendEnum.FLASH_ATTN

    return get_vit_attn_backend

# SPDX-License-Identifier: Apache-2.0
"""What an engine's user is told: what serves, and which settings do nothing or help."""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vllm_flashinfer_vit.choices.lookup import Choice, fp8_lengths
from vllm_flashinfer_vit.machine.versions import runner_note, vllm_version
from vllm_flashinfer_vit.settings import (
    ENV_FP8_SCALES,
    ENV_FP8_SKIP_LAYERS,
    Settings,
    unknown_variables,
)

logger = logging.getLogger("vllm.plugins.flashinfer_vit")

FLAG = """--compilation-config '{"cudagraph_mm_encoder": true}'"""
# One image of 1x256, 1x1024 or 1x4096 patches: benchmarks/results/h200/eager.csv,
# provider `plugin`, the least and the most of eager over graph.
SPEED_UP = (1.1, 3.5)


def served_by(
    choices: Sequence[Choice], head_dim: int, dtype: torch.dtype
) -> Iterator[str]:
    """Say which kernels serve layers, and why these.

    Args:
        choices: The layers'.
        head_dim: Head dim in elements.
        dtype: Activation dtype.

    Yields:
        A sentence for each class of sequences.
    """
    for choice in choices:
        which = "longer sequences" if len(choices) > 1 else "all sequences"
        if choice.max_len is not None:
            which = f"sequences of up to {choice.max_len} tokens"
        yield (
            f"{which} (head dim {head_dim}, {dtype}) are served by {choice.served_by}: "
            f"{choice.reason}"
        )


def fp8_later(choices: Sequence[Choice], head_dim: int, how: str) -> str:
    """Say which lengths are left to FP8 where no pass would turn q and k.

    Args:
        choices: The layers', see `Arrival.later`.
        head_dim: Head dim in elements.
        how: See `Arrival`.
    """
    lengths = fp8_lengths(choices)
    served = f"sequences {lengths}" if lengths else "no length"
    return (
        f"attention of head dim {head_dim} gets q and k {how}, so FP8 saves no pass "
        f"that turns them there: it runs for {served}"
    )


def ignored(vllm_config: Any) -> Iterator[str]:
    """Say which settings have no effect.

    Args:
        vllm_config: vLLM's `VllmConfig` of an engine that asks for FLASHINFER.

    Yields:
        A sentence for each.
    """
    for problem in unknown_variables():
        yield problem.what
    # A tower outside an engine may have no model.
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if getattr(multimodal, "mm_encoder_attn_dtype", None) is None:
        settings = Settings.from_env()
        of_fp8 = {
            ENV_FP8_SCALES: settings.fp8_scales,
            ENV_FP8_SKIP_LAYERS: settings.fp8_skip_layers,
        }
        for name, value in of_fp8.items():
            if value:
                yield f"{name} has no effect without --mm-encoder-attn-dtype fp8"
    if vllm_config.compilation_config.cudagraph_mm_encoder and getattr(
        vllm_config.model_config, "enforce_eager", False
    ):
        yield (
            "cudagraph_mm_encoder has no effect with enforce_eager: vLLM captures no "
            "encoder CUDA graphs"
        )
    if vllm_config.compilation_config.cudagraph_mm_encoder and (
        note := _runner_note(vllm_config)
    ):
        yield note


def _runner_note(vllm_config: Any) -> str | None:
    """Say if the engine's runner ignores encoder CUDA graphs."""
    note = runner_note(vllm_version(), os.environ)
    # Asked last: a vLLM that has a single runner need not say which it is.
    return note if note and vllm_config.use_v2_model_runner else None


def graphs_off(vllm_config: Any) -> str | None:
    """Say what encoder CUDA graphs would bring an engine that runs without them.

    Args:
        vllm_config: vLLM's `VllmConfig` of an engine that asks for FLASHINFER.

    Returns:
        Sentences for the log; None where graphs are on, where the user turned all
        CUDA graphs off, where the model has none for its encoder, or where that cannot
        be told.
    """
    try:
        return _advice(vllm_config)
    except Exception:
        # No advice is worth an engine that does not start.
        logger.debug("no advice on encoder CUDA graphs", exc_info=True)
        return None


def _advice(vllm_config: Any) -> str | None:
    from vllm.config import CUDAGraphMode
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models.interfaces import supports_encoder_cudagraph

    model, compilation = vllm_config.model_config, vllm_config.compilation_config
    if (
        compilation.cudagraph_mm_encoder
        or compilation.cudagraph_mode == CUDAGraphMode.NONE
        # The Qwen models have no encoder graphs then.
        or model.multimodal_config.is_multimodal_pruning_enabled()
        or not supports_encoder_cudagraph(get_model_cls(model))
    ):
        return None
    least, most = SPEED_UP
    advice = (
        f"encoder CUDA graphs are off. On an H200 they made the vision towers of Qwen "
        f"models {least} to {most} times as fast for one image of up to 4096 patches, "
        f"which otherwise waits for Python. To turn them on, add {FLAG}."
    )
    note = _runner_note(vllm_config)
    return f"{advice} {note}" if note else advice

# SPDX-License-Identifier: Apache-2.0
"""Which faster method a linear layer that was just built gets, and what the log says.

Quantized layers, and layers that may get LoRA adapters, stay as they are.
"""

import importlib.util
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_flashinfer_vit.blocks.aligned_linear import AlignedLinearMethod, aligned_size
from vllm_flashinfer_vit.blocks.gelu_linear import GeluLinearMethod
from vllm_flashinfer_vit.blocks.quack_linear import QuackLinearMethod, fits

logger = init_logger("vllm.plugins.flashinfer_vit")


def align(first: Any, second: Any, parts: int) -> None:
    """Have what one layer returns and the other takes padded, if it is unaligned.

    Args:
        first: The layer in front of the activation, which must make 0 of 0.
        second: The layer after it.
        parts: Stacked projections in `first`.
    """
    size = second.input_size_per_partition
    added = aligned_size(size) - size
    if not added:
        return
    if reason := _not_plain(first) or _not_plain(second):
        logger.info_once(
            "The vision tower's MLPs keep rows of %d values, which are slow: %s.",
            size,
            reason,
        )
        return
    first.quant_method = AlignedLinearMethod(0, size, parts)
    second.quant_method = AlignedLinearMethod(1, size)
    for linear in (first, second):
        linear.quant_method.reserve(linear)
    values = added * (parts * first.weight.shape[1] + second.weight.shape[0])
    logger.info_once(
        "The vision tower's MLPs get rows of %d values instead of %d, which takes "
        "%.2f MiB more in each block.",
        size + added,
        size,
        values * second.weight.element_size() / 2**20,
    )


def fuse_tanh_gelu(linear: Any) -> bool:
    """Have cuBLASLt apply a layer's bias and the tanh GELU after it, if it can.

    Returns:
        Whether the layer's output is that of the GELU now.
    """
    if linear.bias is None or envs.VLLM_BATCH_INVARIANT or _not_plain(linear):
        return False
    linear.quant_method = GeluLinearMethod(linear.quant_method)
    return True


def fuse(linear: Any, act: torch.nn.Module, activation: str | None) -> bool:
    """Have QuACK run large batches of a layer and its activation, if it can here.

    Args:
        linear: The layer.
        act: What runs after it for the same result.
        activation: QuACK's name of what the layer's method and `act` apply to the
            layer's sum; None for nothing.

    Returns:
        Whether the layer's output is that of `act` now, for every batch.
    """
    if (
        envs.VLLM_BATCH_INVARIANT
        or not has_quack()
        or _not_plain(linear)
        or not fits(linear, activation)
    ):
        return False
    method = QuackLinearMethod(linear.quant_method, act, activation)
    linear.quant_method = method
    logger.info_once(
        "The vision tower runs %s as one kernel of QuACK, from %d rows on, in CUDA "
        "graphs from %d.",
        "an MLP's first GEMM, its bias and the activation"
        if activation
        else "the QKV projection and its bias",
        method.min_rows,
        method.min_graph_rows,
    )
    return True


def computes(act: Any, op: Any) -> bool:
    """Whether an activation is a vLLM op, or one that a platform has in its place."""
    return getattr(type(act), "forward_native", None) is op.forward_native


def has_quack() -> bool:
    """Whether QuACK is installed, and the GPU is of the kind it was measured on."""
    from vllm.platforms import current_platform

    return (
        current_platform.is_cuda()
        and current_platform.is_device_capability(90)
        and importlib.util.find_spec("quack") is not None
    )


def _not_plain(linear: Any) -> str | None:
    """Say why a linear layer must stay as it is, or None."""
    method = type(linear.quant_method)
    if method not in (UnquantizedLinearMethod, AlignedLinearMethod, GeluLinearMethod):
        return f"their weights are served by {method.__name__}"
    # Adapters are added to what the layer itself returns, in the checkpoint's size.
    lora = get_current_vllm_config().lora_config
    if lora is not None and lora.enable_tower_connector_lora:
        return "the tower may get LoRA adapters"
    return None

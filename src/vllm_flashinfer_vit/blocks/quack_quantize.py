# SPDX-License-Identifier: Apache-2.0
"""A block's QKV projection by QuACK, which writes what FP8 attention reads."""

import torch
from vllm.logger import init_logger

from vllm_flashinfer_vit.blocks.fp8_linear import Fp8Linear
from vllm_flashinfer_vit.blocks.layers import Layers
from vllm_flashinfer_vit.blocks.linear import Weights
from vllm_flashinfer_vit.blocks.quack_turn import Projection, as_layer
from vllm_flashinfer_vit.gemms import epilogue_gemm, quantizing_gemm
from vllm_flashinfer_vit.gemms.turning_gemm import Heads
from vllm_flashinfer_vit.ops.plan import LEAST_MEAN_LEN

logger = init_logger("vllm.plugins.flashinfer_vit")

# From how many rows to a sequence on it is faster on an H200 than another GEMM and the
# quantiser: of shorter ones too much of the last tile is empty (docs/experiments.md).
# Choices rely on it, see `arrival.quantized_by_projection`.
MIN_MEAN_ROWS = LEAST_MEAN_LEN


def resolve(
    layers: Layers,
    path: str,
    source: Weights | Fp8Linear,
    quantized: tuple[Heads, torch.dtype] | None,
) -> Projection[quantizing_gemm.Kernels] | None:
    """Return a projection's step that quantises q, k and v, or None and say why.

    Args:
        layers: Of the block.
        path: The layer's.
        source: Its parameters.
        quantized: What its outputs are, and the dtype of cosines and sines, if some
            kernel of attention reads them quantised.
    """
    if quantized is None or "quack_quantize" in layers.off:
        return None
    if not epilogue_gemm.is_available():
        return None
    heads, table = quantized
    like, dtype = as_layer(source), layers.part(path).params_dtype
    if not quantizing_gemm.fits(like, heads, table, dtype):
        return None
    key = "quack_quantize", *like.alike, heads, table, dtype
    if reason := layers.tried(key, quantizing_gemm.build, like, heads, table, dtype):
        logger.warning_once(
            "QuACK cannot quantise q, k and v in %s of the vision tower's blocks, so a "
            "pass of its own quantises them: %s",
            path,
            reason,
        )
        return None
    layers.steps[path] += (
        f"; from {MIN_MEAN_ROWS} rows to a sequence on QuACK quantises q, k and v"
    )
    kernels = layers.tower.gemms.get(key)
    if kernels is None:
        kernels = layers.tower.gemms[key] = quantizing_gemm.Kernels(
            like, heads, table, dtype, MIN_MEAN_ROWS
        )
    return Projection(source, kernels)

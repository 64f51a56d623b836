# SPDX-License-Identifier: Apache-2.0
"""A linear layer in FP8 whose rows vLLM pads to whole tiles, not to 16 values alone.

A GEMM in FP8 loads tiles of 128 values of a row, which are a line of the cache. Rows of
4304 values, as in SigLIP's MLP, begin within a line, and its GEMM takes a fifth longer
than one of 4352. vLLM pads when it has loaded a layer, and so does what is here: zeros
that meet zeros.
"""

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear.scaled_mm import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.utils import replace_parameter

from vllm_flashinfer_vit.blocks.aligned_linear import (
    inputs_of,
    into_room,
    offload_again,
    reserve_room,
    writes_past_loaders,
)

logger = init_logger("vllm.plugins.flashinfer_vit")

_TILE = 128


class TilesKernel(CutlassFP8ScaledMMLinearKernel):
    """vLLM's own for a layer whose weight gets rows of whole tiles."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pad the weight, `[inputs, outputs]` with contiguous columns, as vLLM does."""
        name = self.layer_param_names[0]
        stock = getattr(layer, name).data.t()
        added = -stock.shape[1] % _TILE
        if added:
            # Before vLLM pads to 16 values, by a tensor of its own.
            padded = into_room(stock, torch.nn.functional.pad(stock, (0, added)))
            replace_parameter(layer, name, padded.t())
        super().process_weights_after_loading(layer)
        if added:
            parameter = getattr(layer, name)
            # Loads what has the checkpoint's size, too.
            parameter.weight_loader = self.padded_weight_loader
            offload_again(parameter)

    def apply_scaled_mm(
        self, *, A: torch.Tensor, B: torch.Tensor, **others: Any
    ) -> torch.Tensor:
        """Multiply rows without padding, `[T, inputs]` e4m3, by a padded weight."""
        padded = torch.nn.functional.pad(A, (0, B.shape[0] - A.shape[1]))
        return super().apply_scaled_mm(A=padded, B=B, **others)


def pad_to_tiles(layer: Any, holder: Any, name: str) -> None:
    """Have a layer that is not loaded yet padded to whole tiles.

    Args:
        layer: The layer.
        holder: What holds its kernel, in the attribute `name`.
        name: See `holder`.
    """
    kernel, size = getattr(holder, name), inputs_of(layer)
    is_vllms = type(kernel) is CutlassFP8ScaledMMLinearKernel
    if not is_vllms or size % _TILE == 0 or writes_past_loaders():
        return
    setattr(holder, name, TilesKernel(kernel.config, kernel.layer_param_names))
    padded = size + -size % _TILE
    weight = getattr(layer, kernel.layer_param_names[0])
    # A checkpoint's own values stay there; those of 16 bits get a tensor in FP8 later.
    if weight.dtype == torch.float8_e4m3fn:
        reserve_room(weight, size, padded)
    logger.info_once(
        "The vision tower's MLPs in FP8 get rows of %d values instead of %d.",
        padded,
        size,
    )

# SPDX-License-Identifier: Apache-2.0
"""An MLP's activation in plain PyTorch: what `kernels/act_quantize.py` quantises."""

import torch
from torch.nn.functional import gelu, silu

from vllm_flashinfer_vit.kernels.formats import GELU_APPROXIMATE, Activation


def act_ref(
    values: torch.Tensor,
    width: int,
    bias: torch.Tensor | None,
    activation: Activation | None,
) -> torch.Tensor:
    """Add a bias and apply an activation, in fp32.

    Args:
        values: `[T, W]` floating point, any strides: `width` columns, twice as many of
            [gate; up] for `swiglu`; what is after them is not read.
        width: Columns of the result.
        bias: As many as columns that are read, or None.
        activation: What is computed; None for the values as they are.

    Returns:
        `[T, width]` fp32.
    """
    parts = 2 if activation == "swiglu" else 1
    total = values[:, : parts * width].float()
    if bias is not None:
        total = total + bias.float()
    if activation is None:
        return total
    if activation == "swiglu":
        return silu(total[:, :width]) * total[:, width:]
    if activation == "quick_gelu":
        return total * torch.sigmoid(1.702 * total)
    return gelu(total, approximate=GELU_APPROXIMATE[activation])

# SPDX-License-Identifier: Apache-2.0
"""Scales for what an MLP's activation returns, known before its first layer has run.

A layer's output is no larger than the norm of its row times the largest norm of its
weight's rows (Cauchy and Schwarz), and no GELU is larger than what it is given. Such a
scale is about ten times what the row's largest value would ask for, more where a few
channels are large. e4m3 has three bits at 2^-6 as at 448: what a larger scale costs are
values that are thousands of times smaller than the row's largest one.

A product of two outputs, as SwiGLU is, would be bounded ten times ten too high, so it
has no such scale.
"""

import torch

from vllm_flashinfer_vit.blocks.quack_gemm import Layer
from vllm_flashinfer_vit.kernels.formats import E4M3_MAX

# The norm is that of a row before it is rounded to e4m3, by 1/16 of a value at most.
_ROUNDED = 1 + 2**-4


def factors_of(layer: Layer) -> torch.Tensor:
    """Return `Bound.factors` of a first layer that a GELU follows: `[2]` fp32.

    Args:
        layer: Its parameters, in e4m3.
    """
    norms = torch.linalg.vector_norm(layer.weight.float(), dim=1)
    assert layer.col_scales is not None
    slope = (norms * layer.col_scales).amax() * _ROUNDED
    largest = torch.zeros_like(slope)
    if layer.bias is not None:
        largest = layer.bias.float().abs().amax()
    return torch.stack([slope, largest]) / E4M3_MAX

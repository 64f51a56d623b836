# SPDX-License-Identifier: Apache-2.0
"""MLPs' first layers with their activations: towers' sizes, and what they compute."""

import torch

from vllm_flashinfer_vit.gemms.activating_gemm import Act
from vllm_flashinfer_vit.gemms.epilogue_gemm import FP8

BF16 = torch.bfloat16
# Activation, inputs, outputs, those with padding, columns that are written in e4m3.
TOWERS = [
    ("quick_gelu", 1280, 5120, 5120, 5120),
    ("tanh_gelu", 1152, 4304, 4304, 4352),
    ("gelu", 1024, 4096, 4096, 4096),
    # Of a rank: no tile ends with it.
    ("tanh_gelu", 1152, 2152, 2160, 2176),
    ("swiglu", 1280, 6840, 6848, 3456),
    ("swiglu", 1536, 2 * 4096, 2 * 4096, 4096),
]


def act_of(tower, dtype=FP8):
    """What a tower's first layer and its activation are, by what is written."""
    activation, _, outputs, _, columns = tower
    if dtype != FP8:
        columns = -(-outputs // 2 // 8) * 8
    return Act(activation, outputs, columns, dtype)

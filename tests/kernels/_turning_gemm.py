# SPDX-License-Identifier: Apache-2.0
"""QKV projections that turn q and k: towers' sizes, layers of each kind of scales."""

import importlib.metadata
import importlib.util

import pytest
import torch

from vllm_flashinfer_vit.gemms.epilogue_gemm import Layer

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HAS_RUNTIME = False
if importlib.util.find_spec("quack") is not None:
    release = importlib.metadata.version("quack-kernels").split(".")
    HAS_RUNTIME = tuple(map(int, release[:2])) >= (0, 6)
# Head dim, heads of q and k, heads of v, interleaved pairs, inputs.
TOWERS = [
    (80, 32, 16, False, 1280),
    (72, 32, 16, False, 1152),
    (72, 24, 12, True, 1536),
    (64, 32, 16, True, 1024),
    (64, 24, 12, False, 768),
    (88, 4, 2, False, 256),
    (96, 6, 3, False, 288),
    (112, 3, 2, True, 224),
    (128, 24, 12, False, 1536),
    # Grouped queries: 12 and 4 heads, 4 of v.
    (80, 16, 4, False, 1280),
]
hopper = pytest.mark.skipif(
    not (HAS_HOPPER and HAS_RUNTIME), reason="needs a Hopper GPU and QuACK 0.6"
)


def make_layer(kind, weight, bias, rows):
    """A layer's parameters, with a kind of scales or in 16 bits."""
    if kind == "plain":
        return Layer(weight, bias)
    # Of vLLM's layers: one scale of all, one of each row, one of each row and output.
    row_scales, col_scales = {
        "tensor": (1, 1),
        "tokens": (rows, 1),
        "rows": (rows, len(weight)),
    }[kind]
    on = {"device": weight.device}
    return Layer(
        (weight.float() * 30).clamp(-400, 400).to(FP8),
        bias,
        torch.linspace(0.01, 0.03, row_scales, **on),
        torch.linspace(0.5, 2, col_scales, **on),
    )

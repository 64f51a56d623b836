# SPDX-License-Identifier: Apache-2.0
"""Sizes, activations and inputs of the GEMMs that QuACK runs, and what is right."""

import pytest
import torch
from torch.nn.functional import gelu, linear, silu

from vllm_flashinfer_vit.gemms import quack
from vllm_flashinfer_vit.gemms.quack import QUICK_GELU, SWIGLU, TANH_GELU

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
# Inputs and outputs of the models' layers: the MLPs of Qwen2-VL, Qwen2.5-VL (padded)
# and Qwen3-VL, and the QKV projection of the first two.
SIZES = {
    QUICK_GELU: (1280, 5120),
    SWIGLU: (1280, 6912),
    TANH_GELU: (1152, 4304),
    None: (1280, 3840),
}
ACTIVATIONS = {
    QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    SWIGLU: lambda x: silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    TANH_GELU: lambda x: gelu(x, approximate="tanh"),
    None: lambda x: x,
}


def make_inputs(
    rows: int,
    inputs: int,
    outputs: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    has_bias: bool = True,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x as a norm returns it, a weight and a bias; sums are about N(0, 1)."""
    random = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device="cuda")

    x = normal(rows, inputs).to(dtype)
    weight = (normal(outputs, inputs) / inputs**0.5).to(dtype)
    bias = normal(outputs).to(dtype) if has_bias else None
    return x, weight, bias


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    bias = None if bias is None else bias.float()
    return ACTIVATIONS[activation](linear(x.float(), weight.float(), bias))


def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    width: int,
) -> torch.Tensor:
    """What a call of `quack.prepare` writes, by QuACK's interface, nothing settled."""
    out = x.new_empty(len(x), len(weight) // (2 if activation == SWIGLU else 1))
    quack._run(x, weight, quack._row(bias, activation), out, activation, width)
    return out

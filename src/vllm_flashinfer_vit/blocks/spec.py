# SPDX-License-Identifier: Apache-2.0
"""What a block of a vision tower is: data, from which `program` makes its launches."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from vllm_flashinfer_vit.kernels.formats import Activation

# What the program does beside vLLM's own steps, by the names that settings leave it
# out by; the same for every tower.
OPTIMISATIONS: Mapping[str, str] = MappingProxyType(
    {
        "add_norm": "residual sums and the norm after them are one kernel",
        "aligned": "an MLP's rows are padded to whole loads of 16 bytes",
        "fp8_linear": "norms and activations quantise the rows of linear layers in FP8",
        "fused_gelu": "cuBLASLt applies the tanh GELU after an MLP's first GEMM",
        "quack_mlp": "QuACK runs an MLP's first GEMM with its activation",
        "quack_qkv": "QuACK runs the QKV projection",
    }
)


@dataclass(frozen=True)
class BlockSpec:
    """Where a block has its parts, and what they compute.

    A block is `y = x + proj(attention(qkv(norm1(x))))` and, of that,
    `y + second(act(first(norm2(y))))`. Parts are named by their path in the block.

    Attributes:
        norm: `layer` for a LayerNorm with bias, `rms` for vLLM's RMSNorm.
        activation: What `act` computes; `swiglu` takes stacked [gate; up].
        first: The MLP's first linear layer.
        act: Its activation.
        second: Its second linear layer.
        norm1: The norm in front of attention.
        norm2: The norm in front of the MLP.
        qkv: The projection to q, k and v, in this order.
        attention: The attention layer, which turns q and k by NeoX pairs.
        proj: The projection of what attention returns.
        split: The method that makes q, k and v, `[T, B, H, D]` each, of a projection
            whose ranks do not hold whole heads; None where each holds its own.
    """

    norm: Literal["layer", "rms"]
    activation: Activation
    first: str
    act: str
    second: str
    norm1: str = "norm1"
    norm2: str = "norm2"
    qkv: str = "attn.qkv"
    attention: str = "attn.attn"
    proj: str = "attn.proj"
    split: str | None = None

# SPDX-License-Identifier: Apache-2.0
"""Llama 4: dense batches, whose attention turns q and k by a table that it keeps."""

from typing import Any

import torch

from vllm_flashinfer_vit.blocks.spec import BlockSpec, Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods
from vllm_flashinfer_vit.models.own_rotary import turned_pairs

_ROTARY = "model_executor.layers.rotary_embedding.llama4_vision_rope"


def _pairs(block: Any, x: torch.Tensor, given: tuple[Any, ...]) -> torch.Tensor:
    attention = block.self_attn

    def turn(units: torch.Tensor) -> torch.Tensor:
        # [B, T, H, D]
        one = units[None, :, None]
        return attention.rotary_emb(one, one)[0]

    return turned_pairs(turn, x, attention.head_dim)


SPEC = BlockSpec(
    first="mlp.fc1",
    act="mlp.activation_fn",
    second="mlp.fc2",
    norm1="input_layernorm",
    norm2="post_attention_layernorm",
    qkv="self_attn.qkv_proj",
    attention="self_attn.attn",
    proj="self_attn.o_proj",
    rotary=Rotary("complex", (), own=_pairs),
    is_packed=False,
    returned_with=(),
    is_compiled_whole=True,
)

PATCHES = (
    block_program(
        "mllama4",
        "Llama4VisionEncoderLayer",
        SPEC,
        (
            *methods("mllama4", "Llama4VisionAttention", "Llama4VisionMLP"),
            # It turns by pairs, all heads and images alike.
            f"{_ROTARY}:Llama4VisionRotaryEmbedding.forward_native",
            f"{_ROTARY}:Llama4VisionRotaryEmbedding.forward_cuda",
        ),
        ("self", "hidden_state"),
    ),
)

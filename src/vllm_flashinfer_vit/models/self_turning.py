# SPDX-License-Identifier: Apache-2.0
"""Llama 4 and Step-VL: dense batches, whose attention turns q and k by tables it keeps.

Both turn by pairs that lie side by side. Step-VL scales what its branches add.
"""

from collections.abc import Callable
from typing import Any

import torch

from vllm_flashinfer_vit.blocks.spec import BlockSpec, Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods


def _turned(
    turn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, head_dim: int
) -> torch.Tensor:
    """Return what pairs are turned by, `[T, D / 2, 2]`: 1, 0 becomes cos, sin.

    Args:
        turn: Turns `[T, D]`.
        x: The stream `[B, T, C]`.
        head_dim: D.
    """
    units = x.new_zeros(x.shape[1], head_dim, dtype=torch.float32)
    units[:, ::2] = 1
    return turn(units).view(len(units), -1, 2)


def _llama_4(block: Any, x: torch.Tensor, given: tuple[Any, ...]) -> torch.Tensor:
    attention = block.self_attn

    def turn(units: torch.Tensor) -> torch.Tensor:
        # [B, T, H, D]
        one = units[None, :, None]
        return attention.rotary_emb(one, one)[0]

    return _turned(turn, x, attention.head_dim)


def _step(block: Any, x: torch.Tensor, given: tuple[Any, ...]) -> torch.Tensor:
    def turn(units: torch.Tensor) -> torch.Tensor:
        # [B, H, T, D]
        one = units[None, None]
        return block.attn.rope(one, one, grid_hw=given[0])[0]

    return _turned(turn, x, block.attn.head_dim)


LLAMA_4 = BlockSpec(
    first="mlp.fc1",
    act="mlp.activation_fn",
    second="mlp.fc2",
    norm1="input_layernorm",
    norm2="post_attention_layernorm",
    qkv="self_attn.qkv_proj",
    attention="self_attn.attn",
    proj="self_attn.o_proj",
    rotary=Rotary("complex", (), own=_llama_4),
    is_packed=False,
    returned_with=(),
)
STEP = BlockSpec(
    first="mlp.fc1",
    act="mlp.activation",
    second="mlp.fc2",
    norm1="ln_1",
    norm2="ln_2",
    qkv="attn.qkv_proj",
    proj="attn.out_proj",
    rotary=Rotary("complex", ("grid_hw",), own=_step),
    layer_scales=("ls_1.gamma", "ls_2.gamma"),
    is_packed=False,
)

_LLAMA_4_TURNS = "model_executor.layers.rotary_embedding.llama4_vision_rope"

PATCHES = (
    block_program(
        "mllama4",
        "Llama4VisionEncoderLayer",
        LLAMA_4,
        (
            *methods("mllama4", "Llama4VisionAttention", "Llama4VisionMLP"),
            # It turns by pairs, all heads and images alike.
            f"{_LLAMA_4_TURNS}:Llama4VisionRotaryEmbedding.forward_native",
            f"{_LLAMA_4_TURNS}:Llama4VisionRotaryEmbedding.forward_cuda",
        ),
        ("self", "hidden_state"),
    ),
    block_program(
        "step_vl",
        "PerceptionEncoderVisionBlock",
        STEP,
        (
            *methods(
                "step_vl",
                "PerceptionEncoderVisionAttention",
                "PerceptionEncoderMLP",
                "PerceptionEncoderLayerScale",
                "PerceptionEncoderRope2D",
            ),
            "step_vl:apply_rotary_emb",
            "step_vl:rotate_half",
            # All blocks of a tower keep the same tables.
            "step_vl:PerceptionEncoderVisionTransformer.__init__",
        ),
        ("self", "x", "grid_hw"),
    ),
)

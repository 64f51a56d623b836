# SPDX-License-Identifier: Apache-2.0
"""Step-VL: dense batches, whose attention turns q and k by tables that it keeps.

It scales what its branches add.
"""

from typing import Any

import torch

from vllm_flashinfer_vit.blocks.spec import BlockSpec, Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods
from vllm_flashinfer_vit.models.own_rotary import turned_pairs


def _pairs(block: Any, x: torch.Tensor, given: tuple[Any, ...]) -> torch.Tensor:
    def turn(units: torch.Tensor) -> torch.Tensor:
        # [B, H, T, D]
        one = units[None, None]
        return block.attn.rope(one, one, grid_hw=given[0])[0]

    return turned_pairs(turn, x, block.attn.head_dim)


SPEC = BlockSpec(
    first="mlp.fc1",
    act="mlp.activation",
    second="mlp.fc2",
    norm1="ln_1",
    norm2="ln_2",
    qkv="attn.qkv_proj",
    proj="attn.out_proj",
    rotary=Rotary("complex", ("grid_hw",), own=_pairs),
    layer_scales=("ls_1.gamma", "ls_2.gamma"),
    is_packed=False,
)

PATCHES = (
    block_program(
        "step_vl",
        "PerceptionEncoderVisionBlock",
        SPEC,
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

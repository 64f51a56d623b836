# SPDX-License-Identifier: Apache-2.0
"""Kimi-VL and Kimi K2.5, by two MoonViTs of the same parts.

They have complex rotary, by pairs that lie side by side.
"""

import functools
from typing import Any

import torch

from vllm_flashinfer_vit.blocks.spec import BlockSpec, Rotary
from vllm_flashinfer_vit.models._shared import (
    MODELS,
    Function,
    block_program,
    is_served,
    methods,
)
from vllm_flashinfer_vit.models.longest import REMOVE_WHEN, WHY, largest_frame
from vllm_flashinfer_vit.patches.patch import Patch

SPEC = BlockSpec(
    first="mlp.fc0",
    act="mlp.activation",
    second="mlp.fc1",
    norm1="norm0",
    norm2="norm1",
    qkv="wqkv",
    attention="attn",
    proj="wo",
    rotary=Rotary("complex", ("rope_freqs_cis",)),
)

_PACKED_ROPE = "model_executor.layers.rotary_embedding.packed_qk_rope"
_PARAMETERS = ("self", "hidden_states", "cu_seqlens", "rope_freqs_cis", "max_seqlen")
_MOONVIT = f"{MODELS}.moonvit:MoonVitEncoder.forward"


def _hand_over(original: Function) -> Function:
    @functools.wraps(original)
    def forward(
        self: Any, hidden_states: torch.Tensor, grid_hw: Any = None, **prepared: Any
    ) -> torch.Tensor:
        # Its own attention, `attn`, is in the block itself.
        if not prepared and is_served(self.blocks[0]):
            prepared = {"max_seqlen": largest_frame(grid_hw)}
        return original(self, hidden_states, grid_hw, **prepared)

    return forward


PATCHES = (
    block_program(
        "moonvit",
        "MoonVitEncoderLayer",
        SPEC,
        (
            *methods("moonvit", "MLP2"),
            "moonvit:MoonVitEncoderLayer.attention_qkvpacked",
            "moonvit:apply_rope",
        ),
        _PARAMETERS,
    ),
    Patch(
        name="moonvit-longest",
        target=_MOONVIT,
        stands_for=(_MOONVIT,),
        why=WHY,
        remove_when=REMOVE_WHEN,
        parameters=(
            *("self", "hidden_states", "grid_hw"),
            *("cu_seqlens", "rope_freqs_cis", "max_seqlen"),
        ),
        replace=_hand_over,
    ),
    block_program(
        "kimi_k25_vit",
        "MoonViTEncoderLayer",
        SPEC,
        (
            *methods("kimi_k25_vit", "MLP2"),
            "kimi_k25_vit:MoonViTEncoderLayer.attention_qkvpacked",
        ),
        (*_PARAMETERS, "sequence_lengths"),
        helpers=(
            "kimi_k25_vit:apply_rope",
            "kimi_k25_vit:_make_vision_norm",
            f"{_PACKED_ROPE}:packed_qk_rope_",
            f"{_PACKED_ROPE}:_packed_qk_rope_kernel",
        ),
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M3: a part of each head is turned, by halves."""

from vllm_flashinfer_vit.blocks.spec import BlockSpec, Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods

_FAMILY = "models.minimax_m3.common.vision_tower"
_MROPE = "model_executor.layers.rotary_embedding.mrope"

SPEC = BlockSpec(
    first="fc1",
    act="act",
    second="fc2",
    norm1="layer_norm1",
    norm2="layer_norm2",
    qkv="self_attn.qkv_proj",
    attention="self_attn.attn",
    proj="self_attn.out_proj",
    rotary=Rotary("planes", ("rotary_cos", "rotary_sin"), dim="self_attn.rotary_dim"),
)

PATCHES = (
    block_program(
        _FAMILY,
        "MiniMaxVLEncoderLayer",
        SPEC,
        (
            *methods(_FAMILY, "MiniMaxVLAttention"),
            f"{_MROPE}:triton_mrope",
            f"{_MROPE}:_triton_mrope_forward",
        ),
        (
            "self",
            "x",
            "cu_seqlens",
            "rotary_cos",
            "rotary_sin",
            "max_seqlen",
            "sequence_lengths",
        ),
        name="minimax_m3",
    ),
)

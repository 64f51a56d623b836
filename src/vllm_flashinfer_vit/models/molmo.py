# SPDX-License-Identifier: Apache-2.0
"""Molmo 2: dense batches of crops of one size, no rotary."""

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.models._shared import block_program, methods

SPEC = BlockSpec(
    first="feed_forward.w1",
    act="feed_forward.act",
    second="feed_forward.w2",
    norm1="attention_norm",
    norm2="ffn_norm",
    qkv="attention.merged_qkv",
    attention="attention.attn",
    proj="attention.wo",
    rotary=None,
    is_packed=False,
)

PATCHES = (
    block_program(
        "molmo2",
        "Molmo2VisionBlock",
        SPEC,
        methods("molmo2", "ViTMultiHeadDotProductAttention", "ViTMLP"),
        ("self", "x"),
    ),
)

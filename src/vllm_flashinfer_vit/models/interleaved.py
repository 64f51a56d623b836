# SPDX-License-Identifier: Apache-2.0
"""The towers of Kimi and Pixtral: complex rotary, by pairs that lie side by side.

Pixtral's tower of the Transformers format has NeoX pairs, of tables that are doubled.
"""

import dataclasses

from vllm_flashinfer_vit.blocks.spec import BlockSpec, Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods

KIMI = BlockSpec(
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
PIXTRAL = BlockSpec(
    first="feed_forward.gate_up_proj",
    act="feed_forward.act_fn",
    second="feed_forward.down_proj",
    norm1="attention_norm",
    norm2="ffn_norm",
    qkv="attention.qkv_proj",
    attention="attention.attn",
    proj="attention.o_proj",
    rotary=Rotary("complex", ("freqs_cis",)),
)
PIXTRAL_HF = dataclasses.replace(
    PIXTRAL,
    act="feed_forward.act_and_mul",
    rotary=Rotary("doubled", ("rotary_pos_emb_cos", "rotary_pos_emb_sin")),
)

_LENGTHS = ("cu_seqlens", "max_seqlen", "sequence_lengths")

PATCHES = (
    # Kimi-VL's, of the same parts as Kimi K2.5's.
    block_program(
        "moonvit",
        "MoonVitEncoderLayer",
        KIMI,
        (
            *methods("moonvit", "MLP2"),
            "moonvit:MoonVitEncoderLayer.attention_qkvpacked",
        ),
        ("self", "hidden_states", "cu_seqlens", "rope_freqs_cis", "max_seqlen"),
    ),
    block_program(
        "kimi_k25_vit",
        "MoonViTEncoderLayer",
        KIMI,
        (
            *methods("kimi_k25_vit", "MLP2"),
            "kimi_k25_vit:MoonViTEncoderLayer.attention_qkvpacked",
        ),
        ("self", "hidden_states", "cu_seqlens", "rope_freqs_cis", *_LENGTHS[1:]),
    ),
    block_program(
        "pixtral",
        "TransformerBlock",
        PIXTRAL,
        methods("pixtral", "Attention", "FeedForward"),
        ("self", "x", "freqs_cis", *_LENGTHS),
    ),
    block_program(
        "pixtral",
        "PixtralHFTransformerBlock",
        PIXTRAL_HF,
        methods("pixtral", "PixtralHFAttention", "PixtralHFMLP"),
        (
            "self",
            "hidden_states",
            "rotary_pos_emb_cos",
            "rotary_pos_emb_sin",
            *_LENGTHS,
        ),
        name="pixtral_hf",
    ),
)

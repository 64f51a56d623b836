# SPDX-License-Identifier: Apache-2.0
"""Pixtral: complex rotary, by pairs that lie side by side.

Its tower of the Transformers format has NeoX pairs, of tables that are doubled.
"""

import dataclasses

from vllm_flashinfer_vit.blocks.spec import BlockSpec, Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods

SPEC = BlockSpec(
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
HF = dataclasses.replace(
    SPEC,
    act="feed_forward.act_and_mul",
    rotary=Rotary("doubled", ("rotary_pos_emb_cos", "rotary_pos_emb_sin")),
)

_LENGTHS = ("cu_seqlens", "max_seqlen", "sequence_lengths")

PATCHES = (
    block_program(
        "pixtral",
        "TransformerBlock",
        SPEC,
        (
            *methods("pixtral", "Attention", "FeedForward"),
            "pixtral:apply_rotary_emb_vit",
        ),
        ("self", "x", "freqs_cis", *_LENGTHS),
        helpers=(
            "pixtral:_apply_rotary_emb_vit_complex",
            "pixtral:_apply_rotary_emb_vit_real",
        ),
    ),
    block_program(
        "pixtral",
        "PixtralHFTransformerBlock",
        HF,
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

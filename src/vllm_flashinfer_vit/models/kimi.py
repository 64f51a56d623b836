# SPDX-License-Identifier: Apache-2.0
"""Kimi-VL and Kimi K2.5, by two MoonViTs of the same parts.

They have complex rotary, by pairs that lie side by side.
"""

from vllm_flashinfer_vit.blocks.spec import BlockSpec, Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods

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

_PARAMETERS = ("self", "hidden_states", "cu_seqlens", "rope_freqs_cis", "max_seqlen")

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
    block_program(
        "kimi_k25_vit",
        "MoonViTEncoderLayer",
        SPEC,
        (
            *methods("kimi_k25_vit", "MLP2"),
            "kimi_k25_vit:MoonViTEncoderLayer.attention_qkvpacked",
        ),
        (*_PARAMETERS, "sequence_lengths"),
    ),
)

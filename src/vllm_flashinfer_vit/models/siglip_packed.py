# SPDX-License-Identifier: Apache-2.0
"""SigLIP's blocks on packed images of any size: Keye-VL, Ovis2.5, LFM2-VL and Isaac.

The first two turn q and k, by one pair of tables that all their blocks get.
"""

import dataclasses

from vllm_flashinfer_vit.blocks.spec import Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods
from vllm_flashinfer_vit.models.siglip import CLIP

PACKED = dataclasses.replace(CLIP, is_packed=True)
KEYE = dataclasses.replace(PACKED, rotary=Rotary("pair", ("rope_emb",)))
OVIS = dataclasses.replace(PACKED, rotary=Rotary("pair", ("position_embeddings",)))

PATCHES = (
    block_program(
        "keye",
        "KeyeSiglipEncoderLayer",
        KEYE,
        (
            *methods("keye", "KeyeSiglipAttention"),
            *methods("siglip", "SiglipMLP"),
            # Where the tables come from, whose halves are alike.
            "keye:KeyeSiglipEncoder.forward",
        ),
        (
            "self",
            "hidden_states",
            "attention_mask",
            "output_attentions",
            "cu_seqlens",
            "rope_emb",
        ),
    ),
    block_program(
        "siglip2navit",
        "Siglip2EncoderLayer",
        OVIS,
        (
            *methods("siglip2navit", "Siglip2Attention", "Siglip2MLP"),
            "siglip2navit:Siglip2Encoder.forward",
        ),
        ("self", "hidden_states", "cu_seqlens", "position_embeddings"),
    ),
    block_program(
        "lfm2_siglip2",
        "Siglip2EncoderLayer",
        PACKED,
        methods("lfm2_siglip2", "Siglip2Attention", "Siglip2MLP"),
        ("self", "hidden_states", "cu_seqlens", "max_seqlen"),
    ),
    block_program(
        "isaac",
        "Siglip2EncoderLayer",
        PACKED,
        (
            *methods("isaac", "Siglip2VisionAttention"),
            *methods("siglip", "SiglipMLP"),
            "isaac:Siglip2VisionAttention.split_qkv",
        ),
        ("self", "hidden_states", "cu_seqlens", "max_seqlen"),
    ),
)

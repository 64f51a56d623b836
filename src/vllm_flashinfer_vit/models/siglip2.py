# SPDX-License-Identifier: Apache-2.0
"""SigLIP 2 on packed images of any size: in Ovis2.5, LFM2-VL and Isaac.

Ovis2.5's turns q and k, by one pair of tables that all its blocks get.
"""

import dataclasses

from vllm_flashinfer_vit.blocks.spec import Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods
from vllm_flashinfer_vit.models.siglip import CLIP

SPEC = dataclasses.replace(CLIP, is_packed=True)
OVIS = dataclasses.replace(SPEC, rotary=Rotary("pair", ("position_embeddings",)))

PATCHES = (
    block_program(
        "siglip2navit",
        "Siglip2EncoderLayer",
        OVIS,
        (
            *methods("siglip2navit", "Siglip2Attention", "Siglip2MLP"),
            "siglip2navit:apply_rotary_pos_emb",
            # Where the tables come from, whose halves are alike.
            "siglip2navit:Siglip2Encoder.forward",
        ),
        ("self", "hidden_states", "cu_seqlens", "position_embeddings"),
    ),
    block_program(
        "lfm2_siglip2",
        "Siglip2EncoderLayer",
        SPEC,
        methods("lfm2_siglip2", "Siglip2Attention", "Siglip2MLP"),
        ("self", "hidden_states", "cu_seqlens", "max_seqlen"),
    ),
    block_program(
        "isaac",
        "Siglip2EncoderLayer",
        SPEC,
        (
            *methods("isaac", "Siglip2VisionAttention"),
            *methods("siglip", "SiglipMLP"),
            "isaac:Siglip2VisionAttention.split_qkv",
        ),
        ("self", "hidden_states", "cu_seqlens", "max_seqlen"),
    ),
)

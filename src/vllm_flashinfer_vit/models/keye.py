# SPDX-License-Identifier: Apache-2.0
"""Keye-VL: SigLIP's blocks on packed images, turned by one pair of tables."""

import dataclasses

from vllm_flashinfer_vit.blocks.spec import Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods
from vllm_flashinfer_vit.models.siglip import CLIP

SPEC = dataclasses.replace(CLIP, is_packed=True, rotary=Rotary("pair", ("rope_emb",)))

PATCHES = (
    block_program(
        "keye",
        "KeyeSiglipEncoderLayer",
        SPEC,
        (
            *methods("keye", "KeyeSiglipAttention"),
            *methods("siglip", "SiglipMLP"),
            "keye:apply_rotary_pos_emb_flashatt",
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
)

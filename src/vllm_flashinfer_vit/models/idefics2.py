# SPDX-License-Identifier: Apache-2.0
"""Idefics2, the tower of Idefics3, Aria and MiniCPM-V: SigLIP's blocks with a mask.

MiniCPM-V gives them one of the padding, with which vLLM's own attend by PyTorch's SDPA,
past any layer.
"""

import dataclasses

from vllm_flashinfer_vit.models._shared import block_program, methods
from vllm_flashinfer_vit.models.siglip import CLIP

_FAMILY = "idefics2_vision_model"

SPEC = dataclasses.replace(CLIP, key_mask="attention_mask")

PATCHES = (
    block_program(
        _FAMILY,
        "Idefics2EncoderLayer",
        SPEC,
        (
            *methods(_FAMILY, "Idefics2VisionAttention", "Idefics2VisionMLP"),
            # Where the mask comes from, in which padding comes after tokens.
            f"{_FAMILY}:Idefics2VisionTransformer.forward",
            *(
                f"minicpmv:MiniCPMV{version}.get_vision_hidden_states"
                for version in ("2_5", "2_6", "4_0", "4_5")
            ),
            "minicpmv4_6:MiniCPMV4_6ForConditionalGeneration.get_vision_hidden_states",
            "minicpmv4_6:MiniCPMV4_6ViTWindowAttentionMerger.forward",
        ),
        ("self", "hidden_states", "attention_mask"),
    ),
)

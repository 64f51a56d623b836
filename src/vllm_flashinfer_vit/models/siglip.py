# SPDX-License-Identifier: Apache-2.0
"""SigLIP, and CLIP and BLIP-2 of its parts: dense batches of one size, no rotary.

That is SigLIP in Gemma 3, PaliGemma and LLaVA, CLIP in LLaVA, Phi-3-Vision and
DeepSeek-OCR.
"""

import dataclasses

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.models._shared import block_program, methods

SIGLIP = BlockSpec(
    first="mlp.fc1",
    act="mlp.activation_fn",
    second="mlp.fc2",
    norm1="layer_norm1",
    norm2="layer_norm2",
    qkv="self_attn.qkv_proj",
    attention="self_attn.attn",
    proj="self_attn.out_proj",
    rotary=None,
    is_packed=False,
    returned_with=(None,),
)
CLIP = dataclasses.replace(SIGLIP, returned_with=None)
BLIP = dataclasses.replace(CLIP, qkv="self_attn.qkv", proj="self_attn.projection")

PATCHES = (
    block_program(
        "siglip",
        "SiglipEncoderLayer",
        SIGLIP,
        methods("siglip", "SiglipAttention", "SiglipMLP"),
        ("self", "hidden_states"),
    ),
    # A text tower's attention is no vision layer, so its blocks stay vLLM's.
    block_program(
        "clip",
        "CLIPEncoderLayer",
        CLIP,
        methods("clip", "CLIPAttention", "CLIPMLP"),
        ("self", "hidden_states"),
    ),
    block_program(
        "blip",
        "BlipEncoderLayer",
        BLIP,
        methods("blip", "BlipAttention", "BlipMLP"),
        ("self", "hidden_states"),
    ),
)

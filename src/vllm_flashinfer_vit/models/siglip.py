# SPDX-License-Identifier: Apache-2.0
"""SigLIP, and the towers of its kind: dense batches of images of one size, no rotary.

That is SigLIP in Gemma 3, PaliGemma and LLaVA, Idefics2's in Idefics3 and Aria, and
InternViT, which scales what its branches add. MiniCPM-V gives Idefics2's blocks a mask
of the padding, with which vLLM's own attend by PyTorch's SDPA, past any layer.
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
    returns_pair=True,
)
IDEFICS2 = dataclasses.replace(SIGLIP, returns_pair=False, key_mask="attention_mask")
INTERN = BlockSpec(
    first="mlp.fc1",
    act="mlp.activation_fn",
    second="mlp.fc2",
    rotary=None,
    layer_scales=("ls1", "ls2"),
    is_packed=False,
)

PATCHES = (
    block_program(
        "siglip",
        "SiglipEncoderLayer",
        SIGLIP,
        methods("siglip", "SiglipAttention", "SiglipMLP"),
        ("self", "hidden_states"),
    ),
    block_program(
        "idefics2_vision_model",
        "Idefics2EncoderLayer",
        IDEFICS2,
        (
            *methods(
                "idefics2_vision_model", "Idefics2VisionAttention", "Idefics2VisionMLP"
            ),
            # Where the mask comes from, in which padding comes after tokens.
            "idefics2_vision_model:Idefics2VisionTransformer.forward",
            *(
                f"minicpmv:MiniCPMV{version}.get_vision_hidden_states"
                for version in ("2_5", "2_6", "4_0", "4_5")
            ),
            "minicpmv4_6:MiniCPMV4_6ForConditionalGeneration.get_vision_hidden_states",
            "minicpmv4_6:MiniCPMV4_6ViTWindowAttentionMerger.forward",
        ),
        ("self", "hidden_states", "attention_mask"),
    ),
    block_program(
        "intern_vit",
        "InternVisionEncoderLayer",
        INTERN,
        methods("intern_vit", "InternParallelAttention", "InternMLP"),
        ("self", "hidden_states"),
    ),
)

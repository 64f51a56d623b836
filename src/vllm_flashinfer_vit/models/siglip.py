# SPDX-License-Identifier: Apache-2.0
"""SigLIP, and the towers of its kind: dense batches of images of one size, no rotary.

That is SigLIP in Gemma 3, PaliGemma and LLaVA, CLIP in LLaVA, Phi-3-Vision and
DeepSeek-OCR, BLIP-2's, Moondream's and Molmo 2's, Idefics2's in Idefics3 and Aria,
AIMv2 in Ovis, with RMSNorm and SwiGLU, and InternViT and RADIO, which scale what their
branches add.
MiniCPM-V gives Idefics2's blocks a mask of the padding, with which vLLM's own attend by
PyTorch's SDPA, past any layer.
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
MOONDREAM = BlockSpec(
    first="mlp.fc1",
    act="mlp.act",
    second="mlp.fc2",
    norm1="ln1",
    norm2="ln2",
    qkv="attn.qkv_proj",
    proj="attn.out_proj",
    rotary=None,
    is_packed=False,
)
MOLMO_2 = BlockSpec(
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
AIMV2 = BlockSpec(
    first="mlp.fc13",
    act="mlp.act_fn",
    second="mlp.fc2",
    norm1="norm_1",
    norm2="norm_2",
    rotary=None,
    is_packed=False,
)
IDEFICS2 = dataclasses.replace(CLIP, key_mask="attention_mask")
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
    block_program(
        "moondream3",
        "Moondream3VisionBlock",
        MOONDREAM,
        methods("moondream3", "Moondream3VisionAttention", "Moondream3VisionMLP"),
        ("self", "x"),
    ),
    block_program(
        "molmo2",
        "Molmo2VisionBlock",
        MOLMO_2,
        methods("molmo2", "ViTMultiHeadDotProductAttention", "ViTMLP"),
        ("self", "x"),
    ),
    block_program(
        "aimv2",
        "AIMv2Block",
        AIMV2,
        methods("aimv2", "AIMv2Attention", "AIMv2SwiGLUFFN"),
        ("self", "x"),
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
    # Its packed batches, which an object describes, run by vLLM's own steps.
    block_program(
        "radio",
        "RadioVisionEncoderLayer",
        INTERN,
        (
            "radio:RadioParallelAttention.forward",
            "intern_vit:InternVisionEncoderLayer.__init__",
            "intern_vit:InternParallelAttention.__init__",
            *methods("intern_vit", "InternMLP"),
        ),
        ("self", "hidden_states", "mask_meta"),
    ),
)

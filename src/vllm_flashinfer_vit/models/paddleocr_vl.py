# SPDX-License-Identifier: Apache-2.0
"""PaddleOCR-VL: blocks like SigLIP's, NeoX rotary, by angles that each layer gets."""

from operator import attrgetter

from vllm_flashinfer_vit.blocks.spec import ANGLES, BlockSpec
from vllm_flashinfer_vit.models._shared import ANGLE_PARAMETERS, block_program, methods

SPEC = BlockSpec(
    first="mlp.fc1",
    act="mlp.activation_fn",
    second="mlp.fc2",
    norm1="layer_norm1",
    norm2="layer_norm2",
    qkv="self_attn.qkv_proj",
    attention="self_attn.attn",
    proj="self_attn.out_proj",
    split=attrgetter("self_attn.split_qkv"),
    rotary=ANGLES,
)

PATCHES = (
    block_program(
        "paddleocr_vl",
        "SiglipEncoderLayer",
        SPEC,
        (
            *methods("paddleocr_vl", "SiglipAttention"),
            *methods("siglip", "SiglipMLP"),
            "paddleocr_vl:SiglipAttention.split_qkv",
        ),
        ANGLE_PARAMETERS,
    ),
)

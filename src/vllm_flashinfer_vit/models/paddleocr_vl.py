# SPDX-License-Identifier: Apache-2.0
"""PaddleOCR-VL: blocks like SigLIP's, NeoX rotary, by angles that each layer gets."""

import dataclasses

from vllm_flashinfer_vit.blocks.spec import ANGLES
from vllm_flashinfer_vit.models._shared import ANGLE_PARAMETERS, block_program, methods
from vllm_flashinfer_vit.models.siglip import CLIP

SPEC = dataclasses.replace(CLIP, is_packed=True, rotary=ANGLES)

PATCHES = (
    block_program(
        "paddleocr_vl",
        "SiglipEncoderLayer",
        SPEC,
        (
            *methods("paddleocr_vl", "SiglipAttention"),
            *methods("siglip", "SiglipMLP"),
            "paddleocr_vl:SiglipAttention.split_qkv",
            "paddleocr_vl:all_gather_interleave",
        ),
        ANGLE_PARAMETERS,
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""dots.ocr: NeoX rotary, by angles that each layer gets."""

from vllm_flashinfer_vit.blocks.spec import ANGLES, BlockSpec
from vllm_flashinfer_vit.models._shared import ANGLE_PARAMETERS, block_program, methods
from vllm_flashinfer_vit.models.longest import longest_on_host

SPEC = BlockSpec(
    first="mlp.fc13",
    act="mlp.act_fn",
    second="mlp.fc2",
    rotary=ANGLES,
)

PATCHES = (
    block_program(
        "dots_ocr",
        "DotsVisionBlock",
        SPEC,
        (
            *methods("dots_ocr", "DotsVisionAttention", "DotsSwiGLUFFN"),
            "qwen2_vl:Qwen2VisionAttention.split_qkv",
        ),
        ANGLE_PARAMETERS,
    ),
    longest_on_host("dots_ocr", "DotsVisionTransformer", "hidden_states"),
)

# SPDX-License-Identifier: Apache-2.0
"""ERNIE-4.5-VL: NeoX rotary, by angles that each layer gets.

Stock takes cosines and sines of them in every layer; a program does once in a pass.
"""

from vllm_flashinfer_vit.blocks.spec import ANGLES, BlockSpec
from vllm_flashinfer_vit.models._shared import ANGLE_PARAMETERS, block_program, methods

SPEC = BlockSpec(
    first="mlp.fc1",
    act="mlp.act",
    second="mlp.fc2",
    rotary=ANGLES,
)

PATCHES = (
    block_program(
        "ernie45_vl",
        "Ernie4_5_VisionBlock",
        SPEC,
        (
            *methods("ernie45_vl", "Ernie4_5_VisionAttention", "Ernie4_5_VisionMLP"),
            "ernie45_vl:Ernie4_5_VisionAttention.split_qkv",
            "ernie45_vl:all_gather_interleave",
        ),
        ANGLE_PARAMETERS,
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""AIMv2, the tower of Ovis: dense batches of one size, RMSNorm, SwiGLU, no rotary."""

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.models._shared import block_program, methods

SPEC = BlockSpec(
    first="mlp.fc13",
    act="mlp.act_fn",
    second="mlp.fc2",
    norm1="norm_1",
    norm2="norm_2",
    rotary=None,
    is_packed=False,
)

PATCHES = (
    block_program(
        "aimv2",
        "AIMv2Block",
        SPEC,
        methods("aimv2", "AIMv2Attention", "AIMv2SwiGLUFFN"),
        ("self", "x"),
    ),
)

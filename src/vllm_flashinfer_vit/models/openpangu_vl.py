# SPDX-License-Identifier: Apache-2.0
"""openPangu-VL: blocks like Qwen2.5-VL's, with an MLP of one activation."""

from vllm_flashinfer_vit.blocks.spec import BlockSpec, Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods

SPEC = BlockSpec(
    first="mlp.up_proj",
    act="mlp.act_fn",
    second="mlp.down_proj",
    rotary=Rotary("tables", ("cos", "sin")),
)

PATCHES = (
    block_program(
        "openpangu_vl",
        "OpenPanguVisionBlock",
        SPEC,
        methods("openpangu_vl", "OpenPanguVisionAttention", "OpenPanguVisionMLP"),
        ("self", "hidden_states", "cu_seqlens", "cos", "sin"),
    ),
)

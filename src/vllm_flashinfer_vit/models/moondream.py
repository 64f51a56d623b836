# SPDX-License-Identifier: Apache-2.0
"""Moondream 3: dense batches of crops of one size, no rotary."""

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.models._shared import block_program, methods

SPEC = BlockSpec(
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

PATCHES = (
    block_program(
        "moondream3",
        "Moondream3VisionBlock",
        SPEC,
        methods("moondream3", "Moondream3VisionAttention", "Moondream3VisionMLP"),
        ("self", "x"),
    ),
)

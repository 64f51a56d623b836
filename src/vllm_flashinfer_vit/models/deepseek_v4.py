# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1: an RMSNorm of its own; q and k are turned by halves."""

from vllm_flashinfer_vit.blocks.spec import BlockSpec, Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods

_FAMILY = "models.deepseek_v4.common.vision"

SPEC = BlockSpec(
    first="mlp.w1",
    act="mlp.act_fn",
    second="mlp.w2",
    own_norm=f"vllm.{_FAMILY}:DeepseekV4RMSNorm",
    qkv="attn.wqkv",
    proj="attn.wo",
    rotary=Rotary("exact", ("cos", "sin")),
)

PATCHES = (
    block_program(
        _FAMILY,
        "DeepseekV4VisionBlock",
        SPEC,
        (
            *methods(
                _FAMILY,
                "DeepseekV4VisionAttention",
                "DeepseekV4VisionMLP",
                "DeepseekV4RMSNorm",
            ),
            f"{_FAMILY}:apply_rotary",
            # Where the tables come from, and streams of one image.
            f"{_FAMILY}:_compute_vision_cos_sin",
            f"{_FAMILY}:DeepseekV4ViT.forward",
        ),
        ("self", "x", "cos", "sin", "cu_seqlens", "max_seqlen"),
        name="deepseek_v4",
    ),
)

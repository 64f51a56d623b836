# SPDX-License-Identifier: Apache-2.0
"""The audio encoder of Qwen3-Omni and Qwen3-ASR: packed windows, no rotary."""

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.models._shared import block_program, methods

_FAMILY = "qwen3_omni_moe_thinker"

SPEC = BlockSpec(
    first="fc1",
    act="activation_fn",
    second="fc2",
    norm1="self_attn_layer_norm",
    norm2="final_layer_norm",
    qkv="self_attn.qkv_proj",
    # Until vLLM 0.28.
    older_qkv="self_attn.qkv",
    attention="self_attn.attn",
    proj="self_attn.out_proj",
    rotary=None,
    is_clamped_in_fp16=True,
)

PATCHES = (
    block_program(
        _FAMILY,
        "Qwen3OmniMoeAudioEncoderLayer",
        SPEC,
        methods(_FAMILY, "Qwen3OmniMoeAudioAttention"),
        ("self", "hidden_states", "cu_seqlens", "max_seqlen"),
        name="qwen3_omni_audio",
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""Towers of models that are packages of their own in vLLM, below `vllm.models`.

That is DeepSeek-V4.1's with an RMSNorm of its own, GLM-5.3's, which normalises q and k
and clamps its SwiGLU, MiniMax-M3's, which turns part of a head, and Muse Spark's. All
turn q and k by halves.
"""

from vllm_flashinfer_vit.blocks.spec import BlockSpec, Rotary
from vllm_flashinfer_vit.models._shared import BLOCK_PARAMETERS, block_program, methods

_DEEPSEEK = "models.deepseek_v4.common.vision"
_GLM = "models.glm5next.common.multimodal"
_MINIMAX = "models.minimax_m3.common.vision_tower"
_MUSE = "models.muse_spark.common.vision"
_MROPE = "model_executor.layers.rotary_embedding.mrope"
_QK_NORM = "models.common.ops.fused_qk_rmsnorm"

DEEPSEEK = BlockSpec(
    first="mlp.w1",
    act="mlp.act_fn",
    second="mlp.w2",
    qkv="attn.wqkv",
    proj="attn.wo",
    rotary=Rotary("exact", ("cos", "sin")),
)
GLM_5 = BlockSpec(
    first="mlp.gate_up_proj",
    act="mlp.act_fn",
    second="mlp.down_proj",
    qk_norms=("attn.q_norm", "attn.k_norm"),
)
MINIMAX = BlockSpec(
    first="fc1",
    act="act",
    second="fc2",
    norm1="layer_norm1",
    norm2="layer_norm2",
    qkv="self_attn.qkv_proj",
    attention="self_attn.attn",
    proj="self_attn.out_proj",
    rotary=Rotary("planes", ("rotary_cos", "rotary_sin")),
)
MUSE = BlockSpec(
    first="mlp.c_fc",
    act="mlp.act",
    second="mlp.c_proj",
    norm1="ln_1",
    norm2="ln_2",
    qkv="attn.qkv_proj",
    proj="attn.out_proj",
    rotary=Rotary("real", ("freq_cis",)),
)

PATCHES = (
    block_program(
        _DEEPSEEK,
        "DeepseekV4VisionBlock",
        DEEPSEEK,
        (
            *methods(
                _DEEPSEEK,
                "DeepseekV4VisionAttention",
                "DeepseekV4VisionMLP",
                "DeepseekV4RMSNorm",
            ),
            f"{_DEEPSEEK}:apply_rotary",
            # Where the tables come from, and streams of one image.
            f"{_DEEPSEEK}:_compute_vision_cos_sin",
            f"{_DEEPSEEK}:DeepseekV4ViT.forward",
        ),
        ("self", "x", "cos", "sin", "cu_seqlens", "max_seqlen"),
        name="deepseek_v4",
    ),
    block_program(
        _GLM,
        "Glm5NextVisionBlock",
        GLM_5,
        (
            *methods(_GLM, "Glm5NextVisionAttention", "Glm5NextVisionMLP"),
            f"{_GLM}:Glm5NextVisionAttention.split_qkv",
            f"{_QK_NORM}:fused_q_kv_rmsnorm",
            f"{_QK_NORM}:FusedQKVRMSNormKernel.kernel",
        ),
        BLOCK_PARAMETERS[:-1],
        name="glm5next",
    ),
    block_program(
        _MINIMAX,
        "MiniMaxVLEncoderLayer",
        MINIMAX,
        (
            *methods(_MINIMAX, "MiniMaxVLAttention"),
            f"{_MROPE}:triton_mrope",
            f"{_MROPE}:_triton_mrope_forward",
        ),
        (
            "self",
            "x",
            "cu_seqlens",
            "rotary_cos",
            "rotary_sin",
            "max_seqlen",
            "sequence_lengths",
        ),
        name="minimax_m3",
    ),
    block_program(
        _MUSE,
        "NaViTBlock",
        MUSE,
        (
            *methods(_MUSE, "NaViTAttention", "NaViTMLP"),
            f"{_MUSE}:NaViTAttention._apply_rope",
        ),
        ("self", "x", "freq_cis", "cu_seqlens", "max_seqlen"),
        name="muse_spark",
    ),
)

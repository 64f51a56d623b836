# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V, 4.5V and 4.6V: 128 values to a head, RMSNorm, an MLP with SwiGLU.

GLM-OCR's blocks derive from theirs, and normalise each head's q and k.
"""

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.models._shared import BLOCK_PARAMETERS, block_program, methods
from vllm_flashinfer_vit.models.ends import patch_embed
from vllm_flashinfer_vit.models.metadata import kept_metadata
from vllm_flashinfer_vit.models.positions import summed_positions

SPEC = BlockSpec(
    first="mlp.gate_up_proj",
    act="mlp.act_fn",
    second="mlp.down_proj",
    qk_norms=("attn.q_norm", "attn.k_norm"),
)

PATCHES = (
    block_program(
        "glm4_1v",
        "Glm4vVisionBlock",
        SPEC,
        (
            *methods("glm4_1v", "Glm4vVisionAttention", "Glm4vVisionMLP"),
            "glm4_1v:Glm4vVisionAttention.split_qkv",
            *methods("glm_ocr", "GlmOcrVisionAttention"),
            "glm_ocr:GlmOcrVisionAttention.split_qkv",
            "glm_ocr:GlmOcrVisionBlock.__init__",
        ),
        BLOCK_PARAMETERS[:-1],
    ),
    kept_metadata(
        "glm4_1v",
        "Glm4vVisionTransformer",
        ("rot_pos_emb", "pos_embeds_interpolate"),
        grids="grid_thw_list",
        of_weights={"pos_embeds": "pos_embeds_interpolate"},
    ),
    summed_positions("glm4_1v", "Glm4vVisionTransformer", "Glm4vVisionEmbeddings"),
    patch_embed("glm4_1v", "Glm4vVisionPatchEmbed"),
)

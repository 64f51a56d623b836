# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V, 4.5V and 4.6V: 128 values to a head, RMSNorm, an MLP with SwiGLU.

GLM-OCR's blocks derive from theirs, and normalise each head's q and k. GLM-5.3 has
blocks of its own, of the same parts, which clamp their SwiGLU.
"""

import functools
from typing import Any

import torch

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.models import positions
from vllm_flashinfer_vit.models._shared import (
    BLOCK_PARAMETERS,
    Function,
    block_program,
    is_served,
    methods,
)
from vllm_flashinfer_vit.models.ends import patch_embed
from vllm_flashinfer_vit.models.metadata import kept_metadata
from vllm_flashinfer_vit.patches.patch import Patch

_GLM_5 = "models.glm5next.common.multimodal"
_QK_NORM = "models.common.ops.fused_qk_rmsnorm"

SPEC = BlockSpec(
    first="mlp.gate_up_proj",
    act="mlp.act_fn",
    second="mlp.down_proj",
    qk_norms=("attn.q_norm", "attn.k_norm"),
)


def _prepare(original: Function) -> Function:
    @functools.wraps(original)
    def forward(
        self: Any, x: torch.Tensor, grid_thw: Any, *, encoder_metadata: Any = None
    ) -> torch.Tensor:
        if encoder_metadata is None and is_served(self.blocks[0].attn):
            grids = grid_thw if isinstance(grid_thw, list) else grid_thw.tolist()
            encoder_metadata = self.prepare_encoder_metadata(grids)
        return original(self, x, grid_thw, encoder_metadata=encoder_metadata)

    return forward


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
    block_program(
        _GLM_5,
        "Glm5NextVisionBlock",
        SPEC,
        (
            *methods(_GLM_5, "Glm5NextVisionAttention", "Glm5NextVisionMLP"),
            f"{_GLM_5}:Glm5NextVisionAttention.split_qkv",
            f"{_QK_NORM}:fused_q_kv_rmsnorm",
            f"{_QK_NORM}:FusedQKVRMSNormKernel.kernel",
        ),
        BLOCK_PARAMETERS[:-1],
        name="glm5next",
    ),
    kept_metadata(
        "glm4_1v",
        "Glm4vVisionTransformer",
        ("rot_pos_emb", "pos_embeds_interpolate"),
        grids="grid_thw_list",
        of_weights={"pos_embeds": "pos_embeds_interpolate"},
    ),
    kept_metadata(
        _GLM_5,
        "Glm5NextVisionTransformer",
        ("rot_pos_emb",),
        name="glm5next",
        grids="grid_thw_list",
    ),
    Patch(
        name="glm5next-prepared",
        target=f"vllm.{_GLM_5}:Glm5NextVisionTransformer.forward",
        stands_for=(f"vllm.{_GLM_5}:Glm5NextVisionTransformer.forward",),
        why="without graphs, stock computes the longest length on the device, where "
        "no choice of a kernel can read it, and all else anew for every batch",
        remove_when="vLLM's tower prepares its metadata without graphs, too",
        parameters=("self", "x", "grid_thw", "encoder_metadata"),
        replace=_prepare,
    ),
    positions.PATCH,
    patch_embed("glm4_1v", "Glm4vVisionPatchEmbed"),
)

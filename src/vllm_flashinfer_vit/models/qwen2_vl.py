# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL: 80 values to a head, LayerNorm, an MLP with QuickGELU.

Kanana-V's tower and others derive from its tower, with blocks of its class.
"""

from operator import attrgetter

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.models._shared import BLOCK_PARAMETERS, block_program, methods
from vllm_flashinfer_vit.models.ends import merger, normalize_patches, patch_embed
from vllm_flashinfer_vit.models.metadata import kept_metadata, kept_rotary

_FAMILY = "qwen2_vl"
_TOWER = "Qwen2VisionTransformer"

SPEC = BlockSpec(
    first="mlp.fc1",
    act="mlp.act",
    second="mlp.fc2",
    # Its projection's ranks hold parts of q, k and v regardless of heads.
    split=attrgetter("attn.split_qkv"),
)

PATCHES = (
    block_program(
        _FAMILY,
        "Qwen2VisionBlock",
        SPEC,
        (
            *methods(_FAMILY, "Qwen2VisionAttention", "Qwen2VisionMLP"),
            f"{_FAMILY}:Qwen2VisionAttention.split_qkv",
        ),
        BLOCK_PARAMETERS[:-1],
    ),
    kept_metadata(_FAMILY, _TOWER, ("rot_pos_emb", "compute_attn_mask_seqlen")),
    kept_rotary(_FAMILY, _TOWER, ("rot_pos_emb",)),
    patch_embed(_FAMILY, "Qwen2VisionPatchEmbed"),
    merger(_FAMILY, "Qwen2VisionPatchMerger", normalize_patches, mlp=attrgetter("mlp")),
)

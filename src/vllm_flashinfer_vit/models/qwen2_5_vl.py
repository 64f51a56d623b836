# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL: 80 values to a head, windows, RMSNorm, an MLP with SwiGLU.

EXAONE 4.5 has blocks of its own, of the same parts, with fewer heads for k and v.
"""

import functools
from operator import attrgetter
from typing import Any

import torch

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.models._shared import (
    BLOCK_PARAMETERS,
    MODELS,
    Function,
    block_program,
    is_served,
    methods,
)
from vllm_flashinfer_vit.models.ends import merger, normalize_patches, patch_embed
from vllm_flashinfer_vit.models.metadata import kept_metadata
from vllm_flashinfer_vit.patches.patch import Patch

_FAMILY = "qwen2_5_vl"
_TOWER = "Qwen2_5_VisionTransformer"

# Qwen3-VL has this attention, too.
ATTENTION = methods(_FAMILY, "Qwen2_5_VisionAttention")

SPEC = BlockSpec(
    first="mlp.gate_up_proj",
    act="mlp.act_fn",
    second="mlp.down_proj",
)


def _compile_norms(original: Function) -> Function:
    @functools.wraps(original)
    def forward(
        self: Any,
        x: torch.Tensor,
        grid_thw: list[list[int]] | None,
        *,
        encoder_metadata: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        from vllm_flashinfer_vit.blocks.compiled import can_run_compiled, compiled_norms

        block = self.blocks[0]
        is_compiled = not getattr(block, "do_not_compile", True)
        if not is_served(block.attn) or is_compiled or not can_run_compiled():
            return original(self, x, grid_thw, encoder_metadata=encoder_metadata)
        with compiled_norms():
            return original(self, x, grid_thw, encoder_metadata=encoder_metadata)

    return forward


PATCHES = (
    block_program(
        _FAMILY,
        "Qwen2_5_VisionBlock",
        SPEC,
        (*ATTENTION, *methods(_FAMILY, "Qwen2_5_VisionMLP")),
    ),
    block_program(
        "exaone4_5",
        "Exaone4_5_VisionBlock",
        SPEC,
        (
            *methods("exaone4_5", "EXAONE4_5_VisionAttention"),
            *methods("exaone4", "Exaone4GatedMLP"),
            "exaone4_5:EXAONE4_5_VisionAttention.split_qkv",
        ),
        (*BLOCK_PARAMETERS[:-1], "seqlens", BLOCK_PARAMETERS[-1]),
    ),
    kept_metadata(
        _FAMILY,
        _TOWER,
        (
            "rotary_pos_emb_thw",
            "get_window_index_thw",
            "get_rope_by_thw",
            "compute_attn_mask_seqlen",
            "invert_permutation",
        ),
        windows=True,
    ),
    patch_embed(_FAMILY, "Qwen2_5_VisionPatchEmbed"),
    merger(
        _FAMILY, "Qwen2_5_VisionPatchMerger", normalize_patches, mlp=attrgetter("mlp")
    ),
    Patch(
        name=f"{_FAMILY}-compiled-norms",
        target=f"{MODELS}.{_FAMILY}:{_TOWER}.forward",
        why="the engine's default turns vLLM's own kernels off, for a compiler that "
        "does not run on encoders, so the first norm and the merger's run as several",
        remove_when="vLLM chooses the ops of encoders apart from the language model's",
        parameters=("self", "x", "grid_thw", "encoder_metadata"),
        stands_for=(),
        replace=_compile_norms,
    ),
)

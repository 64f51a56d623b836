# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL: 72 values to a head, LayerNorm, an MLP with tanh GELU, deepstack."""

import functools
import itertools
from operator import attrgetter
from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.models._shared import (
    MODELS,
    Function,
    Grids,
    block_program,
    is_served,
    methods,
)
from vllm_flashinfer_vit.models.ends import merger, patch_embed
from vllm_flashinfer_vit.models.longest import longest_on_host
from vllm_flashinfer_vit.models.metadata import kept_metadata, kept_rotary
from vllm_flashinfer_vit.models.qwen2_5_vl import ATTENTION
from vllm_flashinfer_vit.patches.patch import Patch

_FAMILY = "qwen3_vl"
_TOWER = "Qwen3_VisionTransformer"
# Attribute of a tower whose kernel for positions is compiled.
_COMPILED = "vllm_flashinfer_vit_positions"

SPEC = BlockSpec(
    first="mlp.linear_fc1",
    act="mlp.act_fn",
    second="mlp.linear_fc2",
)


def _normalize(merger: Any, x: torch.Tensor) -> torch.Tensor:
    """Normalise tokens, of the deepstack after they are merged."""
    rows = merger.hidden_size
    if merger.use_postshuffle_norm:
        return merger.norm(x.view(-1, rows))
    return merger.norm(x).view(-1, rows)


def _interpolate_once(original: Function) -> Function:
    """Interpolate position embeddings, which are weights, once for each size."""

    @functools.wraps(original)
    def fast_pos_embed_interpolate(self: Any, grid_thw: Grids) -> torch.Tensor:
        if not is_served(self.blocks[0].attn):
            return original(self, grid_thw)
        if current_platform.is_cuda() and not vars(self).get(_COMPILED):
            # Once a tower, by vLLM's profiling: its kernel has variants by whether 16
            # divides the rows and columns, which requests would wait for.
            vars(self)[_COMPILED] = True
            for sizes in itertools.product((self.spatial_merge_size, 16), repeat=2):
                original(self, [[1, *sizes]])
        grids = [tuple(grid) for grid in grid_thw]
        distinct = list(dict.fromkeys(grids))
        if len(distinct) == len(grids):
            return original(self, grid_thw)
        embeds = original(self, distinct).split([t * h * w for t, h, w in distinct])
        by_grid = dict(zip(distinct, embeds, strict=True))
        return torch.cat([by_grid[grid] for grid in grids])

    return fast_pos_embed_interpolate


PATCHES = (
    # Qwen3-Omni's vision tower has blocks of its own, of the same parts.
    *(
        block_program(
            family,
            "Qwen3_VisionBlock",
            SPEC,
            (*ATTENTION, *methods(family, "Qwen3_VisionMLP")),
        )
        for family in (_FAMILY, "qwen3_omni_moe_thinker")
    ),
    longest_on_host("qwen3_omni_moe_thinker", "Qwen3Omni_VisionTransformer", "x"),
    # Of the same parts, too.
    block_program(
        "cohere_compass",
        "Cohere_VisionBlock",
        SPEC,
        methods("cohere_compass", "Cohere_VisionAttention", "Cohere_VisionMLP"),
    ),
    kept_metadata(
        _FAMILY,
        _TOWER,
        ("rot_pos_ids", "rot_pos_emb", "fast_pos_embed_interpolate"),
        grids="grid_thw_list",
        of_weights={"pos_embeds": "fast_pos_embed_interpolate"},
    ),
    kept_rotary(_FAMILY, _TOWER, ("rot_pos_ids", "rot_pos_emb")),
    patch_embed(_FAMILY, "Qwen3_VisionPatchEmbed"),
    merger(
        _FAMILY,
        "Qwen3_VisionPatchMerger",
        _normalize,
        mlp=attrgetter("linear_fc1", "act_fn", "linear_fc2"),
    ),
    Patch(
        name=f"{_FAMILY}-shared-positions",
        target=f"{MODELS}.{_FAMILY}:{_TOWER}.fast_pos_embed_interpolate",
        stands_for=(f"{MODELS}.{_FAMILY}:{_TOWER}.fast_pos_embed_interpolate",),
        why="stock launches a kernel for every image, also for images of one size, and "
        "compiles its variants while requests wait",
        remove_when="vLLM interpolates the positions of a batch by one launch",
        parameters=("self", "grid_thw"),
        replace=_interpolate_once,
        compiled=False,
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL and Qwen3-VL: what the host prepares for a batch of images.

Stock computes positions image by image, with a dozen small ops or a launch for each.
They depend on the size of a frame alone: rotary tables are kept on the device, and
position embeddings, which are weights, are interpolated once for images of one size.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_flashinfer_vit.machine.versions import SUPPORTED_VLLM
from vllm_flashinfer_vit.patches.patch import Patch

# 160 bytes a patch: the tables of 400,000 patches.
_MAX_BYTES = 64 * 2**20
_CACHE = "vllm_flashinfer_vit_rotary"

Grids = Sequence[Sequence[int]]


def _is_served(tower: Any) -> bool:
    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

    return isinstance(tower.blocks[0].attn.attn, FlashInferViTAttention)


def _keep_rotary(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rot_pos_emb(self: Any, grid_thw: Grids) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm_flashinfer_vit.models.frame_cache import FrameCache

        if not _is_served(self):
            return original(self, grid_thw)
        cache = vars(self).get(_CACHE)
        if cache is None:
            cache = vars(self)[_CACHE] = FrameCache(_MAX_BYTES)
        all_cos, all_sin = [], []
        for t, h, w in grid_thw:
            make = functools.partial(original, self, [[1, h, w]])
            cos, sin = cache.get(h, w, make)
            all_cos.append(cos if t == 1 else cos.repeat(t, 1))
            all_sin.append(sin if t == 1 else sin.repeat(t, 1))
        # Copies even one table: CUDA graphs write into the tensors they captured.
        return torch.cat(all_cos), torch.cat(all_sin)

    return rot_pos_emb


def _interpolate_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fast_pos_embed_interpolate(self: Any, grid_thw: Grids) -> torch.Tensor:
        grids = [tuple(grid) for grid in grid_thw]
        distinct = list(dict.fromkeys(grids))
        if len(distinct) == len(grids) or not _is_served(self):
            return original(self, grid_thw)
        embeds = original(self, distinct).split([t * h * w for t, h, w in distinct])
        by_grid = dict(zip(distinct, embeds, strict=True))
        return torch.cat([by_grid[grid] for grid in grids])

    return fast_pos_embed_interpolate


def _rotary(name: str, tower: str) -> Patch:
    return Patch(
        name=name,
        target=f"vllm.model_executor.models.{tower}.rot_pos_emb",
        why="stock computes rotary positions anew for every image of every batch",
        vllm_range=SUPPORTED_VLLM,
        remove_when="vLLM keeps the rotary tables of frame sizes on the device",
        parameters=("self", "grid_thw"),
        replace=_keep_rotary,
    )


PATCHES = (
    _rotary("qwen2_vl-kept-rotary", "qwen2_vl:Qwen2VisionTransformer"),
    _rotary("qwen3_vl-kept-rotary", "qwen3_vl:Qwen3_VisionTransformer"),
    Patch(
        name="qwen3_vl-shared-positions",
        target="vllm.model_executor.models.qwen3_vl:"
        "Qwen3_VisionTransformer.fast_pos_embed_interpolate",
        why="stock launches a kernel for every image, also for images of one size",
        vllm_range=SUPPORTED_VLLM,
        remove_when="vLLM interpolates the positions of a batch by one launch",
        parameters=("self", "grid_thw"),
        replace=_interpolate_once,
    ),
)

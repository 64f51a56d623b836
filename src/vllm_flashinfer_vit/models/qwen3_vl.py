# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL: 72 values to a head, LayerNorm, an MLP with tanh GELU, deepstack.

Its attention is of Qwen2.5-VL's class, which has that one's patches.
"""

import functools
from typing import Any

import torch

from vllm_flashinfer_vit.machine.versions import SUPPORTED_VLLM
from vllm_flashinfer_vit.models._shared import (
    Function,
    Grids,
    add_norm,
    aligned_mlp,
    fused_mlp,
    is_served,
    kept_rotary,
    mlp_patch,
)
from vllm_flashinfer_vit.patches.patch import Patch

_FAMILY = "qwen3_vl"
_MLP = "Qwen3_VisionMLP"
_TOWER = "Qwen3_VisionTransformer"


def _align_mlp(mlp: Any) -> None:
    from vllm_flashinfer_vit.blocks.methods import align

    # GELU of 0 is 0, so what the first layer pads is zero in the second one too.
    if isinstance(mlp.act_fn, torch.nn.GELU):
        align(mlp.linear_fc1, mlp.linear_fc2, parts=1)


def _fuse_gelu(mlp: Any) -> None:
    from vllm_flashinfer_vit.blocks.methods import fuse_tanh_gelu

    is_tanh = getattr(mlp.act_fn, "approximate", None) == "tanh"
    if is_tanh and fuse_tanh_gelu(mlp.linear_fc1):
        mlp.act_fn = torch.nn.Identity()


def _fuse_mlp(mlp: Any) -> None:
    from vllm_flashinfer_vit.blocks.gelu_linear import GeluLinearMethod
    from vllm_flashinfer_vit.blocks.methods import fuse
    from vllm_flashinfer_vit.blocks.quack_linear import TANH_GELU

    fc1, act = mlp.linear_fc1, mlp.act_fn
    is_known = isinstance(fc1.quant_method, GeluLinearMethod) or (
        type(act) is torch.nn.GELU and act.approximate == "tanh"
    )
    if is_known and fuse(fc1, act, TANH_GELU):
        mlp.act_fn = torch.nn.Identity()


def _interpolate_once(original: Function) -> Function:
    """Interpolate position embeddings, which are weights, once for each size."""

    @functools.wraps(original)
    def fast_pos_embed_interpolate(self: Any, grid_thw: Grids) -> torch.Tensor:
        grids = [tuple(grid) for grid in grid_thw]
        distinct = list(dict.fromkeys(grids))
        if len(distinct) == len(grids) or not is_served(self.blocks[0].attn):
            return original(self, grid_thw)
        embeds = original(self, distinct).split([t * h * w for t, h, w in distinct])
        by_grid = dict(zip(distinct, embeds, strict=True))
        return torch.cat([by_grid[grid] for grid in grids])

    return fast_pos_embed_interpolate


PATCHES = (
    aligned_mlp(_FAMILY, _MLP, "4304 values, cut for four ranks", _align_mlp),
    mlp_patch(
        f"{_FAMILY}-fused-gelu",
        _MLP,
        _fuse_gelu,
        why="stock reads and writes the GEMM's output once more for a GELU",
        remove_when="vLLM hands the activation to the GEMM",
        after=("qwen3_vl-aligned-mlp",),
    ),
    fused_mlp(
        _FAMILY,
        _MLP,
        _fuse_mlp,
        after=("qwen3_vl-aligned-mlp", "qwen3_vl-fused-gelu"),
    ),
    add_norm(_FAMILY, _TOWER),
    kept_rotary(_FAMILY, _TOWER),
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

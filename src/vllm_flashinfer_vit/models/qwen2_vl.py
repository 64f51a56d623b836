# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL: 80 values to a head, LayerNorm, an MLP with QuickGELU."""

import functools
from typing import Any

import torch

from vllm_flashinfer_vit.models._shared import (
    Function,
    add_norm,
    attend_and_project,
    fused_mlp,
    fused_rotary,
    is_served_flat,
    kept_rotary,
    mlp_patch,
    quack_qkv,
)
from vllm_flashinfer_vit.ops.batch import Batch

_FAMILY = "qwen2_vl"
_ATTENTION = "Qwen2VisionAttention"
_MLP = "Qwen2VisionMLP"
_TOWER = "Qwen2VisionTransformer"
_MLP_PARAMETERS = (
    "self",
    "in_features",
    "hidden_features",
    "act_layer",
    "quant_config",
    "prefix",
)


def _fuse_rotary(original: Function) -> Function:
    @functools.wraps(original)
    def forward(
        self: Any,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor,
        rotary_pos_emb_cos: torch.Tensor,
        rotary_pos_emb_sin: torch.Tensor,
        max_seqlen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        cos, sin = rotary_pos_emb_cos, rotary_pos_emb_sin
        if not is_served_flat(self, x):
            return original(self, x, cu_seqlens, cos, sin, max_seqlen)
        qkv, _ = self.qkv(x)
        # Gathers the heads of all ranks under tensor parallelism: [S, 1, H, D] each.
        q, k, v = (part.squeeze(1) for part in self.split_qkv(qkv))
        batch = Batch(q, k, v, cos, sin, cu_seqlens, max_seqlen)
        return attend_and_project(self, batch)

    return forward


def _run_compiled_gelu(mlp: Any) -> None:
    from vllm.model_executor.layers.activation import QuickGELU

    from vllm_flashinfer_vit.blocks.compiled import has_compiled

    if isinstance(mlp.act, QuickGELU) and has_compiled("gelu_quick"):
        mlp.act._forward_method = mlp.act.forward_cuda


def _fuse_mlp(mlp: Any) -> None:
    from vllm.model_executor.layers.activation import QuickGELU

    from vllm_flashinfer_vit.blocks.methods import computes, fuse
    from vllm_flashinfer_vit.blocks.quack_linear import QUICK_GELU

    if computes(mlp.act, QuickGELU) and fuse(mlp.fc1, mlp.act, QUICK_GELU):
        mlp.act = torch.nn.Identity()


PATCHES = (
    fused_rotary(_FAMILY, _ATTENTION, _fuse_rotary),
    quack_qkv(_FAMILY, _ATTENTION),
    mlp_patch(
        f"{_FAMILY}-fused-gelu",
        _MLP,
        _run_compiled_gelu,
        why="the engine's default turns vLLM's own kernels off, for a compiler that "
        "does not run on encoders, so each op runs as several kernels",
        remove_when="vLLM chooses the ops of encoders apart from the language model's",
        parameters=_MLP_PARAMETERS,
    ),
    fused_mlp(
        _FAMILY,
        _MLP,
        _fuse_mlp,
        after=("qwen2_vl-fused-gelu",),
        parameters=_MLP_PARAMETERS,
    ),
    add_norm(_FAMILY, _TOWER),
    kept_rotary(_FAMILY, _TOWER),
)

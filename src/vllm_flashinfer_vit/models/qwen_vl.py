# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: rotary and attention straight from the QKV GEMM.

Stock copies q and k and rotates them by a separate kernel before attention. Qwen3-VL
uses the attention class of Qwen2.5-VL.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_flashinfer_vit.machine.versions import SUPPORTED_VLLM
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.patches.patch import Patch


def _is_served(module: torch.nn.Module, x: torch.Tensor) -> bool:
    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

    # [S, B, C]: with B = 1 the rows of the projection are the tokens, in order.
    return isinstance(module.attn, FlashInferViTAttention) and x.shape[1] == 1


def _fuse_qwen2(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor,
        rotary_pos_emb_cos: torch.Tensor,
        rotary_pos_emb_sin: torch.Tensor,
        max_seqlen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not _is_served(self, x):
            return original(
                self, x, cu_seqlens, rotary_pos_emb_cos, rotary_pos_emb_sin, max_seqlen
            )
        qkv, _ = self.qkv(x)
        # Gathers the heads of all ranks under tensor parallelism: [S, 1, H, D] each.
        q, k, v = (part.squeeze(1) for part in self.split_qkv(qkv))
        context = self.attn.attend(
            Batch(
                q, k, v, rotary_pos_emb_cos, rotary_pos_emb_sin, cu_seqlens, max_seqlen
            )
        )
        output, _ = self.proj(context.view(x.shape[0], 1, -1))
        return output

    return forward


def _fuse_qwen2_5(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor,
        rotary_pos_emb_cos: torch.Tensor,
        rotary_pos_emb_sin: torch.Tensor,
        max_seqlen: torch.Tensor,
        sequence_lengths: torch.Tensor | None,
    ) -> torch.Tensor:
        if not _is_served(self, x):
            return original(
                self,
                x,
                cu_seqlens,
                rotary_pos_emb_cos,
                rotary_pos_emb_sin,
                max_seqlen,
                sequence_lengths,
            )
        qkv, _ = self.qkv(x)
        heads, head_dim = (
            self.num_attention_heads_per_partition,
            self.hidden_size_per_attention_head,
        )
        q, k, v = qkv.view(x.shape[0], 3, heads, head_dim).unbind(1)
        context = self.attn.attend(
            Batch(
                q, k, v, rotary_pos_emb_cos, rotary_pos_emb_sin, cu_seqlens, max_seqlen
            )
        )
        output, _ = self.proj(context.view(x.shape[0], 1, -1))
        return output

    return forward


_WHY = "stock copies q and k and rotates them by a separate kernel"
_REMOVE_WHEN = "vLLM's vision attention hands q, k, v and the rotary tables to one op"
_PARAMETERS = (
    "self",
    "x",
    "cu_seqlens",
    "rotary_pos_emb_cos",
    "rotary_pos_emb_sin",
    "max_seqlen",
)

PATCHES = (
    Patch(
        name="qwen2_vl-fused-rotary",
        target="vllm.model_executor.models.qwen2_vl:Qwen2VisionAttention.forward",
        why=_WHY,
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_WHEN,
        parameters=_PARAMETERS,
        replace=_fuse_qwen2,
    ),
    Patch(
        name="qwen2_5_vl-fused-rotary",
        target="vllm.model_executor.models.qwen2_5_vl:Qwen2_5_VisionAttention.forward",
        why=_WHY,
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_WHEN,
        parameters=(*_PARAMETERS, "sequence_lengths"),
        replace=_fuse_qwen2_5,
    ),
)

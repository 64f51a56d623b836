# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL: 80 values to a head, windows, RMSNorm, an MLP with SwiGLU.

Its attention class is Qwen3-VL's, too.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from vllm_flashinfer_vit.engine.element_offsets import token_offsets
from vllm_flashinfer_vit.models._shared import (
    Function,
    aligned_mlp,
    attend_and_project,
    fused_mlp,
    fused_rotary,
    is_served,
    is_served_flat,
    quack_qkv,
    tower_forward,
)
from vllm_flashinfer_vit.ops.batch import Batch

_FAMILY = "qwen2_5_vl"
_ATTENTION = "Qwen2_5_VisionAttention"
_MLP = "Qwen2_5_VisionMLP"


def _fuse_rotary(original: Function) -> Function:
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
        cos, sin = rotary_pos_emb_cos, rotary_pos_emb_sin
        if not is_served_flat(self, x):
            return original(self, x, cu_seqlens, cos, sin, max_seqlen, sequence_lengths)
        qkv, _ = self.qkv(x)
        heads = self.num_attention_heads_per_partition
        head_dim = self.hidden_size_per_attention_head
        q, k, v = qkv.view(x.shape[0], 3, heads, head_dim).unbind(1)
        offsets = token_offsets(cu_seqlens, sequence_lengths)
        batch = Batch(q, k, v, cos, sin, offsets, max_seqlen)
        return attend_and_project(self, batch)

    return forward


def _align_mlp(mlp: Any) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    from vllm_flashinfer_vit.blocks.methods import align

    # silu(0) * 0 is 0, so what the first layer pads is zero in the second one too.
    if isinstance(mlp.act_fn, SiluAndMul):
        align(mlp.gate_up_proj, mlp.down_proj, parts=2)


def _fuse_mlp(mlp: Any) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    from vllm_flashinfer_vit.blocks.methods import computes, fuse
    from vllm_flashinfer_vit.blocks.quack_linear import SWIGLU

    if computes(mlp.act_fn, SiluAndMul) and fuse(mlp.gate_up_proj, mlp.act_fn, SWIGLU):
        mlp.act_fn = torch.nn.Identity()


@contextmanager
def fused_ops(tower: Any) -> Iterator[None]:
    """Run an uncompiled FLASHINFER tower's norms and activation by vLLM's kernels."""
    from vllm_flashinfer_vit.blocks.chain import (
        chained,
        has_known_forward,
        is_compiled,
        sum_norm,
    )
    from vllm_flashinfer_vit.blocks.compiled import can_run_compiled, compiled_ops
    from vllm_flashinfer_vit.blocks.quack_linear import QuackLinearMethod

    block = tower.blocks[0]
    if not is_served(block.attn) or is_compiled(block) or not can_run_compiled():
        yield
        return
    first = getattr(block.mlp, "gate_up_proj", None)
    method = getattr(first, "quant_method", None)
    act = method.act if isinstance(method, QuackLinearMethod) else block.mlp.act_fn
    with ExitStack() as stack:
        if has_known_forward(block):
            stack.enter_context(chained(tower.blocks, sum_norm))
        stack.enter_context(compiled_ops(act))
        yield


PATCHES = (
    fused_rotary(_FAMILY, _ATTENTION, _fuse_rotary, "sequence_lengths"),
    quack_qkv(_FAMILY, _ATTENTION),
    aligned_mlp(_FAMILY, _MLP, "3420 values, so down_proj is slow", _align_mlp),
    fused_mlp(_FAMILY, _MLP, _fuse_mlp, after=("qwen2_5_vl-aligned-mlp",)),
    tower_forward(
        "qwen2_5_vl-fused-ops",
        f"{_FAMILY}:Qwen2_5_VisionTransformer",
        fused_ops,
        why="the engine's default turns vLLM's own kernels off, for a compiler that "
        "does not run on encoders, so each op runs as several kernels",
        remove_when="vLLM chooses the ops of encoders apart from the language model's",
    ),
)

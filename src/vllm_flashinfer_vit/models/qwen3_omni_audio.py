# SPDX-License-Identifier: Apache-2.0
"""The audio encoder of Qwen3-Omni and Qwen3-ASR: packed windows, no rotary."""

import functools
from typing import Any

import torch

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.models._shared import (
    Function,
    block_program,
    is_served,
    methods,
    module_of,
)
from vllm_flashinfer_vit.models.longest import REMOVE_WHEN, WHY
from vllm_flashinfer_vit.patches.patch import Patch

_FAMILY = "qwen3_omni_moe_thinker"
_TOWER = f"{module_of(_FAMILY)}:Qwen3OmniMoeAudioEncoder"

SPEC = BlockSpec(
    first="fc1",
    act="activation_fn",
    second="fc2",
    norm1="self_attn_layer_norm",
    norm2="final_layer_norm",
    qkv="self_attn.qkv_proj",
    # Until vLLM 0.28.
    older_qkv="self_attn.qkv",
    attention="self_attn.attn",
    proj="self_attn.out_proj",
    rotary=None,
    is_clamped_in_fp16=True,
)


def _bound_lengths(original: Function) -> Function:
    @functools.wraps(original)
    def compute_attn_mask_seqlen(
        self: Any, cu_seqlens: torch.Tensor
    ) -> torch.Tensor | None:
        if not is_served(self.layers[0].self_attn):
            return original(self, cu_seqlens)
        # The most that `forward` lets a window have: less where no chunk is full.
        frames = 2 * self.n_window
        tokens = self._get_cnn_output_lengths(frames)
        longest = self.n_window_infer // frames * tokens
        return torch.tensor(longest, dtype=torch.int32, device="cpu")

    return compute_attn_mask_seqlen


PATCHES = (
    block_program(
        _FAMILY,
        "Qwen3OmniMoeAudioEncoderLayer",
        SPEC,
        methods(_FAMILY, "Qwen3OmniMoeAudioAttention"),
        ("self", "hidden_states", "cu_seqlens", "max_seqlen"),
        name="qwen3_omni_audio",
    ),
    Patch(
        name="qwen3_omni_audio-longest",
        target=f"{_TOWER}.compute_attn_mask_seqlen",
        stands_for=tuple(
            f"{_TOWER}.{method}"
            for method in (
                "compute_attn_mask_seqlen",
                "forward",
                "_get_cnn_output_lengths",
            )
        ),
        why=WHY,
        remove_when=REMOVE_WHEN,
        parameters=("self", "cu_seqlens"),
        replace=_bound_lengths,
        compiled=False,
    ),
)

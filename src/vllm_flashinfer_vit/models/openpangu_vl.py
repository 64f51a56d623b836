# SPDX-License-Identifier: Apache-2.0
"""openPangu-VL: blocks like Qwen2.5-VL's, with an MLP of one activation."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_flashinfer_vit.blocks.spec import BlockSpec, Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods
from vllm_flashinfer_vit.models.longest import largest_frame, longest_told

SPEC = BlockSpec(
    first="mlp.up_proj",
    act="mlp.act_fn",
    second="mlp.down_proj",
    rotary=Rotary("tables", ("cos", "sin")),
)


def _lengths(
    tower: Any, given: Mapping[str, Any]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    # Windows hold whole merged patches, at the images' edges fewer.
    stride = tower.spatial_merge_size
    side = tower.window_size // stride // tower.patch_size * stride
    windowed = torch.tensor(side * side, dtype=torch.int32, device="cpu")
    return largest_frame(given["grid_thw"]), windowed


PATCHES = (
    block_program(
        "openpangu_vl",
        "OpenPanguVisionBlock",
        SPEC,
        methods("openpangu_vl", "OpenPanguVisionAttention", "OpenPanguVisionMLP"),
        ("self", "hidden_states", "cu_seqlens", "cos", "sin"),
    ),
    longest_told(
        "openpangu_vl",
        "OpenPanguVisionTransformer",
        "blocks",
        ("self", "x", "grid_thw"),
        _lengths,
        ("get_window_index",),
    ),
)

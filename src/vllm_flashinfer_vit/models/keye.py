# SPDX-License-Identifier: Apache-2.0
"""Keye-VL: SigLIP's blocks on packed images, turned by one pair of tables."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from vllm_flashinfer_vit.blocks.spec import Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods
from vllm_flashinfer_vit.models.longest import longest_told
from vllm_flashinfer_vit.models.siglip import CLIP

SPEC = dataclasses.replace(CLIP, is_packed=True, rotary=Rotary("pair", ("rope_emb",)))


def _lengths(tower: Any, given: Mapping[str, Any]) -> tuple[torch.Tensor | None, None]:
    grids = given.get("image_grid_thw")
    # A tensor's values may be on the device.
    if not isinstance(grids, list | tuple) or not grids:
        return None, None
    # Those of a video may be in a list of their own; its frames are one sequence.
    longest = max(map(math.prod, tower.flatten_list(grids)))
    return torch.tensor(longest, dtype=torch.int32, device="cpu"), None


PATCHES = (
    block_program(
        "keye",
        "KeyeSiglipEncoderLayer",
        SPEC,
        (
            *methods("keye", "KeyeSiglipAttention"),
            *methods("siglip", "SiglipMLP"),
            "keye:apply_rotary_pos_emb_flashatt",
            # Where the tables come from, whose halves are alike.
            "keye:KeyeSiglipEncoder.forward",
        ),
        (
            "self",
            "hidden_states",
            "attention_mask",
            "output_attentions",
            "cu_seqlens",
            "rope_emb",
        ),
    ),
    longest_told(
        "keye",
        "KeyeSiglipEncoder",
        "layers",
        (
            *("self", "inputs_embeds", "attention_mask", "output_attentions"),
            *("output_hidden_states", "cu_seqlens", "image_grid_thw"),
            *("height_position_ids", "width_position_ids", "use_rope", "window_size"),
            "vision_or_text",
        ),
        _lengths,
        ("flatten_list",),
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""ERNIE-4.5-VL, dots.ocr and PaddleOCR-VL: NeoX rotary, by angles that each layer gets.

Stock takes cosines and sines of them in every layer; a program does once in a pass.
"""

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from vllm_flashinfer_vit.blocks.spec import ANGLES, BlockSpec
from vllm_flashinfer_vit.models._shared import block_program, methods

_PARAMETERS = ("self", "hidden_states", "cu_seqlens", "rotary_pos_emb", "max_seqlen")


def _split_as_qwen2_vl(block: Any) -> Callable[..., Any]:
    from vllm.model_executor.models.qwen2_vl import Qwen2VisionAttention

    return functools.partial(Qwen2VisionAttention.split_qkv, block.attn)


ERNIE = BlockSpec(
    first="mlp.fc1",
    act="mlp.act",
    second="mlp.fc2",
    # Its projection's ranks hold parts of q, k and v regardless of heads.
    split=attrgetter("attn.split_qkv"),
    rotary=ANGLES,
)
DOTS = BlockSpec(
    first="mlp.fc13",
    act="mlp.act_fn",
    second="mlp.fc2",
    split=_split_as_qwen2_vl,
    rotary=ANGLES,
)
PADDLE = BlockSpec(
    first="mlp.fc1",
    act="mlp.activation_fn",
    second="mlp.fc2",
    norm1="layer_norm1",
    norm2="layer_norm2",
    qkv="self_attn.qkv_proj",
    attention="self_attn.attn",
    proj="self_attn.out_proj",
    split=attrgetter("self_attn.split_qkv"),
    rotary=ANGLES,
)


PATCHES = (
    block_program(
        "ernie45_vl",
        "Ernie4_5_VisionBlock",
        ERNIE,
        (
            *methods("ernie45_vl", "Ernie4_5_VisionAttention", "Ernie4_5_VisionMLP"),
            "ernie45_vl:Ernie4_5_VisionAttention.split_qkv",
        ),
        _PARAMETERS,
    ),
    block_program(
        "dots_ocr",
        "DotsVisionBlock",
        DOTS,
        (
            *methods("dots_ocr", "DotsVisionAttention", "DotsSwiGLUFFN"),
            "qwen2_vl:Qwen2VisionAttention.split_qkv",
        ),
        _PARAMETERS,
    ),
    block_program(
        "paddleocr_vl",
        "SiglipEncoderLayer",
        PADDLE,
        (
            *methods("paddleocr_vl", "SiglipAttention"),
            *methods("siglip", "SiglipMLP"),
            "paddleocr_vl:SiglipAttention.split_qkv",
        ),
        _PARAMETERS,
    ),
)

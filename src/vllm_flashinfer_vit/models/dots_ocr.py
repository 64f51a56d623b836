# SPDX-License-Identifier: Apache-2.0
"""dots.ocr: NeoX rotary, by angles that each layer gets."""

import functools
from collections.abc import Callable
from typing import Any

from vllm_flashinfer_vit.blocks.spec import ANGLES, BlockSpec
from vllm_flashinfer_vit.models._shared import ANGLE_PARAMETERS, block_program, methods


def _split_as_qwen2_vl(block: Any) -> Callable[..., Any]:
    from vllm.model_executor.models.qwen2_vl import Qwen2VisionAttention

    return functools.partial(Qwen2VisionAttention.split_qkv, block.attn)


SPEC = BlockSpec(
    first="mlp.fc13",
    act="mlp.act_fn",
    second="mlp.fc2",
    split=_split_as_qwen2_vl,
    rotary=ANGLES,
)

PATCHES = (
    block_program(
        "dots_ocr",
        "DotsVisionBlock",
        SPEC,
        (
            *methods("dots_ocr", "DotsVisionAttention", "DotsSwiGLUFFN"),
            "qwen2_vl:Qwen2VisionAttention.split_qkv",
        ),
        ANGLE_PARAMETERS,
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""A layer as vLLM's models build it."""

from typing import Any

from vllm_flashinfer_vit.towers.tower import Tower

HEADS, HEAD_DIM = 4, 16
SCALE = HEAD_DIM**-0.5


def build(tower: Tower, **kwargs: Any) -> Any:
    from vllm.model_executor.layers.attention import MMEncoderAttention
    from vllm.utils.torch_utils import set_default_torch_dtype

    settings = {"num_heads": HEADS, "head_size": HEAD_DIM, "prefix": "a.layer"}
    with tower.running(), set_default_torch_dtype(tower.dtype):
        return MMEncoderAttention(**{**settings, **kwargs})

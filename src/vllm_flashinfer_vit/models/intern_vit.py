# SPDX-License-Identifier: Apache-2.0
"""InternViT, and RADIO, whose blocks derive from its: dense batches, no rotary.

Both scale what their branches add. RADIO gets several images, and the frames of some
videos, packed.
"""

import dataclasses

from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.models._shared import block_program, methods

SPEC = BlockSpec(
    first="mlp.fc1",
    act="mlp.activation_fn",
    second="mlp.fc2",
    rotary=None,
    layer_scales=("ls1", "ls2"),
    is_packed=False,
)

PATCHES = (
    block_program(
        "intern_vit",
        "InternVisionEncoderLayer",
        SPEC,
        methods("intern_vit", "InternParallelAttention", "InternMLP"),
        ("self", "hidden_states"),
    ),
    block_program(
        "radio",
        "RadioVisionEncoderLayer",
        dataclasses.replace(SPEC, packed_by="mask_meta"),
        (
            "radio:RadioParallelAttention.forward",
            "intern_vit:InternVisionEncoderLayer.__init__",
            "intern_vit:InternParallelAttention.__init__",
            *methods("intern_vit", "InternMLP"),
        ),
        ("self", "hidden_states", "mask_meta"),
    ),
)

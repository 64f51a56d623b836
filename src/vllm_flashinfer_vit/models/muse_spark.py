# SPDX-License-Identifier: Apache-2.0
"""Muse Spark: q and k are turned by halves, by one table of cosines and sines."""

from vllm_flashinfer_vit.blocks.spec import BlockSpec, Rotary
from vllm_flashinfer_vit.models._shared import block_program, methods

_FAMILY = "models.muse_spark.common.vision"

SPEC = BlockSpec(
    first="mlp.c_fc",
    act="mlp.act",
    second="mlp.c_proj",
    norm1="ln_1",
    norm2="ln_2",
    qkv="attn.qkv_proj",
    proj="attn.out_proj",
    rotary=Rotary("real", ("freq_cis",)),
    is_compiled_whole=True,
)

PATCHES = (
    block_program(
        _FAMILY,
        "NaViTBlock",
        SPEC,
        (
            *methods(_FAMILY, "NaViTAttention", "NaViTMLP"),
            f"{_FAMILY}:NaViTAttention._apply_rope",
        ),
        ("self", "x", "freq_cis", "cu_seqlens", "max_seqlen"),
        name="muse_spark",
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""Builders of vLLM's encoders that take the grids of their images."""

from typing import Any

import torch
from _models import (
    GRIDS,
    Call,
    config_of,
    noise,
    offsets,
    patches,
    plain,
    siglip_config,
)
from torch import nn
from torch.nn.functional import rms_norm


def glm4_1v(m: Any) -> tuple[nn.Module, Call]:
    from transformers import Glm4vConfig

    config = Glm4vConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 192,
            "num_heads": 2,
            "out_hidden_size": 96,
            "intermediate_size": 128,
            "image_size": 56,
        }
    )
    tower = m.Glm4vVisionTransformer(config.text_config, config.vision_config)
    return tower, lambda: tower(noise(patches(GRIDS), 3 * 2 * 14 * 14), GRIDS)


def glm_ocr(m: Any) -> tuple[nn.Module, Call]:
    vision = config_of(
        depth=2,
        hidden_size=128,
        num_heads=2,
        out_hidden_size=96,
        intermediate_size=128,
        image_size=56,
        patch_size=14,
        temporal_patch_size=2,
        in_channels=3,
        spatial_merge_size=2,
        rms_norm_eps=1e-5,
        hidden_act="silu",
    )
    text = config_of(intermediate_size=96)
    tower = m.GlmOcrVisionTransformer(text, vision)
    return tower, lambda: tower(noise(patches(GRIDS), 3 * 2 * 14 * 14), GRIDS)


def glm5next(m: Any) -> tuple[nn.Module, Call]:
    vision = config_of(
        depth=2,
        hidden_size=128,
        num_heads=2,
        out_hidden_size=96,
        intermediate_size=96,
        projection_intermediate_size=64,
        patch_size=14,
        temporal_patch_size=2,
        in_channels=3,
        spatial_merge_size=2,
        rms_norm_eps=1e-5,
        swiglu_limit=1.5,
    )
    text = config_of(max_position_embeddings=64)
    tower = m.Glm5NextVisionTransformer(text, vision, norm_eps=1e-5)

    def call() -> torch.Tensor:
        with plain(m, "fused_q_kv_rmsnorm", _both_normed):
            return tower(noise(patches(GRIDS), 3 * 2 * 14 * 14), GRIDS)

    return tower, call


def _both_normed(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    return tuple(
        rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
        for x, weight in ((q, q_weight), (k, k_weight))
    )


def exaone4_5(m: Any) -> tuple[nn.Module, Call]:
    vision = config_of(
        depth=2,
        hidden_size=256,
        num_heads=4,
        num_key_value_heads=2,
        out_hidden_size=64,
        intermediate_size=96,
        hidden_act="silu",
        patch_size=14,
        temporal_patch_size=2,
        in_channels=3,
        spatial_merge_size=2,
        window_size=56,
        fullatt_block_indexes=[1],
    )
    tower = m.EXAONE4_5_VisionTransformer(vision)
    return tower, lambda: tower(noise(patches(GRIDS), 3 * 2 * 14 * 14), GRIDS)


def mimo_v2_omni(m: Any) -> tuple[nn.Module, Call]:
    # Blocks of windowed attention call a Triton kernel of their own; none here.
    vision = config_of(
        depth=2,
        hidden_size=128,
        num_heads=4,
        num_key_value_heads=2,
        qk_channels=64,
        kv_channels=64,
        out_hidden_size=64,
        intermediate_size=96,
        hidden_act="silu",
        patch_size=14,
        temporal_patch_size=2,
        in_channels=3,
        spatial_merge_size=2,
        use_sink=False,
        visual_token_window_size=64,
        fullatt_block_indexes=[0, 1],
        vit_window_attn_types=[-1, -1],
    )
    tower = m.MiMoVisionTransformer(vision)
    grids = torch.tensor(GRIDS)
    return tower, lambda: tower(noise(patches(GRIDS), 3 * 2 * 14 * 14), grids)


def qwen3_omni_vision(m: Any) -> tuple[nn.Module, Call]:
    vision = config_of(
        depth=2,
        hidden_size=144,
        num_heads=2,
        image_size=64,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        apply_vit_abs_pos_embed=True,
        deepstack_visual_indexes=[0],
        in_channels=3,
        intermediate_size=96,
        hidden_act="gelu_pytorch_tanh",
        out_hidden_size=64,
        num_position_embeddings=16,
    )
    tower = m.Qwen3Omni_VisionTransformer(vision)
    grids = torch.tensor(GRIDS)
    return tower, lambda: tower(noise(patches(GRIDS), 3 * 2 * 16 * 16), grids)


def keye(m: Any) -> tuple[nn.Module, Call]:
    tower = m.KeyeSiglipEncoder(siglip_config())
    grids = [tuple(grid) for grid in GRIDS]
    cu_seqlens = offsets([t * h * w for t, h, w in GRIDS])
    hidden = noise(1, patches(GRIDS), 144)

    def call() -> torch.Tensor:
        return tower(hidden, cu_seqlens=cu_seqlens, image_grid_thw=grids, use_rope=True)

    return tower, call


def paddleocr_vl(m: Any) -> tuple[nn.Module, Call]:
    tower = m.SiglipEncoder(siglip_config())
    grids = [tuple(grid) for grid in GRIDS]
    cu_seqlens = offsets([t * h * w for t, h, w in GRIDS])
    hidden = noise(1, patches(GRIDS), 144)
    return tower, lambda: tower(hidden, cu_seqlens=cu_seqlens, image_grid_thw=grids)


def siglip2navit_unturned(m: Any) -> tuple[nn.Module, Call]:
    return siglip2navit(m, use_rope=False)


def siglip2navit(m: Any, use_rope: bool = True) -> tuple[nn.Module, Call]:
    config = config_of(
        hidden_size=144,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_channels=3,
        num_patches=-1,
        image_size=56,
        patch_size=14,
        temporal_patch_size=1,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-6,
        attention_dropout=0.0,
        hidden_stride=2,
        window_size=56,
        fullatt_block_indexes="1",
        preserve_original_pe=True,
        use_rope=use_rope,
    )
    tower = m.Siglip2NavitModel(config)
    grids = torch.tensor(GRIDS)
    return tower, lambda: tower(noise(patches(GRIDS), 3 * 14 * 14), grids)


def ernie45_vl(m: Any) -> tuple[nn.Module, Call]:
    vision = config_of(
        depth=2,
        hidden_size=160,
        embed_dim=160,
        num_heads=2,
        mlp_ratio=1,
        patch_size=14,
        in_channels=3,
        spatial_merge_size=2,
        hidden_act="quick_gelu",
    )
    tower = m.Ernie4_5_VisionTransformer(vision)
    grids = torch.tensor(GRIDS)
    return tower, lambda: tower(noise(patches(GRIDS), 3 * 14 * 14), grids)


def dots_ocr(m: Any) -> tuple[nn.Module, Call]:
    config = config_of(
        embed_dim=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_channels=3,
        patch_size=14,
        spatial_merge_size=2,
        temporal_patch_size=1,
        rms_norm_eps=1e-5,
        use_bias=False,
        post_norm=True,
        is_causal=False,
    )
    tower = m.DotsVisionTransformer(config)
    return tower, lambda: tower(noise(patches(GRIDS), 3 * 14 * 14), GRIDS)


def moonvit(m: Any) -> tuple[nn.Module, Call]:
    config = m.MoonViTConfig(
        hidden_size=144,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        init_pos_emb_height=8,
        init_pos_emb_width=8,
        merge_kernel_size=(2, 2),
    )
    tower = m.MoonVitPretrainedModel(config)
    grids = torch.tensor([grid[1:] for grid in GRIDS])
    tokens = sum(h * w for _, h, w in GRIDS)
    return tower, lambda: tower(noise(tokens, 3, 14, 14), grids)


def kimi_k3(m: Any) -> tuple[nn.Module, Call]:
    """RMSNorms of PyTorch, no biases, heads that are wider together than the stream."""
    if not hasattr(m, "_make_vision_norm"):
        raise ImportError("Kimi K3's tower")
    return kimi_k25(
        m,
        qkv_hidden_size=256,
        norm_type="rmsnorm",
        attn_bias=False,
        linear_bias=False,
        patch_embed_proj_bias=False,
        pos_emb_interpolation_mode="bilinear",
    )


def kimi_k25(m: Any, **fields: Any) -> tuple[nn.Module, Call]:
    config = config_of(
        **fields,
        hidden_size=144,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        patch_size=14,
        init_pos_emb_height=8,
        init_pos_emb_width=8,
        init_pos_emb_time=4,
        pos_emb_type="divided_fixed",
        video_attn_type="spatial_temporal",
        merge_kernel_size=(2, 2),
        merge_type="sd2_tpool",
        hidden_act="gelu_pytorch_tanh",
    )
    # The model casts its tower, and with it the fp32 embedding of time.
    tower = m.MoonViT3dPretrainedModel(config).to(torch.get_default_dtype())
    grids = torch.tensor(GRIDS)
    return tower, lambda: tower(noise(patches(GRIDS), 3, 14, 14), grids)

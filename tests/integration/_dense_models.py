# SPDX-License-Identifier: Apache-2.0
"""Builders of vLLM's encoders of dense batches, of pooling, and of Whisper's."""

from typing import Any

import torch
from _models import Call, config_of, intern_config, noise, siglip_config, through
from torch import nn


def siglip(m: Any) -> tuple[nn.Module, Call]:
    tower = m.SiglipVisionModel(siglip_config(vision_use_head=False))
    return tower, lambda: tower(noise(3, 3, 42, 42))


def clip(m: Any) -> tuple[nn.Module, Call]:
    tower = m.CLIPVisionModel(_clip_config())
    return tower, lambda: tower(noise(3, 3, 42, 42))


def clip_hidden(m: Any) -> tuple[nn.Module, Call]:
    """As LLaVA has it that takes several layers, with the exact GELU."""
    tower = m.CLIPVisionModel(_clip_config(hidden_act="gelu", num_hidden_layers=3))
    layers = [-3, -2]
    return tower, lambda: tower(noise(3, 3, 42, 42), select_layers=layers)


def deepencoder(m: Any) -> tuple[nn.Module, Call]:
    tower = m.DeepCLIPVisionTransformer(_clip_config())
    return tower, lambda: tower(noise(3, 3, 42, 42), noise(3, 128, 3, 3))


def _clip_config(**fields: Any) -> Any:
    from transformers import CLIPVisionConfig

    common = {
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 42,
        "patch_size": 14,
    }
    return CLIPVisionConfig(**{**common, **fields})


def blip(m: Any) -> tuple[nn.Module, Call]:
    from transformers import Blip2VisionConfig

    config = Blip2VisionConfig(
        hidden_size=176,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=42,
        patch_size=14,
    )
    tower = m.BlipVisionModel(config)
    return tower, lambda: tower(noise(3, 3, 42, 42))


def intern_vit(m: Any) -> tuple[nn.Module, Call]:
    config = intern_config()
    config.qk_normalization = False
    tower = m.InternVisionModel(config)
    return tower, lambda: tower(noise(3, 3, 28, 28))


def intern_vit_normed(m: Any) -> tuple[nn.Module, Call]:
    tower = m.InternVisionModel(intern_config())
    return tower, lambda: tower(noise(3, 3, 28, 28))


def radio(m: Any) -> tuple[nn.Module, Call]:
    config = intern_config()
    config.qk_normalization = False
    encoder = m.RadioVisionEncoder(config)
    return encoder, lambda: encoder(noise(4, 19, 160))


def interns1_vit(m: Any) -> tuple[nn.Module, Call]:
    config = config_of(
        hidden_size=128,
        num_attention_heads=2,
        attention_bias=True,
        use_qk_norm=True,
        layer_norm_eps=1e-6,
    )
    attention = m.InternSdpaAttention(config)
    return attention, lambda: attention(noise(3, 17, 128))


def aimv2(m: Any) -> tuple[nn.Module, Call]:
    config = config_of(
        hidden_size=256,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=96,
        rms_norm_eps=1e-5,
        qkv_bias=False,
        mlp_bias=False,
        use_bias=False,
        num_channels=3,
        image_size=42,
        patch_size=14,
    )
    tower = m.AIMv2Model(config, None, require_post_norm=True)
    return tower, lambda: tower(noise(3, 3, 42, 42))


def idefics2(m: Any) -> tuple[nn.Module, Call]:
    encoder = m.Idefics2Encoder(siglip_config())
    return encoder, lambda: encoder(noise(3, 17, 144))


def idefics2_masked(m: Any) -> tuple[nn.Module, Call]:
    """As MiniCPM-V has it: strips of patches, padded, and the last block left out."""
    config = siglip_config()
    config.num_hidden_layers = 3
    tower = m.Idefics2VisionTransformer(config, apply_encoder_attention_mask=True)
    tower.encoder.layers = tower.encoder.layers[:-1]
    pixels = noise(3, 3, config.patch_size, 9 * config.patch_size)
    # One batch after the other, of one size.
    masks = [
        torch.arange(9) < torch.tensor(patches)[:, None]
        for patches in ((9, 4, 7), (1, 9, 9))
    ]
    # What stands where padding was, nobody reads.
    return tower, lambda: [
        tower(pixels, patch_attention_mask=mask[:, None])[mask] for mask in masks
    ]


def glm4v(m: Any) -> tuple[nn.Module, Call]:
    config = config_of(hidden_size=224, num_heads=2, dropout_prob=0.0)
    attention = m.EVA2CLIPAttention(config)
    return attention, lambda: attention(noise(3, 17, 224))


def glmasr(m: Any) -> tuple[nn.Module, Call]:
    # Fewer heads for keys and values, and rotary on half of the head dim.
    config = config_of(
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        partial_rotary_factor=0.5,
        rope_parameters=None,
    )
    attention = m.GlmAsrEncoderAttention(config)
    cos, sin = noise(17, 16).cos(), noise(17, 16).sin()
    return attention, lambda: attention(noise(3, 17, 256), cos, sin)


def mllama4(m: Any) -> tuple[nn.Module, Call]:
    config = config_of(
        hidden_size=176,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        attention_dropout=0.0,
        rope_parameters={"rope_theta": 10000.0},
        rope_theta=10000.0,
    )
    encoder = m.Llama4VisionEncoder(config, None)
    # One batch after the other, of one size and of another.
    return encoder, lambda: [encoder(noise(batch, 17, 176)) for batch in (3, 3, 1)]


def molmo2(m: Any) -> tuple[nn.Module, Call]:
    config = m.VitConfig(
        hidden_size=144,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    blocks = m.Molmo2VisionBlockCollection(config)
    # Of all of them, the adapter takes two.
    return blocks, lambda: blocks(noise(3, 17, 144))


def moondream3(m: Any) -> tuple[nn.Module, Call]:
    blocks = nn.ModuleList([m.Moondream3VisionBlock(144, 96, 2) for _ in range(2)])
    return blocks, lambda: through(blocks, noise(3, 17, 144))


def step3_vl(m: Any) -> tuple[nn.Module, Call]:
    attention = m.Step3VisionAttention(
        config_of(hidden_size=224, num_attention_heads=2)
    )
    return attention, lambda: attention(noise(3, 17, 224))


def step_vl(m: Any) -> tuple[nn.Module, Call]:
    return _perception(m, [(3, 4), (4, 3), (4, 4)], ls_init_value=0.1)


def step_vl_plain(m: Any) -> tuple[nn.Module, Call]:
    """Without layer scales, and with a token in front of the patches."""
    return _perception(m, [(4, 4), (3, 3)], use_cls_token=True)


def _perception(
    m: Any, grids: list[tuple[int, int]], use_cls_token: bool = False, **fields: Any
) -> tuple[nn.Module, Call]:
    tower = m.PerceptionEncoderVisionTransformer(
        192,
        layers=2,
        heads=2,
        max_grid_height=4,
        max_grid_width=4,
        mlp_ratio=1.0,
        act_layer=m.get_act_fn("quick_gelu"),
        use_cls_token=use_cls_token,
        **fields,
    )
    # Two of the grids have as many patches, and are turned otherwise.
    return tower, lambda: [
        tower(noise(3, h * w + use_cls_token, 192), grid_hw=(h, w)) for h, w in grids
    ]


def minicpmv4_6(m: Any) -> tuple[nn.Module, Call]:
    attention = m.MiniCPMV4_6ViTWindowAttentionSelfAttn(siglip_config())
    return attention, lambda: attention(noise(9, 4, 144))


def hunyuan_vision(m: Any) -> tuple[nn.Module, Call]:
    attention = m.HunYuanVisionAttention(144, 2, 144)
    return attention, lambda: attention(noise(1, 33, 144))


def funasr(m: Any) -> tuple[nn.Module, Call]:
    attention = m.FunASRAudioAttention(num_heads=2, embed_dim=128)
    return attention, lambda: attention(noise(3, 17, 128), None, None)


def molmo_pooling(m: Any) -> tuple[nn.Module, Call]:
    config = config_of(
        image_emb_dim=128, image_num_heads=2, image_num_key_value_heads=2
    )
    attention = m.MultiHeadDotProductAttention(config, nlayers=2)
    features = noise(9, 4, 256)
    return attention, lambda: attention(features.mean(1, keepdim=True), features)


def molmo2_pooling(m: Any) -> tuple[nn.Module, Call]:
    attention = m.ImagePoolingAttention(
        input_dim=256,
        hidden_size=128,
        num_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        use_pytorch_sdpa=False,
    )
    features = noise(9, 4, 256)
    return attention, lambda: attention(features.mean(1, keepdim=True), features)


def whisper(m: Any) -> tuple[nn.Module, Call]:
    attention = m.WhisperAttention(128, 2, attn_type=m.AttentionType.ENCODER)

    def call() -> torch.Tensor:
        return torch.cat([attention(noise(3, 17, 128))[0], attention(noise(17, 128))])

    return attention, call

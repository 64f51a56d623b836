# SPDX-License-Identifier: Apache-2.0
"""Builders of vLLM's encoders that take packed sequences by their lengths alone."""

from collections.abc import Callable
from functools import partial
from inspect import getsource, signature
from typing import Any

import torch
from _models import (
    LENGTHS,
    Call,
    config_of,
    intern_config,
    noise,
    offsets,
    plain,
    siglip_config,
    through,
)
from torch import nn


def audio_encoder(m: Any, n_window: int, n_window_infer: int) -> Any:
    """Return Qwen3-Omni's, which takes twice `n_window` frames at once."""
    pinned = signature(m.async_tensor_h2d).parameters.get("pin_memory")
    if pinned is not None and pinned.default:
        raise NotImplementedError("pins host memory, for which there must be a GPU")
    config = config_of(
        d_model=128,
        num_mel_bins=16,
        max_source_positions=64,
        n_window=n_window,
        n_window_infer=n_window_infer,
        conv_chunksize=500,
        downsample_hidden_size=16,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=96,
        activation_function="gelu",
        output_dim=64,
    )
    return m.Qwen3OmniMoeAudioEncoder(config)


def qwen3_omni_audio(m: Any) -> tuple[nn.Module, Call]:
    tower = audio_encoder(m, 8, 32)
    frames = torch.tensor([64, 40, 16])
    tokens = torch.tensor([8, 5, 2])
    return tower, lambda: tower(noise(16, int(frames.sum())), frames, tokens)


def openpangu(m: Any) -> tuple[nn.Module, Call]:
    # Its tower takes FLASH_ATTN alone, which no CPU has.
    config = config_of(hidden_act="gelu")
    blocks = nn.ModuleList(
        m.OpenPanguVisionBlock(
            192,
            2,
            96,
            m._ACTIVATION_REGISTRY["gelu"],
            partial(m.RMSNorm, eps=1e-6),
            config,
        )
        for _ in range(2)
    )
    angles = noise(sum(LENGTHS), 48)
    given = {"cu_seqlens": offsets(LENGTHS), "cos": angles.cos(), "sin": angles.sin()}
    return blocks, lambda: through(blocks, noise(76, 192), **given)


def isaac(m: Any) -> tuple[nn.Module, Call]:
    encoder = m.Siglip2Encoder(siglip_config())
    sizes = torch.tensor(LENGTHS)
    cu_seqlens, max_seqlen = m.create_cumulative_seq_lengths(sizes, sizes.device)

    def call() -> torch.Tensor:
        return encoder(
            inputs_embeds=noise(1, sum(LENGTHS), 144),
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )

    return encoder, call


def lfm2_siglip2(m: Any) -> tuple[nn.Module, Call]:
    encoder = m.Siglip2Encoder(siglip_config())

    def call() -> torch.Tensor:
        return encoder(
            noise(1, sum(LENGTHS), 144),
            cu_seqlens=offsets(LENGTHS),
            max_seqlen=torch.tensor(max(LENGTHS), dtype=torch.int32),
        )

    return encoder, call


def radio(m: Any) -> tuple[nn.Module, Call]:
    config = intern_config()
    config.qk_normalization = False
    encoder = m.RadioVisionEncoder(config)
    meta = m.MaskMetadata(
        cu_seqlens=offsets(LENGTHS), max_seqlen=torch.tensor(max(LENGTHS))
    )
    return encoder, lambda: encoder(noise(1, sum(LENGTHS), 160), mask_meta=meta)


def funaudiochat(m: Any) -> tuple[nn.Module, Call]:
    config = config_of(
        d_model=128,
        encoder_attention_heads=2,
        encoder_ffn_dim=96,
        dropout=0.0,
        attention_dropout=0.0,
        activation_function="gelu",
        activation_dropout=0.0,
        num_attention_heads=2,
    )
    layer = m.FunAudioChatAudioEncoderLayer(config)
    return layer, lambda: layer(noise(76, 128), cu_seqlens=offsets(LENGTHS))[0]


def llava_onevision2(m: Any) -> tuple[nn.Module, Call]:
    attention = m.LlavaOnevision2VisionAttn(128, 2, 128)
    longest = torch.tensor(max(LENGTHS), dtype=torch.int32)

    def call() -> torch.Tensor:
        return attention(
            noise(76, 128), offsets(LENGTHS), noise(76, 32), max_seqlen=longest
        )

    return attention, call


def pixtral(m: Any) -> tuple[nn.Module, Call]:
    config = config_of(
        hidden_size=128,
        num_attention_heads=2,
        num_hidden_layers=2,
        head_dim=64,
        intermediate_size=96,
    )
    tower = m.Transformer(config)
    angles = noise(76, 32)
    turns = torch.polar(torch.ones_like(angles, dtype=torch.float32), angles.float())
    # The sources say which of the two forms a release takes.
    real = "freqs_cis.dtype == torch.float32" in getsource(m)

    def call() -> torch.Tensor:
        freqs = torch.view_as_real(turns) if real else turns
        return tower(noise(1, 76, 128), freqs, *_pixtral_lengths(m, tower))

    return tower, call


def pixtral_hf(m: Any) -> tuple[nn.Module, Call]:
    config = config_of(
        hidden_size=128,
        num_attention_heads=2,
        num_hidden_layers=2,
        head_dim=64,
        intermediate_size=96,
        hidden_act="silu",
    )
    tower = m.PixtralHFTransformer(config)
    angles = noise(76, 32).repeat(1, 2)

    def call() -> torch.Tensor:
        tables = angles.cos(), angles.sin()
        lengths = _pixtral_lengths(m, tower)
        return tower(noise(1, 76, 128), tables, *lengths, return_all_hidden_states=True)

    return tower, call


def _pixtral_lengths(m: Any, tower: Any) -> tuple[Any, ...]:
    if not hasattr(m, "_make_packed_sequence_metadata"):
        raise NotImplementedError("attends by a dense mask, not by MMEncoderAttention")
    backend = tower.layers[0].attention.attn.attn_backend
    device = torch.get_default_device()
    return m._make_packed_sequence_metadata(LENGTHS, backend, 128, 1, device)


def muse_glimmer(m: Any) -> tuple[nn.Module, Call]:
    attention = m.MuseGlimmerVisionAttention(128, 2)
    return attention, _packed_rotary(attention, noise(76, 128), 32)


def cohere_compass(m: Any) -> tuple[nn.Module, Call]:
    blocks = nn.ModuleList(
        m.Cohere_VisionBlock(144, 2, 96, m._ACTIVATION_REGISTRY["gelu_pytorch_tanh"])
        for _ in range(2)
    )
    call = partial(through, blocks)
    return blocks, _packed_rotary(call, noise(76, 1, 144), 36)


def _packed_rotary(
    attention: Callable[..., torch.Tensor], hidden: torch.Tensor, half: int
) -> Call:
    angles = noise(76, half)

    def call() -> torch.Tensor:
        return attention(
            hidden,
            rotary_pos_emb_cos=angles.cos(),
            rotary_pos_emb_sin=angles.sin(),
            cu_seqlens=offsets(LENGTHS),
            max_seqlen=torch.tensor(max(LENGTHS), dtype=torch.int32),
            sequence_lengths=None,
        )

    return call


def muse_spark(m: Any) -> tuple[nn.Module, Call]:
    encoder = m.NaViTEncoder(128, 2, 2, intermediate_size=96)
    device = torch.get_default_device()
    cu_seqlens, max_seqlen = m._seqlens_to_cu_seqlens(LENGTHS, device)
    angles = noise(76, 32).float()
    rotary = torch.stack([angles.cos(), angles.sin()], dim=-1)
    return encoder, lambda: encoder(noise(76, 128), rotary, cu_seqlens, max_seqlen)


def deepseek_v4(m: Any) -> tuple[nn.Module, Call]:
    """Images packed in one call, and each in a call of its own without offsets."""
    if not hasattr(m, "build_packed_vit_metadata"):
        raise NotImplementedError("takes one image at a time")
    config = config_of(
        vision_dim=128,
        vision_n_heads=2,
        vision_inter_dim=96,
        vision_n_layers=2,
        vision_patch_size=4,
        vision_rope_theta=10000.0,
    )
    tower = m.DeepseekV4ViT(config)
    grids = [(4, 6), (10, 2), (1, 3)]
    sizes = [height * width for height, width in grids]
    pixels = noise(sum(sizes), 3, 4, 4)

    def call() -> list[torch.Tensor]:
        metadata = m.build_packed_vit_metadata(
            grids,
            rope_dim=tower.rope_dim,
            rope_theta=tower.rope_theta,
            device=torch.get_default_device(),
        )
        names = "vit_cos", "vit_sin", "cu_seqlens", "max_seqlen"
        packed = tower.forward_packed(pixels, *(metadata[name] for name in names))
        alone = zip(pixels.split(sizes), grids, strict=True)
        return [packed, *(tower(image, *grid) for image, grid in alone)]

    return tower, call


def minimax_m3(m: Any) -> tuple[nn.Module, Call]:
    """The encoder; planes of cosines and sines as vLLM's kernel fills them."""
    if not hasattr(m, "triton_mrope"):
        raise NotImplementedError("turns by tables without planes")
    config = config_of(
        hidden_size=160,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=96,
        layer_norm_eps=1e-5,
        hidden_act="gelu",
    )
    encoder = m.MiniMaxVLEncoder(config)
    third = 13
    angles = noise(3, 76, 3 * third).float()
    for at, plane in enumerate(angles):
        # Their own columns only.
        plane[:, : at * third] = plane[:, (at + 1) * third :] = torch.nan
    longest = torch.tensor(max(LENGTHS), dtype=torch.int32)

    def call() -> torch.Tensor:
        tables = angles.cos(), angles.sin()
        x = noise(76, 1, 160)
        with plain(m, "triton_mrope", _mrope):
            return encoder(x, offsets(LENGTHS), *tables, longest)

    return encoder, call


def _mrope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    sections: list[int],
    head_size: int,
    rotary_dim: int,
    **_: bool,
) -> None:
    """Turn q and k `[T, H D]` in place, by halves of the turned part of a head."""
    cos, sin = (
        torch.cat([t[i] for i, t in enumerate(of.split(sections, dim=-1))], dim=-1)
        for of in (cos, sin)
    )
    for x in (q, k):
        turned = x.view(len(x), -1, head_size)[..., :rotary_dim]
        first, second = turned.float().chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        turned.copy_(torch.cat([first * c - second * s, second * c + first * s], -1))

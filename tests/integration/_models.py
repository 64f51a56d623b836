# SPDX-License-Identifier: Apache-2.0
"""vLLM's own encoders at a small size: true head dims, two or three heads, few blocks.

Each builder takes the module that holds the encoder and returns it with a call on
fixed inputs. Several images of unequal size go in wherever an encoder packs them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from inspect import getsource, signature
from types import ModuleType, SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import nn

from vllm_flashinfer_vit.blocks.program import BlockProgram
from vllm_flashinfer_vit.ops import attention as ops
from vllm_flashinfer_vit.towers.spec import TowerSpec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

Call = Callable[[], Any]
Builder = Callable[[Any], tuple[nn.Module, Call]]

# Two images, a row of one merged patch, a video of three frames.
GRIDS = [[1, 4, 6], [1, 10, 2], [1, 2, 2], [3, 4, 4]]
LENGTHS = [13, 40, 1, 22]

LAYERS = {"FlashInferViTAttention", "MMEncoderAttention", "WhisperEncoderAttention"}

CONTEXT = TowerSpec(
    family="qwen2_vl",
    vision_config={
        "depth": 1,
        "embed_dim": 32,
        "hidden_size": 32,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 2,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    model="context",
    checkpoint=None,
    full_depth=1,
)


def engine(
    backend: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tower:
    """Return a tower, whose `running()` holds what an engine holds for any encoder."""
    return build_tower(CONTEXT, backend=backend, dtype=dtype, device=device)


def noise(*shape: int) -> torch.Tensor:
    """Return N(0, 1) that bf16 can hold, the same values for the same shape."""
    generator = torch.Generator().manual_seed(len(shape))
    values = torch.randn(
        shape, generator=generator, device="cpu", dtype=torch.float32
    ).bfloat16()
    return values.to(torch.get_default_device(), torch.get_default_dtype())


def offsets(lengths: list[int]) -> torch.Tensor:
    """Return prefix sums `[N + 1] int32`."""
    zero = torch.zeros(1, dtype=torch.int32)
    return torch.cat([zero, torch.tensor(lengths).cumsum(0).int()])


def patches(grids: list[list[int]]) -> int:
    """Return the number of patches of all grids."""
    return sum(t * h * w for t, h, w in grids)


def encode(encoder: "Encoder", tower: Tower) -> "Result":
    """Build an encoder as an engine does, with seeded weights, and call it once."""
    module = encoder.load()
    # Nothing can be pinned where the default device is a GPU.
    pins = {"PIN_MEMORY": False} if hasattr(module, "PIN_MEMORY") else {}
    with (
        tower.running(),
        _defaults(tower.device, tower.dtype),
        patch.multiple(module, **pins) if pins else nullcontext(),
    ):
        encoder_module, call = encoder.build(module)
        _finish(encoder_module, tower)
        with OpCount() as count, _counted_programs() as programs:
            out = call()
    layers = {type(m).__name__ for m in encoder_module.modules()} & LAYERS
    return Result(_flat(out), layers, count.calls, len(programs))


@contextmanager
def _counted_programs() -> Iterator[list[int]]:
    """Collect the places of the blocks that run as programs."""
    places: list[int] = []
    run = BlockProgram.run

    def noting(self: Any, *args: Any) -> torch.Tensor:
        places.append(self._index)
        return run(self, *args)

    with patch.object(BlockProgram, "run", noting):
        yield places


@contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(dtype), device:
        yield


def _finish(module: nn.Module, tower: Tower) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    generator = torch.Generator()
    for index, (name, parameter) in enumerate(module.named_parameters()):
        if parameter.dim() < 2:
            mean = 0.0 if name.endswith("bias") else 1.0
            parameter.copy_(mean + 0.1 * noise(*parameter.shape))
            continue
        generator.manual_seed(index)
        values = torch.empty(parameter.shape, device="cpu", dtype=torch.float32)
        values.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
        parameter.copy_(values.bfloat16())
    process_weights_after_loading(module, tower.vllm_config.model_config, tower.device)


def _flat(out: Any) -> torch.Tensor:
    parts = out if isinstance(out, (list, tuple)) else [out]
    return torch.cat([part.flatten() for part in parts]).float().cpu()


class OpCount:
    """Counts how often layers attend, and how often that is prepared.

    Eager layers do it past the dispatcher.

    Attributes:
        calls: How often layers attended.
        prepared: For how many calls, which blocks of a pass may share.
    """

    def __enter__(self) -> Self:
        self.calls = self.prepared = 0
        prepare = ops.prepare

        def counted(*args: Any) -> ops.Call:
            self.prepared += 1
            call = prepare(*args)

            def attend() -> torch.Tensor:
                self.calls += 1
                return call()

            return attend

        self._patch = patch.object(ops, "prepare", counted)
        self._patch.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._patch.__exit__(*exc)


def _config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


def _siglip_config(**fields: Any) -> Any:
    from transformers import SiglipVisionConfig

    common = {
        "hidden_size": 144,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 42,
        "patch_size": 14,
    }
    return SiglipVisionConfig(**{**common, **fields})


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
    vision = _config(
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
    text = _config(intermediate_size=96)
    tower = m.GlmOcrVisionTransformer(text, vision)
    return tower, lambda: tower(noise(patches(GRIDS), 3 * 2 * 14 * 14), GRIDS)


def exaone4_5(m: Any) -> tuple[nn.Module, Call]:
    vision = _config(
        depth=2,
        hidden_size=320,
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
    vision = _config(
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
    vision = _config(
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


def qwen3_omni_audio(m: Any) -> tuple[nn.Module, Call]:
    pinned = signature(m.async_tensor_h2d).parameters.get("pin_memory")
    if pinned is not None and pinned.default:
        raise NotImplementedError("pins host memory, for which there must be a GPU")
    config = _config(
        d_model=128,
        num_mel_bins=16,
        max_source_positions=64,
        n_window=8,
        n_window_infer=32,
        conv_chunksize=500,
        downsample_hidden_size=16,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=96,
        activation_function="gelu",
        output_dim=64,
    )
    tower = m.Qwen3OmniMoeAudioEncoder(config)
    frames = torch.tensor([64, 40, 16])
    tokens = torch.tensor([8, 5, 2])
    return tower, lambda: tower(noise(16, int(frames.sum())), frames, tokens)


def keye(m: Any) -> tuple[nn.Module, Call]:
    tower = m.KeyeSiglipEncoder(_siglip_config())
    grids = [tuple(grid) for grid in GRIDS]
    cu_seqlens = offsets([t * h * w for t, h, w in GRIDS])
    hidden = noise(1, patches(GRIDS), 144)

    def call() -> torch.Tensor:
        return tower(hidden, cu_seqlens=cu_seqlens, image_grid_thw=grids, use_rope=True)

    return tower, call


def paddleocr_vl(m: Any) -> tuple[nn.Module, Call]:
    tower = m.SiglipEncoder(_siglip_config())
    grids = [tuple(grid) for grid in GRIDS]
    cu_seqlens = offsets([t * h * w for t, h, w in GRIDS])
    hidden = noise(1, patches(GRIDS), 144)
    return tower, lambda: tower(hidden, cu_seqlens=cu_seqlens, image_grid_thw=grids)


def siglip2navit(m: Any) -> tuple[nn.Module, Call]:
    config = _config(
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
        use_rope=True,
    )
    tower = m.Siglip2NavitModel(config)
    grids = torch.tensor(GRIDS)
    return tower, lambda: tower(noise(patches(GRIDS), 3 * 14 * 14), grids)


def ernie45_vl(m: Any) -> tuple[nn.Module, Call]:
    vision = _config(
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
    config = _config(
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
    config = _moonvit_config()
    encoder = m.MoonVitEncoder(
        hidden_dim=144,
        num_layers=2,
        block_cfg=config,
        prefix="encoder",
    )
    grids = torch.tensor([grid[1:] for grid in GRIDS])
    tokens = sum(h * w for _, h, w in GRIDS)
    return encoder, lambda: encoder(noise(tokens, 144), grids)


def _moonvit_config() -> dict[str, Any]:
    return {
        "num_heads": 2,
        "hidden_dim": 144,
        "mlp_dim": 96,
        "activation": nn.GELU(approximate="tanh"),
        "attn_bias": True,
    }


def kimi_k25(m: Any) -> tuple[nn.Module, Call]:
    config = _config(
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


def openpangu(m: Any) -> tuple[nn.Module, Call]:
    attention = m.OpenPanguVisionAttention(160, 2, 160)
    cu_seqlens = offsets(LENGTHS)
    cos, sin = noise(sum(LENGTHS), 40).cos(), noise(sum(LENGTHS), 40).sin()
    return attention, lambda: attention(noise(76, 160), cu_seqlens, cos, sin)


def isaac(m: Any) -> tuple[nn.Module, Call]:
    encoder = m.Siglip2Encoder(_siglip_config())
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
    encoder = m.Siglip2Encoder(_siglip_config())

    def call() -> torch.Tensor:
        return encoder(
            noise(1, sum(LENGTHS), 144),
            cu_seqlens=offsets(LENGTHS),
            max_seqlen=torch.tensor(max(LENGTHS), dtype=torch.int32),
        )

    return encoder, call


def radio(m: Any) -> tuple[nn.Module, Call]:
    config = _intern_config()
    encoder = m.RadioVisionEncoder(config)
    meta = m.MaskMetadata(
        cu_seqlens=offsets(LENGTHS), max_seqlen=torch.tensor(max(LENGTHS))
    )

    def call() -> torch.Tensor:
        packed = encoder(noise(1, sum(LENGTHS), 160), mask_meta=meta)
        dense = encoder(noise(4, 19, 160))
        return torch.cat([packed[0], dense.flatten(0, 1)])

    return encoder, call


def _intern_config() -> SimpleNamespace:
    return _config(
        hidden_size=160,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        qkv_bias=True,
        qk_normalization=True,
        layer_norm_eps=1e-6,
        norm_type="layer_norm",
        hidden_act="gelu",
        initializer_factor=1.0,
        image_size=28,
        patch_size=14,
    )


def siglip(m: Any) -> tuple[nn.Module, Call]:
    tower = m.SiglipVisionModel(_siglip_config(vision_use_head=False))
    return tower, lambda: tower(noise(3, 3, 42, 42))


def clip(m: Any) -> tuple[nn.Module, Call]:
    from transformers import CLIPVisionConfig

    config = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=42,
        patch_size=14,
    )
    tower = m.CLIPVisionModel(config)
    return tower, lambda: tower(noise(3, 3, 42, 42))


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
    config = _intern_config()
    config.qk_normalization = False
    tower = m.InternVisionModel(config)
    return tower, lambda: tower(noise(3, 3, 28, 28))


def intern_vit_normed(m: Any) -> tuple[nn.Module, Call]:
    tower = m.InternVisionModel(_intern_config())
    return tower, lambda: tower(noise(3, 3, 28, 28))


def interns1_vit(m: Any) -> tuple[nn.Module, Call]:
    config = _config(
        hidden_size=128,
        num_attention_heads=2,
        attention_bias=True,
        use_qk_norm=True,
        layer_norm_eps=1e-6,
    )
    attention = m.InternSdpaAttention(config)
    return attention, lambda: attention(noise(3, 17, 128))


def aimv2(m: Any) -> tuple[nn.Module, Call]:
    config = _config(
        hidden_size=256,
        num_attention_heads=2,
        qkv_bias=False,
        mlp_bias=False,
        use_bias=False,
    )
    attention = m.AIMv2Attention(config, None, prefix="attn")
    return attention, lambda: attention(noise(3, 17, 256))


def idefics2(m: Any) -> tuple[nn.Module, Call]:
    encoder = m.Idefics2Encoder(_siglip_config())
    return encoder, lambda: encoder(noise(3, 17, 144))


def glm4v(m: Any) -> tuple[nn.Module, Call]:
    config = _config(hidden_size=224, num_heads=2, dropout_prob=0.0)
    attention = m.EVA2CLIPAttention(config)
    return attention, lambda: attention(noise(3, 17, 224))


def glmasr(m: Any) -> tuple[nn.Module, Call]:
    # Fewer heads for keys and values, and rotary on half of the head dim.
    config = _config(
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
    config = _config(
        hidden_size=176,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        attention_dropout=0.0,
        rope_parameters={"rope_theta": 10000.0},
        rope_theta=10000.0,
    )
    attention = m.Llama4VisionAttention(config, None)
    return attention, lambda: attention(noise(3, 17, 176))


def molmo2(m: Any) -> tuple[nn.Module, Call]:
    attention = m.ViTMultiHeadDotProductAttention(
        hidden_size=144, num_heads=2, num_key_value_heads=2, head_dim=72
    )
    return attention, lambda: attention(noise(3, 17, 144))


def moondream3(m: Any) -> tuple[nn.Module, Call]:
    block = m.Moondream3VisionBlock(144, 96, 2)
    return block, lambda: block(noise(3, 17, 144))


def step3_vl(m: Any) -> tuple[nn.Module, Call]:
    attention = m.Step3VisionAttention(_config(hidden_size=224, num_attention_heads=2))
    return attention, lambda: attention(noise(3, 17, 224))


def step_vl(m: Any) -> tuple[nn.Module, Call]:
    tower = m.PerceptionEncoderVisionTransformer(
        192,
        layers=2,
        heads=2,
        max_grid_height=4,
        max_grid_width=4,
        mlp_ratio=1.0,
        act_layer=nn.GELU(),
    )
    return tower, lambda: tower(noise(3, 12, 192), grid_hw=(3, 4))


def minicpmv4_6(m: Any) -> tuple[nn.Module, Call]:
    attention = m.MiniCPMV4_6ViTWindowAttentionSelfAttn(_siglip_config())
    return attention, lambda: attention(noise(9, 4, 144))


def hunyuan_vision(m: Any) -> tuple[nn.Module, Call]:
    attention = m.HunYuanVisionAttention(144, 2, 144)
    return attention, lambda: attention(noise(1, 33, 144))


def funasr(m: Any) -> tuple[nn.Module, Call]:
    attention = m.FunASRAudioAttention(num_heads=2, embed_dim=128)
    return attention, lambda: attention(noise(3, 17, 128), None, None)


def funaudiochat(m: Any) -> tuple[nn.Module, Call]:
    config = _config(
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
    config = _config(
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
        return tower(noise(1, 76, 128), freqs, *_pixtral_lengths(m, tower, 128))

    return tower, call


def pixtral_hf(m: Any) -> tuple[nn.Module, Call]:
    config = _config(
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
        lengths = _pixtral_lengths(m, tower, 128)
        return tower(noise(1, 76, 128), tables, *lengths, return_all_hidden_states=True)

    return tower, call


def _pixtral_lengths(m: Any, tower: Any, width: int) -> tuple[Any, ...]:
    if not hasattr(m, "_make_packed_sequence_metadata"):
        raise NotImplementedError("attends by a dense mask, not by MMEncoderAttention")
    backend = tower.layers[0].attention.attn.attn_backend
    device = torch.get_default_device()
    return m._make_packed_sequence_metadata(LENGTHS, backend, width, 1, device)


def muse_glimmer(m: Any) -> tuple[nn.Module, Call]:
    attention = m.MuseGlimmerVisionAttention(128, 2)
    return attention, _packed_rotary(attention, noise(76, 128), 32)


def cohere_compass(m: Any) -> tuple[nn.Module, Call]:
    attention = m.Cohere_VisionAttention(144, 2, 144)
    call = _packed_rotary(attention, noise(76, 1, 144), 36)
    return attention, call


def _packed_rotary(attention: nn.Module, hidden: torch.Tensor, half: int) -> Call:
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
    attention = m.NaViTAttention(128, 2)
    device = torch.get_default_device()
    cu_seqlens, max_seqlen = m._seqlens_to_cu_seqlens(LENGTHS, device)
    angles = noise(76, 32)
    rotary = torch.stack([angles.cos(), angles.sin()], dim=-1)
    return attention, lambda: attention(noise(76, 128), rotary, cu_seqlens, max_seqlen)


def deepseek_v4(m: Any) -> tuple[nn.Module, Call]:
    config = _config(vision_dim=128, vision_n_heads=2, vision_inter_dim=96)
    attention = m.DeepseekV4VisionAttention(config)
    angles = noise(76, 1, 32)
    longest = torch.tensor(max(LENGTHS), dtype=torch.int32)

    def call() -> torch.Tensor:
        cos, sin = angles.cos(), angles.sin()
        packed = attention(noise(76, 128), cos, sin, offsets(LENGTHS), longest)
        return torch.cat([packed, attention(noise(76, 128), cos, sin)])

    return attention, call


def molmo_pooling(m: Any) -> tuple[nn.Module, Call]:
    config = _config(image_emb_dim=128, image_num_heads=2, image_num_key_value_heads=2)
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


@dataclass(frozen=True)
class Result:
    """What an encoder did.

    Attributes:
        out: All of its output, `[-1] float32` on the CPU.
        layers: Names of the classes of its attention layers.
        ops: Calls of this package's custom op.
        programs: Blocks that ran as programs.
    """

    out: torch.Tensor
    layers: set[str]
    ops: int
    programs: int


@dataclass(frozen=True)
class Encoder:
    """One encoder of vLLM.

    Attributes:
        module: Where it is, below `vllm`.
        build: Builds it from that module.
        ops: Calls of the custom op in one forward pass.
        programs: Blocks that run as programs in it.
    """

    module: str
    build: Builder
    ops: int = 2
    programs: int = 0

    def load(self) -> ModuleType:
        """Import the module; ImportError if this vLLM lacks it."""
        return import_module(f"vllm.{self.module}")


def _model(name: str, build: Builder, ops: int = 2, programs: int = 0) -> Encoder:
    return Encoder(f"model_executor.models.{name}", build, ops, programs)


def _program(name: str, build: Builder) -> Encoder:
    """Return an encoder of two blocks, both of which run as programs."""
    return _model(name, build, 2, 2)


# Packed sequences: cu_seqlens, and a longest length in whatever form.
PACKED = {
    "glm4_1v": _program("glm4_1v", glm4_1v),
    "glm_ocr": _program("glm_ocr", glm_ocr),
    "exaone4_5": _program("exaone4_5", exaone4_5),
    "mimo_v2_omni": _model("mimo_v2_omni", mimo_v2_omni),
    "qwen3_omni-vision": _program("qwen3_omni_moe_thinker", qwen3_omni_vision),
    "qwen3_omni-audio": _model("qwen3_omni_moe_thinker", qwen3_omni_audio),
    "keye": _model("keye", keye),
    "paddleocr_vl": _program("paddleocr_vl", paddleocr_vl),
    "siglip2navit": _model("siglip2navit", siglip2navit),
    "ernie45_vl": _program("ernie45_vl", ernie45_vl),
    "dots_ocr": _program("dots_ocr", dots_ocr),
    "moonvit": _model("moonvit", moonvit),
    "kimi_k25": _program("kimi_k25_vit", kimi_k25),
    "openpangu_vl": _model("openpangu_vl", openpangu, 1),
    "isaac": _model("isaac", isaac),
    "lfm2_siglip2": _model("lfm2_siglip2", lfm2_siglip2),
    "radio": _model("radio", radio, 4),
    "funaudiochat": _model("funaudiochat", funaudiochat, 1),
    "llava_onevision2": _model("llava_onevision2", llava_onevision2, 1),
    "pixtral": _program("pixtral", pixtral),
    "pixtral_hf": _program("pixtral", pixtral_hf),
    "muse_glimmer": _model("muse_glimmer", muse_glimmer, 1),
    "cohere_compass": _model("cohere_compass", cohere_compass, 1),
    "muse_spark": Encoder("models.muse_spark.common.vision", muse_spark, 1),
    "deepseek_v4": Encoder("models.deepseek_v4.common.vision", deepseek_v4, 2),
}
# Dense batches, without cu_seqlens.
DENSE = {
    "siglip": _program("siglip", siglip),
    "clip": _model("clip", clip),
    "blip": _model("blip", blip),
    "intern_vit": _program("intern_vit", intern_vit),
    "intern_vit-normed": _model("intern_vit", intern_vit_normed),
    "interns1_vit": _model("interns1_vit", interns1_vit, 1),
    "aimv2": _model("aimv2", aimv2, 1),
    "idefics2": _program("idefics2_vision_model", idefics2),
    "glm4v": _model("glm4v", glm4v, 1),
    "glmasr": _model("glmasr", glmasr, 1),
    "mllama4": _model("mllama4", mllama4, 1),
    "molmo2": _model("molmo2", molmo2, 1),
    "moondream3": _model("moondream3", moondream3, 1),
    "step3_vl": _model("step3_vl", step3_vl, 1),
    "step_vl": _model("step_vl", step_vl),
    "minicpmv4_6": _model("minicpmv4_6", minicpmv4_6, 1),
    "hunyuan_vision": _model("hunyuan_vision", hunyuan_vision, 1),
    "funasr": _model("funasr", funasr, 1),
}
# Pooling: one query attends to four keys.
CROSS = {
    "molmo": _model("molmo", molmo_pooling, 0),
    "molmo2": _model("molmo2", molmo2_pooling, 0),
}
WHISPER = _model("whisper", whisper, 0)

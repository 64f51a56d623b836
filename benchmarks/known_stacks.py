# SPDX-License-Identifier: Apache-2.0
"""Which towers `block_stacks` builds the blocks of: their sizes, and one block of each.

Sizes stand here where `WHOLE_MODELS` has none of the model, with where they are from.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import stack_rotary
from stack_rotary import Tensors
from tower_cases import AUDIO_CASES, CASES
from vllm_flashinfer_vit.towers.whole import WholeModel
from vllm_flashinfer_vit.towers.whole_models import WHOLE_MODELS

Build = Callable[[Any], nn.Module]


@dataclass(frozen=True)
class Stack:
    """What to build.

    Attributes:
        module: vLLM's module of the model, with its tower's part where it has several.
        block: Builds one of its blocks, from that module.
        depth: Blocks of the tower.
        width: Columns of the stream.
        head_dim: Of its attention.
        shape: The stream's: `T1C`, `1TC`, `TC`, or `BSC` for dense batches.
        rotary: Makes what turns q and k, of angles `[T, D / 2]` and the dtype.
        fits: Whether tables that its blocks keep have an image of so many rows and
            columns.
        window: Rows and columns of the windows that its blocks attend in, 0 if none do.
        full: Those blocks that attend to whole images in spite of that.
        cases: What `bench_encoder.py` runs if it is not told: cases' names.
    """

    module: str
    block: Build
    depth: int
    width: int
    head_dim: int
    shape: str
    rotary: Callable[[torch.Tensor, torch.dtype], Tensors] = lambda angles, dtype: {}
    fits: Callable[[int, int], bool] = lambda rows, columns: True
    window: int = 0
    full: frozenset[int] = frozenset()
    cases: tuple[str, ...] = tuple(CASES)


_GEMMA_3 = WHOLE_MODELS["google/gemma-3-4b-it"]
_DOTS = WHOLE_MODELS["rednote-hilab/dots.ocr"]
_GLM_OCR = WHOLE_MODELS["zai-org/GLM-OCR"]
_KIMI = WHOLE_MODELS["moonshotai/Kimi-K2.5"]
_PIXTRAL = WHOLE_MODELS["mistral-community/pixtral-12b"]
_INTERN = WHOLE_MODELS["OpenGVLab/InternVL3-8B"]
_ERNIE = WHOLE_MODELS["baidu/ERNIE-4.5-VL-28B-A3B-PT"]
_PADDLE = WHOLE_MODELS["PaddlePaddle/PaddleOCR-VL"]
_OMNI = WHOLE_MODELS["Qwen/Qwen3-Omni-30B-A3B-Instruct"]
# Rows and columns of patches of Step-VL's largest image, 728 x 728 pixels.
_STEP_SIDE = 52


def _images(*tokens: int) -> tuple[str, ...]:
    """Return the cases of a tower whose images have so many tokens each."""
    return tuple(f"{images}x{each}" for each in tokens for images in (1, 8, 32))


def _siglip(**fields: Any) -> Any:
    """Return the configuration of SigLIP So400m, which many towers started from."""
    from transformers import SiglipVisionConfig

    return SiglipVisionConfig(**_GEMMA_3.vision, **fields)


def _siglip_layer(m: Any) -> nn.Module:
    return m.SiglipEncoderLayer(_siglip(), attn_cls=m.MMEncoderAttention)


def _dots(m: Any) -> nn.Module:
    return m.DotsVisionBlock(SimpleNamespace(**_DOTS.vision))


def _glm_ocr(m: Any) -> nn.Module:
    v = _GLM_OCR.vision
    norm = functools.partial(m.RMSNorm, eps=v["rms_norm_eps"])
    return m.GlmOcrVisionBlock(
        v["hidden_size"], v["num_heads"], v["intermediate_size"], norm
    )


def _kimi(m: Any) -> nn.Module:
    gelu = nn.GELU(approximate="tanh")
    v = _KIMI.vision
    return m.MoonViTEncoderLayer(
        v["num_attention_heads"],
        v["hidden_size"],
        v["intermediate_size"],
        activation=gelu,
        attn_bias=True,
    )


def _ernie(m: Any) -> nn.Module:
    v = _ERNIE.vision
    return m.Ernie4_5_VisionBlock(v["embed_dim"], v["num_heads"], float(v["mlp_ratio"]))


def _omni(m: Any) -> nn.Module:
    v = _OMNI.vision
    return m.Qwen3_VisionBlock(
        v["hidden_size"],
        v["num_heads"],
        v["intermediate_size"],
        m._ACTIVATION_REGISTRY[v["hidden_act"]],
    )


def _kimi_k3(m: Any) -> nn.Module:
    if not hasattr(m, "_make_vision_norm"):
        raise ImportError("Kimi K3's blocks, from vLLM 0.27 on")
    return m.MoonViTEncoderLayer(
        12,
        1024,
        4096,
        activation=nn.GELU(approximate="tanh"),
        qkv_hidden_size=1536,
        norm_type="rmsnorm",
        linear_bias=False,
    )


def _pixtral(m: Any) -> nn.Module:
    return m.TransformerBlock(SimpleNamespace(**_PIXTRAL.vision))


def _intern(m: Any) -> nn.Module:
    return m.InternVisionEncoderLayer(SimpleNamespace(**_INTERN.vision))


def _moonvit(m: Any) -> nn.Module:
    from transformers.activations import ACT2FN

    act = ACT2FN["gelu_pytorch_tanh"]
    return m.MoonVitEncoderLayer(16, 1152, 4304, activation=act, attn_bias=True)


def _clip(m: Any) -> nn.Module:
    from transformers import CLIPVisionConfig

    config = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        num_hidden_layers=1,
    )
    return m.CLIPEncoder(config, attn_cls=m.MMEncoderAttention).layers[0]


def _blip(m: Any) -> nn.Module:
    from transformers import Blip2VisionConfig

    return m.BlipEncoderLayer(Blip2VisionConfig())


def _aimv2(m: Any) -> nn.Module:
    from transformers import Aimv2VisionConfig

    # vLLM 0.25 reads a name that Transformers no longer sets.
    return m.AIMv2Block(Aimv2VisionConfig(use_bias=False), None, "")


def _molmo2(m: Any) -> nn.Module:
    return m.Molmo2VisionBlock(m.VitConfig())


def _cohere(m: Any) -> nn.Module:
    act = m._ACTIVATION_REGISTRY["gelu_pytorch_tanh"]
    return m.Cohere_VisionBlock(1152, 16, 4304, act)


def _radio(m: Any) -> nn.Module:
    from vllm.transformers_utils.configs.radio import RadioConfig

    return m.RadioVisionEncoderLayer(RadioConfig("vit_huge_patch16_224"))


def _llama4(m: Any) -> nn.Module:
    config = SimpleNamespace(
        hidden_size=1408,
        intermediate_size=5632,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        attention_dropout=0.0,
        rope_parameters={"rope_theta": 10000.0},
    )
    return m.Llama4VisionEncoderLayer(config, None)


def _step_vl(m: Any) -> nn.Module:
    return m.PerceptionEncoderVisionBlock(
        1536,
        16,
        max_grid_height=_STEP_SIDE,
        max_grid_width=_STEP_SIDE,
        mlp_ratio=8960 / 1536,
        ls_init_value=0.1,
        act_layer=m.get_act_fn("quick_gelu"),
        norm_layer=m._DEFAULT_NORM_LAYER,
    )


def _glm_5(m: Any) -> nn.Module:
    norm = functools.partial(m.RMSNorm, eps=1e-5)
    return m.Glm5NextVisionBlock(1024, 16, 4096, 10.0, norm_layer=norm)


def _minimax(m: Any) -> nn.Module:
    config = SimpleNamespace(
        hidden_size=1280,
        intermediate_size=5120,
        num_attention_heads=16,
        layer_norm_eps=1e-5,
        hidden_act="gelu",
    )
    return m.MiniMaxVLEncoderLayer(config)


def _openpangu(m: Any) -> nn.Module:
    norm = functools.partial(m.RMSNorm, eps=1e-6)
    act = m._ACTIVATION_REGISTRY["gelu"]
    config = SimpleNamespace(hidden_act="gelu")
    return m.OpenPanguVisionBlock(1536, 16, 4608, act, norm, config)


def _exaone(m: Any) -> nn.Module:
    norm = functools.partial(m.RMSNorm, eps=1e-6)
    return m.Exaone4_5_VisionBlock(2048, 32, 8, 5120, norm_layer=norm)


def _muse_spark(m: Any) -> nn.Module:
    return m.NaViTBlock(1536, 16, intermediate_size=8960)


def _deepseek(m: Any) -> nn.Module:
    config = SimpleNamespace(vision_dim=1024, vision_n_heads=16, vision_inter_dim=2816)
    return m.DeepseekV4VisionBlock(config)


def _omni_audio(m: Any) -> nn.Module:
    return m.Qwen3OmniMoeAudioEncoderLayer(m.Qwen3OmniMoeAudioEncoderConfig())


def _stack(
    whole: WholeModel, block: Build, shape: str, *rotary: Any, **more: Any
) -> Stack:
    """Return the blocks of a model that the package knows."""
    vision = whole.vision
    width = vision.get("embed_dim", vision["hidden_size"])
    depth = vision[whole.depth]
    sizes = depth, width, whole.head_dim
    return Stack(whole.tower, block, *sizes, shape, *rotary, **more)


def _so400m(module: str, block: Build, shape: str, *rotary: Any, **more: Any) -> Stack:
    """Return the blocks of a tower of SigLIP So400m's size."""
    return Stack(module, block, 27, 1152, 72, shape, *rotary, **more)


STACKS: Mapping[str, Stack] = {
    "GLM-OCR": _stack(_GLM_OCR, _glm_ocr, "T1C", stack_rotary.tables),
    "PaddleOCR-VL": _stack(
        _PADDLE, lambda m: m.SiglipEncoderLayer(_siglip()), "1TC", stack_rotary.plain
    ),
    "dots.ocr": _stack(_DOTS, _dots, "TC", stack_rotary.plain),
    "ERNIE-4.5-VL": _stack(_ERNIE, _ernie, "T1C", stack_rotary.plain),
    "Qwen3-Omni": _stack(_OMNI, _omni, "T1C", stack_rotary.tables),
    "Kimi-K2.5": _stack(_KIMI, _kimi, "TC", stack_rotary.polar),
    "Kimi-K3": Stack("kimi_k25_vit", _kimi_k3, 27, 1024, 128, "TC", stack_rotary.polar),
    "Pixtral-12B": _stack(_PIXTRAL, _pixtral, "1TC", stack_rotary.pixtral),
    "SigLIP-So400m": _stack(
        _GEMMA_3, _siglip_layer, "BSC", cases=(*_images(729), "1x4096", "8x4096")
    ),
    "Idefics2": _so400m(
        "idefics2_vision_model",
        lambda m: m.Idefics2EncoderLayer(_siglip()),
        "BSC",
        cases=(*_images(1024), "1x4096"),
    ),
    "InternViT-300M": _stack(_INTERN, _intern, "BSC", cases=_images(1024)),
    # MoonViTConfig of vLLM, by default.
    "Kimi-VL": _so400m("moonvit", _moonvit, "TC", stack_rotary.polar),
    # openai/clip-vit-large-patch14-336.
    "CLIP-L": Stack("clip", _clip, 24, 1024, 64, "BSC", cases=_images(577)),
    # The configuration that vLLM's deepseek_ocr makes: CLIP-L's blocks, fewer tokens.
    "DeepSeek-OCR": Stack(
        "deepencoder", _clip, 24, 1024, 64, "BSC", cases=_images(101, 257)
    ),
    # Its technical report: SigLIP-400M-384-14.
    "Keye-VL": _so400m(
        "keye",
        lambda m: m.KeyeSiglipEncoderLayer(_siglip()),
        "1TC",
        functools.partial(stack_rotary.pair, "rope_emb"),
    ),
    # config.json as a test of its conversion has it: no block has windows.
    "Ovis2.5": _so400m(
        "siglip2navit",
        lambda m: m.Siglip2EncoderLayer(_siglip(use_rope=True)),
        "TC",
        functools.partial(stack_rotary.pair, "position_embeddings"),
    ),
    # Its model card: SigLIP2 NaFlex, shape-optimised, 400M.
    "LFM2-VL-1.6B": _so400m(
        "lfm2_siglip2", lambda m: m.Siglip2EncoderLayer(_siglip()), "1TC"
    ),
    # Isaac 0.2 2B, as NxD Inference's port describes it: SigLIP 2 So400m.
    "Isaac": _so400m("isaac", lambda m: m.Siglip2EncoderLayer(_siglip()), "1TC"),
    # Aimv2VisionConfig of Transformers, by default: aimv2-large, which Ovis2-1B has.
    "AIMv2-L": Stack("aimv2", _aimv2, 24, 1024, 128, "BSC", cases=_images(1024)),
    # Blip2VisionConfig of Transformers, by default.
    "BLIP-2": Stack("blip", _blip, 39, 1408, 88, "BSC", cases=_images(257)),
    # Moondream3VisionConfig of vLLM, by default.
    "Moondream3": _so400m(
        "moondream3",
        lambda m: m.Moondream3VisionBlock(1152, 4304, 16),
        "BSC",
        cases=_images(729),
    ),
    # VitConfig of vLLM, by default, less two blocks that vLLM leaves out since the
    # adapter does not ask for them.
    "Molmo2": Stack(
        "molmo2 (encoder)", _molmo2, 25, 1152, 72, "BSC", cases=_images(729)
    ),
    # CohereCompassVisionConfig of Transformers, by default.
    "Cohere-Compass": _so400m("cohere_compass", _cohere, "T1C", stack_rotary.tables),
    # RadioConfig of vLLM: ViT-H.
    "RADIO-H": Stack(
        "radio (one image)", _radio, 32, 1280, 80, "BSC", cases=_images(1024)
    ),
    # config.json of Llama 4 Scout and of Maverick: 336 x 336 pixels and a last token.
    "Llama-4": Stack(
        "mllama4",
        _llama4,
        34,
        1408,
        88,
        "BSC",
        fits=lambda rows, columns: rows * columns == 24 * 24 + 1,
        cases=_images(577),
    ),
    # PerceptionEncoderConfig of vLLM, by default, which Step3.7 and Step-5 have.
    "Step-VL": Stack(
        "step_vl",
        _step_vl,
        47,
        1536,
        96,
        "BSC",
        fits=lambda rows, columns: max(rows, columns) <= _STEP_SIDE,
        cases=_images(1296, 2704),
    ),
    # Glm5NextVisionConfig of Transformers, by default: GLM-5.3-Flash.
    "GLM-5.3": Stack(
        "models.glm5next.common.multimodal",
        _glm_5,
        24,
        1024,
        64,
        "T1C",
        stack_rotary.tables,
    ),
    # MiniMaxM3VLVisionConfig of Transformers, by default.
    "MiniMax-M3": Stack(
        "models.minimax_m3.common.vision_tower",
        _minimax,
        32,
        1280,
        80,
        "T1C",
        stack_rotary.planes,
    ),
    # MuseSparkVisionConfig of Transformers, by default: each fourth block and the last
    # one attend to whole images.
    "Muse-Spark": Stack(
        "models.muse_spark.common.vision",
        _muse_spark,
        50,
        1536,
        96,
        "TC",
        stack_rotary.muse,
        window=32,
        full=frozenset({*range(3, 50, 4), 49}),
    ),
    # OpenPanguVLVisionConfig of openPangu-VL-7B's own code, by default.
    "openPangu-VL": Stack(
        "openpangu_vl",
        _openpangu,
        26,
        1536,
        96,
        "TC",
        stack_rotary.of_rounded,
        window=8,
        full=frozenset({5, 12, 19, 25}),
    ),
    # config.json as a test of TensorRT-LLM has it: Transformers' defaults are others.
    "EXAONE-4.5": Stack(
        "exaone4_5",
        _exaone,
        28,
        2048,
        64,
        "T1C",
        stack_rotary.tables,
        window=8,
        full=frozenset({6, 13, 20, 27}),
    ),
    # DeepSeek-V4-Flash-Vision-Exp, whose config.json has the sizes that vLLM's
    # DeepseekV41Config has by default, and 32 blocks.
    "DeepSeek-V4.1": Stack(
        "models.deepseek_v4.common.vision",
        _deepseek,
        32,
        1024,
        64,
        "TC",
        stack_rotary.of_all_heads,
    ),
    # Qwen3OmniMoeAudioEncoderConfig of Transformers, by default.
    # Stock's tower waits for the longest length in each block, which is not in its
    # times here; with this package the tower, too, has it on the host.
    "Qwen3-Omni-Audio": Stack(
        "qwen3_omni_moe_thinker (audio)",
        _omni_audio,
        32,
        1280,
        64,
        "TC",
        cases=tuple(AUDIO_CASES),
    ),
}

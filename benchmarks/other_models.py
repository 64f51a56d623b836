# SPDX-License-Identifier: Apache-2.0
"""Models other than Qwen's, whose checkpoint folders other_checkpoints.py writes.

The vision tower has its published dimensions, the language model after it is small.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import transformers

from other_checkpoints import SMALL, OtherModel, image_processor, vision
from vllm_flashinfer_vit.towers.spec import NAMED_MODELS
from vllm_flashinfer_vit.towers.whole_models import WHOLE_MODELS

_GEMMA = {"head_dim": 256, "num_attention_heads": 4, "sliding_window": 1024}


def _glm_ids(ids: Mapping[str, int]) -> dict[str, int]:
    """Return the ids that configs of GLM-4.xV and GLM-OCR name."""
    return {
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "image_start_token_id": ids["<|begin_of_image|>"],
        "image_end_token_id": ids["<|end_of_image|>"],
        "video_start_token_id": ids["<|begin_of_video|>"],
        "video_end_token_id": ids["<|end_of_video|>"],
    }


def _glm4v_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    tower = dict(NAMED_MODELS["zai-org/GLM-4.1V-9B-Thinking"][1])
    text = {
        **SMALL,
        # The tower's merger is as wide as the language model.
        "hidden_size": tower["out_hidden_size"],
        "num_attention_heads": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [8, 12, 12],
        },
    }
    return transformers.Glm4vConfig(
        text_config=text,
        vision_config={**tower, "depth": depth or tower["depth"]},
        **_glm_ids(ids),
    )


def _glm_ocr_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    text = {
        **SMALL,
        **WHOLE_MODELS["zai-org/GLM-OCR"].text,
        "num_attention_heads": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "mrope_section": [16, 24, 24],
        },
    }
    return transformers.GlmOcrConfig(
        text_config=text,
        vision_config=vision("zai-org/GLM-OCR", depth),
        **_glm_ids(ids),
    )


def _glm4v_processor(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> transformers.ProcessorMixin:
    # At most 4096 tokens for an image or a video.
    return transformers.Glm4vProcessor(
        image_processor=transformers.Glm4vImageProcessor(
            size={"shortest_edge": 112 * 112, "longest_edge": 4096 * 28 * 28 * 2}
        ),
        tokenizer=tokenizer,
        video_processor=transformers.Glm4vVideoProcessor(
            size={"shortest_edge": 112 * 112, "longest_edge": 4096 * 28 * 28 * 2}
        ),
    )


def _paddleocr_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    text = {
        **SMALL,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500000.0,
            "mrope_section": [16, 24, 24],
        },
    }
    return transformers.PaddleOCRVLConfig(
        text_config=text,
        vision_config=vision("PaddlePaddle/PaddleOCR-VL", depth),
        image_token_id=ids["<|IMAGE_PLACEHOLDER|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|IMAGE_START|>"],
        vision_end_token_id=ids["<|IMAGE_END|>"],
    )


def _paddleocr_processor(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> transformers.ProcessorMixin:
    return transformers.PaddleOCRVLProcessor(
        image_processor=image_processor("PaddlePaddle/PaddleOCR-VL"),
        tokenizer=tokenizer,
    )


def _pixtral_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    fields = {
        **WHOLE_MODELS["mistral-community/pixtral-12b"].fields,
        "image_token_index": ids["[IMG]"],
    }
    return transformers.LlavaConfig(
        text_config={**SMALL, "model_type": "mistral", "sliding_window": None},
        vision_config=vision("mistral-community/pixtral-12b", depth),
        **fields,
    )


def _pixtral_processor(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> transformers.ProcessorMixin:
    return transformers.PixtralProcessor(
        image_processor=image_processor("mistral-community/pixtral-12b"),
        tokenizer=tokenizer,
        patch_size=16,
    )


def _gemma3_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    return transformers.Gemma3Config(
        text_config={**SMALL, **_GEMMA},
        vision_config=vision("google/gemma-3-4b-it", depth),
        **WHOLE_MODELS["google/gemma-3-4b-it"].fields,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
    )


def _gemma3_processor(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> transformers.ProcessorMixin:
    return transformers.Gemma3Processor(
        image_processor=image_processor("google/gemma-3-4b-it"),
        tokenizer=tokenizer,
        image_seq_length=256,
    )


def _gemma4_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    text = {
        **SMALL,
        **_GEMMA,
        # One size of heads, for which any of vLLM's backends will do.
        "global_head_dim": _GEMMA["head_dim"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": SMALL["vocab_size"],
    }
    return transformers.Gemma4Config(
        text_config=text,
        vision_config=vision("google/gemma-4-31B-it", depth),
        **WHOLE_MODELS["google/gemma-4-31B-it"].fields,
        boi_token_id=ids["<|image>"],
        eoi_token_id=ids["<image|>"],
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        boa_token_id=ids["<|audio>"],
        eoa_token_index=ids["<audio|>"],
        audio_token_id=ids["<|audio|>"],
    )


def _gemma4_processor(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> transformers.ProcessorMixin:
    return transformers.Gemma4Processor(
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
        image_processor=image_processor("google/gemma-4-31B-it"),
        tokenizer=tokenizer,
        video_processor=transformers.Gemma4VideoProcessor(),
    )


class InternVLChatConfig(transformers.PretrainedConfig):
    """The config of InternVL's models, which is code of their repositories.

    Args:
        vision_config: Fields of the tower.
        text_config: Fields of the language model, a Qwen2.
        **fields: Other fields.
    """

    model_type = "internvl_chat"

    def __init__(
        self,
        vision_config: Mapping[str, Any] | None = None,
        text_config: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        self.vision_config = transformers.PretrainedConfig(**(vision_config or {}))
        self.text_config = transformers.Qwen2Config(**(text_config or {}))
        super().__init__(**fields)


def _internvl_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    whole = WHOLE_MODELS["OpenGVLab/InternVL3-8B"]
    fields = {**whole.fields, **whole.processor_fields}
    # vLLM reads both from the tower's fields and the model's type from the class.
    for name in ("image_size", "model_type"):
        fields.pop(name)
    return InternVLChatConfig(
        vision_config=vision("OpenGVLab/InternVL3-8B", depth),
        text_config=SMALL,
        **fields,
    )


def _internvl_processor(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> transformers.PreTrainedTokenizerFast:
    # vLLM makes the processor of the config.
    return tokenizer


def _kimi_k25_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    # vLLM builds a DeepSeek of it. Of these sizes it has neither MLA nor experts.
    text = {
        **SMALL,
        "model_type": "llama",
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "n_routed_experts": None,
        "first_k_dense_replace": SMALL["num_hidden_layers"],
    }
    return transformers.Kimi_K25Config(
        text_config=text,
        vision_config=vision("moonshotai/Kimi-K2.5", depth),
        image_token_id=ids["<|media_pad|>"],
    )


def _kimi_k25_processor(tokenizer: transformers.PreTrainedTokenizerFast) -> Any:
    from vllm.transformers_utils.processors.kimi_k25_vision_fused import (
        KimiK25FusedVisionProcessor,
    )

    # As in the published preprocessor_config.json.
    return KimiK25FusedVisionProcessor(
        media_proc_cfg={
            "patch_size": 14,
            "merge_kernel_size": 2,
            "temporal_merge_kernel_size": 4,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "in_patch_limit": 16384,
            "in_patch_limit_each_frame": 4096,
            "in_patch_limit_video": None,
            "patch_limit_on_one_side": 512,
            "fixed_output_tokens": None,
        }
    )


def _dots_ocr_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    from vllm.transformers_utils.configs.dotsocr import DotsOCRConfig

    # The tower's merger is as wide as the language model.
    text = {
        **SMALL,
        **WHOLE_MODELS["rednote-hilab/dots.ocr"].text,
        "num_attention_heads": 12,
    }
    return DotsOCRConfig(
        image_token_id=ids["<|imgpad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_config=vision("rednote-hilab/dots.ocr", depth),
        **text,
    )


def _dots_ocr_processor(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> transformers.ProcessorMixin:
    fields = {
        **WHOLE_MODELS["rednote-hilab/dots.ocr"].processor_fields,
        # At most 4096 tokens for an image, which a prompt has room for.
        "size": {"shortest_edge": 56 * 56, "longest_edge": 4096 * 28 * 28},
    }
    return transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**fields),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
    )


_GLM4V = OtherModel(
    architecture="Glm4vForConditionalGeneration",
    image="<|begin_of_image|><|image|><|end_of_image|>",
    video="<|begin_of_video|><|video|><|end_of_video|>",
    named={"image_token": "<|image|>", "video_token": "<|video|>"},
    special_tokens=(
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
    ),
    config=_glm4v_config,
    processor=_glm4v_processor,
)
OTHER_MODELS: Mapping[str, OtherModel] = {
    "zai-org/GLM-4.1V-9B-Thinking": _GLM4V,
    "zai-org/GLM-OCR": replace(
        _GLM4V,
        architecture="GlmOcrForConditionalGeneration",
        config=_glm_ocr_config,
    ),
    "PaddlePaddle/PaddleOCR-VL": OtherModel(
        architecture="PaddleOCRVLForConditionalGeneration",
        image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        video="",
        named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        special_tokens=("<|IMAGE_START|>", "<|IMAGE_END|>", "<|video_pad|>"),
        config=_paddleocr_config,
        processor=_paddleocr_processor,
    ),
    "mistral-community/pixtral-12b": OtherModel(
        architecture="LlavaForConditionalGeneration",
        image="[IMG]",
        video="",
        named={},
        special_tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        config=_pixtral_config,
        processor=_pixtral_processor,
    ),
    "google/gemma-3-4b-it": OtherModel(
        architecture="Gemma3ForConditionalGeneration",
        image="<start_of_image>",
        video="",
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        # vLLM looks them up, to join those before and after an image.
        special_tokens=tuple("\n" * count for count in (1, 2, 3, 4)),
        config=_gemma3_config,
        processor=_gemma3_processor,
    ),
    "google/gemma-4-31B-it": OtherModel(
        architecture="Gemma4ForConditionalGeneration",
        image="<|image|>",
        video="",
        named={
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
        },
        special_tokens=("<|video|>",),
        config=_gemma4_config,
        processor=_gemma4_processor,
    ),
    "OpenGVLab/InternVL3-8B": OtherModel(
        architecture="InternVLChatModel",
        image="<image>",
        video="<video>",
        named={},
        special_tokens=("<img>", "</img>", "<IMG_CONTEXT>", "<|video_pad|>"),
        config=_internvl_config,
        processor=_internvl_processor,
    ),
    "moonshotai/Kimi-K2.5": OtherModel(
        architecture="KimiK25ForConditionalGeneration",
        image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        video="",
        named={},
        special_tokens=(
            "<|media_begin|>",
            "<|media_content|>",
            "<|media_pad|>",
            "<|media_end|>",
        ),
        config=_kimi_k25_config,
        processor=_kimi_k25_processor,
        modality="vision_chunk",
    ),
    "rednote-hilab/dots.ocr": OtherModel(
        architecture="DotsOCRForCausalLM",
        image="<|img|><|imgpad|><|endofimg|>",
        video="",
        named={"image_token": "<|imgpad|>", "video_token": "<|video_pad|>"},
        special_tokens=("<|img|>", "<|endofimg|>"),
        config=_dots_ocr_config,
        processor=_dots_ocr_processor,
    ),
}

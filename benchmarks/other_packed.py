# SPDX-License-Identifier: Apache-2.0
"""Models other than Qwen's whose towers get packed sequences, as folders to write."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import transformers

from other_checkpoints import SMALL, OtherModel, image_processor, vision
from vllm_flashinfer_vit.towers.spec import NAMED_MODELS
from vllm_flashinfer_vit.towers.whole_models import WHOLE_MODELS


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
PACKED_MODELS: Mapping[str, OtherModel] = {
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

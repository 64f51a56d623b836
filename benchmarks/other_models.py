# SPDX-License-Identifier: Apache-2.0
"""Models other than Qwen's, whose checkpoint folders other_checkpoints.py writes.

The vision tower has its published dimensions, the language model after it is small.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import transformers

from vllm_flashinfer_vit.towers.resolve import resolve
from vllm_flashinfer_vit.towers.spec import NAMED_MODELS
from vllm_flashinfer_vit.towers.whole import ModelSpec
from vllm_flashinfer_vit.towers.whole_models import WHOLE_MODELS

_VOCABULARY = 512
# Of every language model; heads of 128 unless a model has its own.
_SMALL = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
_GEMMA = {"head_dim": 256, "num_attention_heads": 4, "sliding_window": 1024}


@dataclass(frozen=True)
class OtherModel:
    """A model whose folder can be written.

    Attributes:
        architecture: The model's class in vLLM.
        image: What stands for an image in a prompt.
        video: What stands for a video; empty if none is asked.
        named: The tokenizer's attributes that are special tokens.
        special_tokens: Other special tokens.
        config: Takes ids by special token and the number of blocks or None, and returns
            the model's config.
        processor: Takes the tokenizer, and returns the model's processor.
    """

    architecture: str
    image: str
    video: str
    named: Mapping[str, str]
    special_tokens: tuple[str, ...]
    config: Callable[[Mapping[str, int], int | None], transformers.PretrainedConfig]
    processor: Callable[
        [transformers.PreTrainedTokenizerFast], transformers.ProcessorMixin
    ]


def _vision(model: str, depth: int | None) -> Mapping[str, Any]:
    """Return the dimensions of a tower, or of its first blocks."""
    whole = WHOLE_MODELS[model]
    return {**whole.vision, whole.depth: depth or whole.vision[whole.depth]}


def _image_processor(model: str) -> Any:
    spec = resolve(model, random_weights=True)
    assert isinstance(spec, ModelSpec)
    return spec.image_processor()


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
    vision = dict(NAMED_MODELS["zai-org/GLM-4.1V-9B-Thinking"][1])
    text = {
        **_SMALL,
        # The tower's merger is as wide as the language model.
        "hidden_size": vision["out_hidden_size"],
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
        vision_config={**vision, "depth": depth or vision["depth"]},
        **_glm_ids(ids),
    )


def _glm_ocr_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    text = {
        **_SMALL,
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
        vision_config=_vision("zai-org/GLM-OCR", depth),
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
        **_SMALL,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500000.0,
            "mrope_section": [16, 24, 24],
        },
    }
    return transformers.PaddleOCRVLConfig(
        text_config=text,
        vision_config=_vision("PaddlePaddle/PaddleOCR-VL", depth),
        image_token_id=ids["<|IMAGE_PLACEHOLDER|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|IMAGE_START|>"],
        vision_end_token_id=ids["<|IMAGE_END|>"],
    )


def _paddleocr_processor(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> transformers.ProcessorMixin:
    return transformers.PaddleOCRVLProcessor(
        image_processor=_image_processor("PaddlePaddle/PaddleOCR-VL"),
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
        text_config={**_SMALL, "model_type": "mistral", "sliding_window": None},
        vision_config=_vision("mistral-community/pixtral-12b", depth),
        **fields,
    )


def _pixtral_processor(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> transformers.ProcessorMixin:
    return transformers.PixtralProcessor(
        image_processor=_image_processor("mistral-community/pixtral-12b"),
        tokenizer=tokenizer,
        patch_size=16,
    )


def _gemma3_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    return transformers.Gemma3Config(
        text_config={**_SMALL, **_GEMMA},
        vision_config=_vision("google/gemma-3-4b-it", depth),
        **WHOLE_MODELS["google/gemma-3-4b-it"].fields,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
    )


def _gemma3_processor(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> transformers.ProcessorMixin:
    return transformers.Gemma3Processor(
        image_processor=_image_processor("google/gemma-3-4b-it"),
        tokenizer=tokenizer,
        image_seq_length=256,
    )


def _gemma4_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    text = {
        **_SMALL,
        **_GEMMA,
        # One size of heads, for which any of vLLM's backends will do.
        "global_head_dim": _GEMMA["head_dim"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": _VOCABULARY,
    }
    return transformers.Gemma4Config(
        text_config=text,
        vision_config=_vision("google/gemma-4-31B-it", depth),
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
        image_processor=_image_processor("google/gemma-4-31B-it"),
        tokenizer=tokenizer,
        video_processor=transformers.Gemma4VideoProcessor(),
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
}

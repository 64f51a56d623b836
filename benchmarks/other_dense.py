# SPDX-License-Identifier: Apache-2.0
"""Models whose towers get dense batches, and Gemma 4, as folders to write."""

from collections.abc import Mapping
from typing import Any

import transformers

from other_checkpoints import SMALL, OtherModel, image_processor, vision
from vllm_flashinfer_vit.towers.whole_models import WHOLE_MODELS

_GEMMA = {"head_dim": 256, "num_attention_heads": 4, "sliding_window": 1024}


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


def _llava_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    # openai/clip-vit-large-patch14-336, whose last block vLLM leaves out.
    tower = {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "projection_dim": 768,
    }
    return transformers.LlavaConfig(
        text_config={**SMALL, "model_type": "llama"},
        vision_config={**tower, "num_hidden_layers": depth + 1 if depth else 24},
        image_token_index=ids["<image>"],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )


def _llava_processor(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> transformers.ProcessorMixin:
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _llama4_config(
    ids: Mapping[str, int], depth: int | None
) -> transformers.PretrainedConfig:
    text = {
        **SMALL,
        "intermediate_size_mlp": SMALL["intermediate_size"],
        # Without experts.
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "attention_chunk_size": None,
    }
    # Of Llama 4 Scout and of Maverick.
    tower = {
        "hidden_size": 1408,
        "intermediate_size": 5632,
        "num_hidden_layers": depth or 34,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "vision_output_dim": 4096,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return transformers.Llama4Config(
        text_config=text,
        vision_config=tower,
        boi_token_index=ids["<|image_start|>"],
        eoi_token_index=ids["<|image_end|>"],
        image_token_index=ids["<|patch|>"],
    )


def _llama4_processor(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> transformers.ProcessorMixin:
    return transformers.Llama4Processor(
        image_processor=transformers.Llama4ImageProcessor(
            size={"height": 336, "width": 336}
        ),
        tokenizer=tokenizer,
    )


DENSE_MODELS: Mapping[str, OtherModel] = {
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
    "llava-hf/llava-1.5-7b-hf": OtherModel(
        architecture="LlavaForConditionalGeneration",
        image="<image>",
        video="",
        named={"image_token": "<image>"},
        special_tokens=(),
        config=_llava_config,
        processor=_llava_processor,
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": OtherModel(
        architecture="Llama4ForConditionalGeneration",
        image="<|image|>",
        video="",
        named={},
        special_tokens=(
            "<|image|>",
            "<|patch|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        config=_llama4_config,
        processor=_llama4_processor,
    ),
}

# SPDX-License-Identifier: Apache-2.0
"""The models that vLLM builds whole, by name: dimensions, processors, inputs.

Dimensions are those of each model's published config.json. An image processor has the
defaults of its class where nothing else is said.
"""

from collections.abc import Mapping
from typing import Any

from vllm_flashinfer_vit.towers.whole import Cut, Fields, WholeModel

_TRANSFORMERS = "transformers"
# Sections of rotary embeddings, of heads of 16.
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}

Features = Mapping[str, Any]


def _grid(features: Features) -> tuple[int, int, int]:
    frames, rows, columns = features["image_grid_thw"][0].tolist()
    return frames, rows, columns


def _patches(features: Features, vision: Fields) -> Cut:
    names = ("pixel_values", "image_grid_thw")
    return Cut({name: features[name] for name in names}, _grid(features))


def _kimi(features: Features, vision: Fields) -> Cut:
    pixels, grids = features["pixel_values"], features["image_grid_thw"]
    return Cut({"pixel_values": pixels, "grid_thws": grids}, _grid(features))


def _unpadded(features: Features, vision: Fields) -> Cut:
    (height, width), side = features["image_sizes"][0].tolist(), vision["patch_size"]
    pixels = features["pixel_values"][0][..., :height, :width]
    return Cut({"pixel_values": [pixels]}, (1, height // side, width // side))


def _square(features: Features, vision: Fields) -> Cut:
    pixels = features["pixel_values"]
    side = vision["image_size"] // vision["patch_size"]
    return Cut(
        {"pixel_values": pixels, "num_patches": features["num_crops"] + 1},
        (len(pixels), side, side),
    )


def _tiles(features: Features, vision: Fields) -> Cut:
    pixels = features["pixel_values_flat"]
    side = vision["image_size"] // vision["patch_size"]
    inputs = {
        "pixel_values_flat": pixels,
        "image_num_patches": features["image_num_patches"],
        # Of prompts; vLLM asks for it, and the tower does not.
        "image_token_id": 0,
    }
    return Cut(inputs, (len(pixels), side, side))


def _positions(features: Features, vision: Fields) -> Cut:
    places = features["image_position_ids"]
    columns, rows = (int(places[..., axis].max()) + 1 for axis in (0, 1))
    inputs = {
        "pixel_values": features["pixel_values"],
        "pixel_position_ids": places,
    }
    return Cut(inputs, (1, rows, columns))


def _flat(vision: Fields, text: Fields) -> dict[str, Any]:
    return {"vision_config": vision, **text}


def _objects(vision: Fields, text: Fields) -> dict[str, Any]:
    """Lay out a config whose own class is remote code."""
    from transformers import LlamaConfig, PreTrainedConfig

    return {
        "vision_config": PreTrainedConfig(**vision),
        # With Qwen2's, vLLM asks for a tokenizer, to know whether there are videos.
        "text_config": LlamaConfig(**text, architectures=["LlamaForCausalLM"]),
    }


def _flat_objects(vision: Fields, text: Fields) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    return {"vision_config": PreTrainedConfig(**vision), **text}


def _thinker(vision: Fields, text: Fields) -> dict[str, Any]:
    audio = {"encoder_layers": 1}
    thinker = {"vision_config": vision, "text_config": text, "audio_config": audio}
    return {"thinker_config": thinker}


_SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}

WHOLE_MODELS: Mapping[str, WholeModel] = {
    "PaddlePaddle/PaddleOCR-VL": WholeModel(
        module="paddleocr_vl",
        model="PaddleOCRVLForConditionalGeneration",
        tower="paddleocr_vl",
        config=f"{_TRANSFORMERS}:PaddleOCRVLConfig",
        vision={**_SO400M, "image_size": 384, "spatial_merge_size": 2},
        depth="num_hidden_layers",
        head_dim=72,
        text={"hidden_size": 1024, "rope_parameters": _MROPE},
        processor=f"{_TRANSFORMERS}:PaddleOCRVLImageProcessor",
        processor_fields={"size": {"shortest_edge": 147384, "longest_edge": 2822400}},
        cut=_patches,
        pixel_schema="PaddleOCRImagePixelInputs",
    ),
    "zai-org/GLM-OCR": WholeModel(
        module="glm_ocr",
        model="GlmOcrForConditionalGeneration",
        tower="glm_ocr",
        config=f"{_TRANSFORMERS}:GlmOcrConfig",
        vision={
            "depth": 24,
            "hidden_size": 1024,
            "hidden_act": "silu",
            "image_size": 336,
            "intermediate_size": 4096,
            "num_heads": 16,
            "in_channels": 3,
            "out_hidden_size": 1536,
            "patch_size": 14,
            "rms_norm_eps": 1e-5,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        depth="depth",
        head_dim=64,
        # The merger is as wide as the language model's MLP.
        text={
            "hidden_size": 1536,
            "intermediate_size": 4608,
            "rope_parameters": _MROPE | {"partial_rotary_factor": 1.0},
        },
        processor=f"{_TRANSFORMERS}:Glm4vImageProcessor",
        processor_fields={"size": {"shortest_edge": 12544, "longest_edge": 9633792}},
        cut=_patches,
    ),
    "rednote-hilab/dots.ocr": WholeModel(
        module="dots_ocr",
        model="DotsOCRForCausalLM",
        tower="dots_ocr",
        config="vllm.transformers_utils.configs.dotsocr:DotsOCRConfig",
        vision={
            "embed_dim": 1536,
            "hidden_size": 1536,
            "intermediate_size": 4224,
            "num_hidden_layers": 42,
            "num_attention_heads": 12,
            "num_channels": 3,
            "patch_size": 14,
            "rms_norm_eps": 1e-5,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "use_bias": False,
        },
        depth="num_hidden_layers",
        head_dim=128,
        text={"hidden_size": 1536},
        layout=_flat,
        processor=f"{_TRANSFORMERS}:Qwen2VLImageProcessor",
        processor_fields={
            "patch_size": 14,
            "temporal_patch_size": 1,
            "merge_size": 2,
            "size": {"shortest_edge": 3136, "longest_edge": 11289600},
        },
        cut=_patches,
    ),
    "mistral-community/pixtral-12b": WholeModel(
        module="llava",
        model="LlavaForConditionalGeneration",
        tower="pixtral",
        config=f"{_TRANSFORMERS}:LlavaConfig",
        vision={
            "model_type": "pixtral",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "hidden_act": "silu",
            "image_size": 1024,
            "patch_size": 16,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        },
        depth="num_hidden_layers",
        head_dim=64,
        text={"model_type": "mistral", "hidden_size": 5120, "sliding_window": None},
        fields={
            "image_token_index": 10,
            "image_seq_length": 1,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        processor=f"{_TRANSFORMERS}:PixtralImageProcessor",
        processor_fields={
            "size": {"longest_edge": 1024},
            "patch_size": {"height": 16, "width": 16},
        },
        cut=_unpadded,
    ),
    "google/gemma-3-4b-it": WholeModel(
        module="gemma3_mm",
        model="Gemma3ForConditionalGeneration",
        tower="siglip",
        config=f"{_TRANSFORMERS}:Gemma3Config",
        vision={
            **_SO400M,
            "model_type": "siglip_vision_model",
            "image_size": 896,
            "vision_use_head": False,
        },
        depth="num_hidden_layers",
        head_dim=72,
        text={"hidden_size": 2560},
        fields={"mm_tokens_per_image": 256},
        processor=f"{_TRANSFORMERS}:Gemma3ImageProcessor",
        processor_fields={"size": {"height": 896, "width": 896}},
        cut=_square,
    ),
    "baidu/ERNIE-4.5-VL-28B-A3B-PT": WholeModel(
        module="ernie45_vl",
        model="Ernie4_5_VLMoeForConditionalGeneration",
        tower="ernie45_vl",
        config=f"{_TRANSFORMERS}:PreTrainedConfig",
        vision={
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 1280,
            "hidden_act": "quick_gelu",
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
        },
        depth="depth",
        head_dim=80,
        text={
            "hidden_size": 2560,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "freq_allocation": 2,
            "moe_num_experts": [2, 2],
            "moe_intermediate_size": [64, 64],
            "moe_layer_start_index": [1, 1],
            "moe_layer_end_index": [1, 1],
            "moe_num_shared_experts": 1,
            "moe_k": 1,
        },
        fields={
            "model_type": "ernie4_5_moe_vl",
            "im_patch_id": 10,
            "pixel_hidden_size": 1280,
            "spatial_conv_size": 2,
            "temporal_conv_size": 2,
            "use_temporal_conv": True,
        },
        layout=_flat_objects,
        processor=f"{_TRANSFORMERS}:Ernie4_5_VLMoeImageProcessor",
        cut=_patches,
        follows_counts=True,
    ),
    "OpenGVLab/InternVL3-8B": WholeModel(
        module="internvl",
        model="InternVLChatModel",
        tower="intern_vit",
        config=f"{_TRANSFORMERS}:PreTrainedConfig",
        vision={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_channels": 3,
            "image_size": 448,
            "patch_size": 14,
            "qkv_bias": True,
            "qk_normalization": False,
            "layer_norm_eps": 1e-6,
            "norm_type": "layer_norm",
            "hidden_act": "gelu",
            "initializer_factor": 0.1,
        },
        depth="num_hidden_layers",
        head_dim=64,
        text={"hidden_size": 3584},
        fields={
            "model_type": "internvl_chat",
            "select_layer": -1,
            "force_image_size": 448,
            "downsample_ratio": 0.5,
            "ps_version": "v2",
        },
        layout=_objects,
        processor="vllm.transformers_utils.processors.internvl:InternVLChatImageProcessor",
        processor_fields={
            "image_size": 448,
            "min_dynamic_patch": 1,
            "max_dynamic_patch": 12,
            "dynamic_image_size": True,
            "use_thumbnail": True,
        },
        cut=_tiles,
        # Of the class token.
        extra_tokens=1,
    ),
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": WholeModel(
        module="qwen3_omni_moe_thinker",
        model="Qwen3OmniMoeThinkerForConditionalGeneration",
        architecture="Qwen3OmniMoeForConditionalGeneration",
        tower="qwen3_omni_moe_thinker (vision)",
        config=f"{_TRANSFORMERS}:Qwen3OmniMoeConfig",
        vision={
            "depth": 27,
            "hidden_size": 1152,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 4304,
            "num_heads": 16,
            "in_channels": 3,
            "out_hidden_size": 2048,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            # vLLM reads these two, and Transformers has no defaults.
            "image_size": 768,
            "apply_vit_abs_pos_embed": True,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        depth="depth",
        head_dim=72,
        text={
            "hidden_size": 2048,
            "rope_parameters": _MROPE,
            # Without experts, which need a group of processes.
            "mlp_only_layers": [0],
        },
        layout=_thinker,
        processor=f"{_TRANSFORMERS}:Qwen2VLImageProcessor",
        processor_fields={
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "size": {"shortest_edge": 3136, "longest_edge": 12845056},
        },
        cut=_patches,
    ),
    "moonshotai/Kimi-K2.5": WholeModel(
        module="kimi_k25",
        model="KimiK25ForConditionalGeneration",
        tower="kimi_k25_vit",
        config=f"{_TRANSFORMERS}:Kimi_K25Config",
        vision={
            **_SO400M,
            "hidden_act": "gelu_pytorch_tanh",
            "pos_emb_height": 64,
            "pos_emb_width": 64,
            "pos_emb_time": 4,
            "merge_kernel_size": [2, 2],
        },
        depth="num_hidden_layers",
        head_dim=72,
        text={"model_type": "deepseek_v3", "hidden_size": 7168},
        processor=f"{_TRANSFORMERS}:Kimi_K25ImageProcessor",
        cut=_kimi,
    ),
    "google/gemma-4-31B-it": WholeModel(
        module="gemma4_mm",
        model="Gemma4ForConditionalGeneration",
        tower="gemma4_mm",
        config=f"{_TRANSFORMERS}:Gemma4Config",
        vision={
            "model_type": "gemma4_vision",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 72,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 10240,
            "standardize": True,
            # vLLM reads it, and Transformers has no default.
            "default_output_length": 280,
        },
        depth="num_hidden_layers",
        head_dim=72,
        text={
            "hidden_size": 5376,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 64,
        },
        fields={"audio_config": None},
        processor=f"{_TRANSFORMERS}:Gemma4ImageProcessor",
        cut=_positions,
    ),
}

# Names that are asked for, and why they are none.
NOT_BUILT: Mapping[str, str] = {
    "openbmb/MiniCPM-V-2_6": "its image processor is code of its repository, and no "
    "package has it, so only an engine runs it. Its tower, Idefics2's, has the sizes "
    "of PaddlePaddle/PaddleOCR-VL's and attends as google/gemma-3-4b-it's; "
    "benchmarks/block_stacks.py builds its blocks as Idefics2",
}

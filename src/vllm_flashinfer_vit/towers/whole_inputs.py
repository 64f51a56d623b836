# SPDX-License-Identifier: Apache-2.0
"""How the models that vLLM builds whole take an image, and how their configs lie.

A cut takes what an image processor returns, and the config's fields of the tower.
"""

from collections.abc import Mapping
from typing import Any

from vllm_flashinfer_vit.towers.whole import Cut, Fields

Features = Mapping[str, Any]


def _grid(features: Features) -> tuple[int, int, int]:
    frames, rows, columns = features["image_grid_thw"][0].tolist()
    return frames, rows, columns


def patches(features: Features, vision: Fields) -> Cut:
    """Take patches as Qwen2-VL has them."""
    names = ("pixel_values", "image_grid_thw")
    return Cut({name: features[name] for name in names}, _grid(features))


def kimi(features: Features, vision: Fields) -> Cut:
    """Take patches, whose grid has a name of Kimi's."""
    pixels, grids = features["pixel_values"], features["image_grid_thw"]
    return Cut({"pixel_values": pixels, "grid_thws": grids}, _grid(features))


def unpadded(features: Features, vision: Fields) -> Cut:
    """Take an image without the padding to the size of its batch."""
    (height, width), side = features["image_sizes"][0].tolist(), vision["patch_size"]
    pixels = features["pixel_values"][0][..., :height, :width]
    return Cut({"pixel_values": [pixels]}, (1, height // side, width // side))


def square(features: Features, vision: Fields) -> Cut:
    """Take an image and its crops, all of one size."""
    pixels = features["pixel_values"]
    side = vision["image_size"] // vision["patch_size"]
    return Cut(
        {"pixel_values": pixels, "num_patches": features["num_crops"] + 1},
        (len(pixels), side, side),
    )


def sized(features: Features, vision: Fields) -> Cut:
    """Take images, all of one size."""
    pixels = features["pixel_values"]
    side = vision["image_size"] // vision["patch_size"]
    return Cut({"pixel_values": pixels}, (len(pixels), side, side))


def crops(features: Features, vision: Fields) -> Cut:
    """Take an image's crops, and its size."""
    pixels = features["pixel_values"]
    side = vision["image_size"] // vision["patch_size"]
    inputs = {"pixel_values": pixels, "image_sizes": features["image_sizes"]}
    return Cut(inputs, (pixels.shape[1], side, side))


def tiles(features: Features, vision: Fields) -> Cut:
    """Take tiles, all of one size, and their number."""
    pixels = features["pixel_values_flat"]
    side = vision["image_size"] // vision["patch_size"]
    inputs = {
        "pixel_values_flat": pixels,
        "image_num_patches": features["image_num_patches"],
        # Of prompts; vLLM asks for it, and the tower does not.
        "image_token_id": 0,
    }
    return Cut(inputs, (len(pixels), side, side))


def positions(features: Features, vision: Fields) -> Cut:
    """Take patches, and where each lies."""
    places = features["image_position_ids"]
    columns, rows = (int(places[..., axis].max()) + 1 for axis in (0, 1))
    inputs = {
        "pixel_values": features["pixel_values"],
        "pixel_position_ids": places,
    }
    return Cut(inputs, (1, rows, columns))


def flat(vision: Fields, text: Fields) -> dict[str, Any]:
    """Lay out a config that has its language model's fields itself."""
    return {"vision_config": vision, **text}


def objects(vision: Fields, text: Fields) -> dict[str, Any]:
    """Lay out a config whose own class is remote code."""
    from transformers import LlamaConfig, PreTrainedConfig

    return {
        "vision_config": PreTrainedConfig(**vision),
        # With Qwen2's, vLLM asks for a tokenizer, to know whether there are videos.
        "text_config": LlamaConfig(**text, architectures=["LlamaForCausalLM"]),
    }


def flat_objects(vision: Fields, text: Fields) -> dict[str, Any]:
    """Lay out the same, where no class of its own reads it."""
    from transformers import PreTrainedConfig

    return {"vision_config": PreTrainedConfig(**vision), **text}


def kimi_k3(vision: Fields, text: Fields) -> dict[str, Any]:
    """Lay out a config of Kimi-K2.5 with the tower of Kimi-K3."""
    from vllm.transformers_utils.configs.kimi_k3 import KimiK3VisionConfig

    return {"vision_config": KimiK3VisionConfig(**vision), "text_config": text}


def thinker(vision: Fields, text: Fields) -> dict[str, Any]:
    """Lay out a config of a model that listens and speaks, too."""
    audio = {"encoder_layers": 1}
    thinker = {"vision_config": vision, "text_config": text, "audio_config": audio}
    return {"thinker_config": thinker}

# SPDX-License-Identifier: Apache-2.0
"""Small models of vLLM's that are captured, and batches of them."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import pytest
import torch
from _models import patches
from packaging.version import Version
from test_whole_models import skip_if_missing

from vllm_flashinfer_vit.towers.model_tower import ModelTower, build_model
from vllm_flashinfer_vit.towers.spec import TowerError
from vllm_flashinfer_vit.towers.whole import ModelSpec, WholeModel
from vllm_flashinfer_vit.towers.whole_models import WHOLE_MODELS

Inputs = dict[str, Any]

# Rows and columns of patches: one image, ragged ones, one that fills a budget.
GRIDS = (
    [[1, 8, 8]],
    [[1, 12, 10], [1, 4, 4], [1, 2, 6]],
    [[1, 16, 16]],
    [[1, 2, 34], [1, 34, 2], [1, 2, 2]],
)
# Rows of each item of a batch: tiles, crops or images.
ROWS = ([1], [3, 1, 2], [7], [2, 2, 1])


def noise(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


@dataclass(frozen=True)
class Case:
    """A model that is captured, small.

    Attributes:
        model: What is built.
        vision: Fields of its tower that differ.
        text: Fields of its language model that differ.
        fields: Other fields that differ.
        batches: What `inputs` makes batches of.
        inputs: Makes the model's arguments of a batch.
        tokens: Tokens of a batch.
        row: Tokens that budgets are multiples of.
        since: The first vLLM whose graphs are of exact size.
    """

    model: WholeModel
    vision: Mapping[str, Any]
    batches: tuple[Any, ...]
    inputs: Callable[[Any], Inputs]
    tokens: Callable[[Any], int]
    text: Mapping[str, Any] = field(default_factory=lambda: {"hidden_size": 64})
    fields: Mapping[str, Any] = field(default_factory=dict)
    row: int = 1
    since: str = "0.25.1"

    def build(self, name: str) -> ModelTower:
        if Version(version("vllm")) < Version(self.since):
            pytest.skip(f"vLLM {version('vllm')} does not capture {name}, or otherwise")
        whole = replace(
            self.model,
            text={**self.model.text, **self.text},
            fields={**self.model.fields, **self.fields},
        )
        vision = {**whole.vision, **self.vision, whole.depth: 2}
        spec = ModelSpec(vision, name, 2, whole=whole)
        try:
            return build_model(
                spec, backend="FLASHINFER", dtype=torch.float32, device="cpu"
            )
        except TowerError as error:
            skip_if_missing(name, error)
            raise
        except (ImportError, NotImplementedError) as error:
            pytest.skip(f"this vLLM's language model cannot be built: {error}")


def merged(grids: list[list[int]]) -> int:
    return patches(grids) // 4


def flat_patches(width: int, grids: list[list[int]]) -> Inputs:
    return {
        "pixel_values": noise(patches(grids), width),
        "image_grid_thw": torch.tensor(grids),
    }


def square_patches(grids: list[list[int]]) -> Inputs:
    return {
        "pixel_values": noise(patches(grids), 3, 14, 14),
        "grid_thws": torch.tensor(grids),
    }


def pairs(grids: list[list[int]]) -> Inputs:
    return {
        "pixel_values": noise(patches(grids), 3, 14, 14),
        "image_grid_hws": torch.tensor(grids)[:, 1:],
    }


def tiles(rows: list[int]) -> Inputs:
    return {
        "pixel_values_flat": noise(sum(rows), 3, 56, 56),
        "image_num_patches": torch.tensor(rows),
        "image_token_id": 0,
    }


def crops(rows: list[int]) -> Inputs:
    return {
        "pixel_values": noise(sum(rows), 3, 56, 56),
        "num_patches": torch.tensor(rows),
    }


def widths(tokens: list[int]) -> Inputs:
    """Images of as many tokens, 4 patches each, the last three tokens' padding."""
    pixels, places = [], []
    for count in tokens:
        at = torch.arange(count * 4)
        place = torch.stack([at % 14, at // 14], -1)
        place[-12:] = -1
        pixels.append(noise(count * 4, 4 * 4 * 3).sigmoid())
        places.append(place)
    same = len(set(tokens)) == 1
    return {
        "pixel_values": torch.stack(pixels) if same else pixels,
        "pixel_position_ids": torch.stack(places) if same else places,
    }


KIMI_VL = WholeModel(
    module="kimi_vl",
    model="KimiVLForConditionalGeneration",
    tower="moonvit",
    config="vllm.transformers_utils.configs.kimi_vl:KimiVLConfig",
    vision={"model_type": "moonvit"},
    depth="num_hidden_layers",
    head_dim=72,
    processor="",
    cut=lambda *_: None,  # type: ignore[arg-type, return-value]
)
_MOONVIT = {
    "hidden_size": 144,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "merge_kernel_size": [2, 2],
}
# Towers whose rows are images of one size.
_DENSE = {"num_attention_heads": 2, "intermediate_size": 96, "image_size": 56}

CASES = {
    "zai-org/GLM-OCR": Case(
        WHOLE_MODELS["zai-org/GLM-OCR"],
        {
            "hidden_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "intermediate_size": 96,
            "image_size": 56,
        },
        (*GRIDS, [[3, 4, 6]]),
        functools.partial(flat_patches, 3 * 2 * 14 * 14),
        merged,
        {"hidden_size": 64, "intermediate_size": 96},
        since="0.29.0",
    ),
    "baidu/ERNIE-4.5-VL-28B-A3B-PT": Case(
        WHOLE_MODELS["baidu/ERNIE-4.5-VL-28B-A3B-PT"],
        {"hidden_size": 160, "embed_dim": 160, "num_heads": 2, "mlp_ratio": 1},
        GRIDS,
        functools.partial(flat_patches, 3 * 14 * 14),
        merged,
        fields={"pixel_hidden_size": 160},
        since="0.28.0",
    ),
    "moonshotai/Kimi-VL-A3B-Instruct": Case(
        KIMI_VL,
        {**_MOONVIT, "init_pos_emb_height": 8, "init_pos_emb_width": 8},
        GRIDS,
        pairs,
        merged,
        {"hidden_size": 64, "first_k_dense_replace": 1},
    ),
    "moonshotai/Kimi-K2.5": Case(
        WHOLE_MODELS["moonshotai/Kimi-K2.5"],
        {**_MOONVIT, "pos_emb_height": 8, "pos_emb_width": 8},
        GRIDS,
        square_patches,
        merged,
        since="0.28.0",
    ),
    "OpenGVLab/InternVL3-8B": Case(
        WHOLE_MODELS["OpenGVLab/InternVL3-8B"],
        {"hidden_size": 128, **_DENSE},
        ROWS,
        tiles,
        lambda rows: 4 * sum(rows),
        fields={"force_image_size": 56},
        row=4,
    ),
    "google/gemma-3-4b-it": Case(
        WHOLE_MODELS["google/gemma-3-4b-it"],
        {"hidden_size": 144, **_DENSE},
        ROWS,
        crops,
        lambda rows: 4 * sum(rows),
        fields={"mm_tokens_per_image": 4},
        row=4,
    ),
    "google/gemma-4-31B-it": Case(
        WHOLE_MODELS["google/gemma-4-31B-it"],
        {
            "hidden_size": 144,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "patch_size": 4,
            # Not its 9 patches a token, of which attention takes five times as long.
            "pooling_kernel_size": 2,
            "position_embedding_size": 256,
            "default_output_length": 140,
        },
        ([70], [140], [140, 140, 140], [70, 70], [140, 70]),
        widths,
        sum,
        row=70,
        since="0.33.0",
    ),
}
PACKED = [name for name, case in CASES.items() if case.row == 1]
DENSE = [name for name in CASES if name not in PACKED]


def built(name: str) -> ModelTower:
    """Build a model, and with it this package's patches of it."""
    return CASES[name].build(name)

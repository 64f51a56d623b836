# SPDX-License-Identifier: Apache-2.0
"""Towers of vLLM's own classes, narrow or as wide as they are, and where they run."""

from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version

from vllm_flashinfer_vit.commands.images import image_processor
from vllm_flashinfer_vit.towers.spec import TowerSpec, resolve_spec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"

cpu_only = pytest.mark.skipif(
    HAS_GPU, reason="vLLM has one platform per process, and here it is the GPU"
)

MODELS = {
    "qwen2_vl": "Qwen/Qwen2-VL-7B-Instruct",
    "qwen2_5_vl": "Qwen/Qwen2.5-VL-7B-Instruct",
    "qwen3_vl": "Qwen/Qwen3-VL-8B-Instruct",
    "glm4v": "zai-org/GLM-4.1V-9B-Thinking",
}

# One windowed, one tapped and one full-attention block where the family has them. What
# is left out is Transformers' default. Other towers of tests are these with changes.
SMALL: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 48,
        "num_heads": 4,
        "patch_size": 14,
    },
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 48,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 48,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
    "glm4v": {
        "depth": 2,
        "hidden_size": 64,
        "image_size": 56,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 48,
        "patch_size": 14,
    },
}
FAMILIES = tuple(SMALL)


def small_spec(family: str) -> TowerSpec:
    config = SMALL[family]
    return TowerSpec(config, f"small {family}", config["depth"], family=family)


def small_tower(
    family: str,
    backend: str = "FLASHINFER",
    dtype: torch.dtype = torch.float32,
    image_processor: Any | None = None,
) -> Tower:
    return build_tower(
        small_spec(family),
        backend=backend,
        dtype=dtype,
        device=DEVICE,
        image_processor=image_processor,
    )


def tower_of_bytes(family: str, backend: str = "FLASHINFER") -> Tower:
    """Build a tower that normalises pixels itself, as engines of vLLM 0.33.0 do."""
    if Version(version("vllm")) < Version("0.32"):
        pytest.skip("vLLM before 0.32 does not have every tower normalise")
    processor = image_processor(small_spec(family), None)
    tower = small_tower(family, backend, image_processor=processor)
    assert tower.pixel_dtype is torch.uint8
    return tower


def pixels(spec: TowerSpec, grids: list[list[int]], seed: int = 0) -> torch.Tensor:
    rows = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, spec.patch_dim, generator=generator)


def true_tower(
    family: str,
    backend: str = "FLASHINFER",
    dtype: torch.dtype = torch.bfloat16,
    **settings: object,
) -> Tower:
    """Build the first two blocks of a known model's tower on a GPU."""
    spec = resolve_spec(MODELS[family], random_weights=True, depth=2)
    return build_tower(
        spec,
        backend=backend,
        dtype=dtype,
        device="cuda",
        **settings,  # type: ignore[arg-type]
    )

# SPDX-License-Identifier: Apache-2.0
"""Batches for vLLM's manager of encoder graphs, and what it holds."""

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from _towers import DEVICE, pixels

from vllm_flashinfer_vit import plugin
from vllm_flashinfer_vit.patches.patch import revert_group
from vllm_flashinfer_vit.settings import (
    ENV_DISABLE_PATCHES,
    ENV_FIX_GRAPH_PADDING,
    ENV_STRICT,
)
from vllm_flashinfer_vit.towers.built import Built
from vllm_flashinfer_vit.towers.tower import Tower

# Modality and grids in patches: one image, ragged ones, a video of several frames, one
# that fills its budget, thin strips with the most windows.
BATCHES: tuple[tuple[str, list[list[int]]], ...] = (
    ("image", [[1, 8, 8]]),
    ("image", [[1, 12, 20], [1, 4, 4], [1, 2, 6]]),
    ("video", [[4, 8, 8], [2, 4, 4]]),
    ("image", [[1, 16, 16]]),
    ("image", [[1, 2, 34], [1, 34, 2], [1, 2, 2]]),
    ("image", [[1, 4, 4]]),
)
LIMITS = {"budgets": (16, 64, 128), "max_items": 8, "frames_per_video": 4}


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin and end without patches of models; a module imports it for that alone."""
    for name in (ENV_DISABLE_PATCHES, ENV_FIX_GRAPH_PADDING, ENV_STRICT):
        monkeypatch.delenv(name, raising=False)
    model_patches = [p for p in plugin.all_patches() if "select" not in p.name]
    revert_group(model_patches)
    yield
    revert_group(model_patches)


def request(modality: str, values: torch.Tensor, grids: Sequence[Any]) -> dict:
    name = "pixel_values" if modality == "image" else "pixel_values_videos"
    return {name: values, f"{modality}_grid_thw": torch.tensor(grids).view(-1, 3)}


def run(manager: Any, tower: Tower, modality: str, grids: Any) -> torch.Tensor:
    with tower.running():
        values = pixels(tower.spec, grids).to(DEVICE)
        return torch.cat(manager.execute(request(modality, values, grids)))


def metas(manager: Any, path: str | None = None) -> list[Any]:
    """Return the graphs of one set, or of all."""
    sets = manager.budget_graphs
    chosen = sets.values() if path is None else [sets[path]]
    return [meta for graphs in chosen for meta in graphs.values()]


def as_two_ranks(manager: Any, tower: Built, inputs: dict[str, Any]) -> torch.Tensor:
    """Return what the first of two data-parallel ranks does, the other one's first."""
    from vllm.v1.worker import encoder_cudagraph as module

    assert manager.use_dp
    padded: dict[int, torch.Tensor] = {}
    for rank in (1, 0):

        def gather(x: torch.Tensor, dim: int, rank: int = rank) -> torch.Tensor:
            padded[rank] = x.clone()
            return torch.cat([padded.get(r, torch.zeros_like(x)) for r in (0, 1)])

        with (
            tower.running(),
            mock.patch.multiple(
                module,
                get_tensor_model_parallel_world_size=lambda: 2,
                get_tensor_model_parallel_rank=lambda rank=rank: rank,
                tensor_model_parallel_all_gather=gather,
            ),
        ):
            output = torch.cat(manager.execute(dict(inputs)))
    return output

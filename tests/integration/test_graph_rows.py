# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's images and frames that do not fill their rows, with encoder CUDA graphs.

A prompt has places for what they hold, without padding. A graph returns whole rows, of
which vLLM takes the first ones of each item.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _graph_models import built, noise
from _graphs import as_two_ranks, patched  # noqa: F401
from _towers import cpu_only
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from simulated_graphs import build_manager, capture, simulated_graphs  # noqa: E402
from vllm_flashinfer_vit.graphs.exact import ExactManager  # noqa: E402

pytestmark = [cpu_only, pytest.mark.usefixtures("plain_kernel")]

NAME = "google/gemma-4-31B-it"
# Two patches by two become a token.
_POOLED = 2


def rows_of(width: int, sizes: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
    """Return pixels and places of images in rows of `width` tokens, as Transformers'.

    Args:
        width: Tokens of a row.
        sizes: Rows and columns of each image's tokens.
    """
    places = []
    for rows, columns in sizes:
        y, x = torch.meshgrid(
            torch.arange(rows * _POOLED), torch.arange(columns * _POOLED), indexing="ij"
        )
        places.append(torch.stack([x.flatten(), y.flatten()], -1))
    full = torch.empty(width * _POOLED**2, 2, dtype=torch.int64)
    padded = pad_sequence([*places, full], batch_first=True, padding_value=-1)[:-1]
    return noise(*padded.shape[:2], 4 * 4 * 3).sigmoid(), padded


def images(width: int, sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    pixels, places = rows_of(width, sizes)
    return {"pixel_values": pixels, "pixel_position_ids": places}


def videos(frames: Sequence[Sequence[tuple[int, int]]]) -> dict[str, Any]:
    """Return a batch of videos, given the sizes of each one's frames."""
    pixels, places = rows_of(70, [size for video in frames for size in video])
    return {
        "pixel_values_videos": pixels,
        "pixel_position_ids_videos": places,
        "video_frame_counts": torch.tensor([len(video) for video in frames]),
    }


def check(inputs: dict[str, Any], is_held: bool, **sizes: Any) -> None:
    """Compare with what vLLM's model returns without graphs."""
    tower = built(NAME)
    with simulated_graphs():
        manager = build_manager(tower, max_tokens=980, **sizes)
        assert type(manager) is ExactManager
        capture(manager, tower)
        with tower.running():
            found = manager.execute(dict(inputs))
    assert (manager.graph_hits > 0, manager.graph_misses > 0) == (is_held, not is_held)
    with tower.running(), torch.inference_mode():
        expected = tower.visual.embed_multimodal(**inputs)
    assert len(found) == len(expected)
    for item, real in zip(found, expected, strict=True):
        # Nothing reads what is beyond the places of the prompt.
        torch.testing.assert_close(item[: len(real)], real, rtol=1e-5, atol=1e-5)


def test_images() -> None:
    check(images(140, [(12, 11), (10, 14), (1, 5)]), True)


@pytest.mark.parametrize(
    "frames",
    [
        [[(6, 11)]],
        [[(6, 11)] * 3],
        [[(6, 11)] * 2, [(7, 10)] * 3],
        [[(11, 6)], [(5, 7)] * 4, [(8, 8)] * 2],
    ],
)
def test_frames(frames: list[list[tuple[int, int]]]) -> None:
    check(videos(frames), True, max_items=4)


def test_images_without_a_graph() -> None:
    check(images(280, [(16, 17), (13, 21), (14, 20)]), False)


def test_frames_without_a_graph() -> None:
    check(videos([[(6, 11)] * 2, [(8, 8)] * 2]), False, max_items=2, max_frames=3)


def test_ranks_without_a_graph() -> None:
    tower = built(NAME)
    inputs = images(280, [(16, 17), (13, 21), (14, 20), (14, 19)])
    with simulated_graphs():
        manager = build_manager(tower, max_tokens=980, data_parallel=True)
        capture(manager, tower)
        found = as_two_ranks(manager, tower, dict(inputs)).split(280)
    with tower.running(), torch.inference_mode():
        expected = tower.visual.embed_multimodal(**inputs)
    for item, real in zip(found, expected, strict=True):
        torch.testing.assert_close(item[: len(real)], real, rtol=1e-5, atol=1e-5)

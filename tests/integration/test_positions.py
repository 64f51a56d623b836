# SPDX-License-Identifier: Apache-2.0
"""Interpolated positions: equal to vLLM's, by one sum for a whole batch."""

from typing import Any
from unittest import mock

import pytest
import torch
from _towers import cpu_only, small_tower

from vllm_flashinfer_vit.models import positions as module
from vllm_flashinfer_vit.models.metadata import CACHE
from vllm_flashinfer_vit.plugin import all_patches
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = cpu_only

(PATCH,) = (p for p in all_patches() if p.name == "glm4_1v-summed-positions")
GRIDS = (
    [[1, 2, 2]],
    [[1, 4, 6], [1, 6, 4], [1, 4, 6]],
    [[3, 8, 2], [1, 26, 38]],
    [[1, 2, 200], [2, 200, 2]],
)


@pytest.fixture(scope="module")
def tower() -> Tower:
    return small_tower("glm4v", "FLASHINFER")


def interpolated(tower: Tower, grids: Any, *, patched: bool) -> torch.Tensor:
    visual: Any = tower.visual
    vars(visual).pop(CACHE, None)
    was_applied = PATCH.applied
    if was_applied:
        PATCH.revert()
    try:
        if patched:
            PATCH.check()
            PATCH.apply()
        with tower.running():
            return visual.pos_embeds_interpolate(grids)
    finally:
        if patched:
            PATCH.revert()
        if was_applied:
            PATCH.apply()


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_same_positions_as_stock(tower: Tower, grids: list[list[int]]) -> None:
    expected = interpolated(tower, grids, patched=False)
    found = interpolated(tower, grids, patched=True)
    assert expected.abs().mean() > 1e-3
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_weights_of_a_patch_add_up_to_one() -> None:
    _, weights = module._along(37, 24, torch.device("cpu"))
    torch.testing.assert_close(weights.sum(1), torch.ones(37))


def test_as_many_patches_as_positions_are_the_positions() -> None:
    taps, weights = module._along(24, 24, torch.device("cpu"))
    assert taps[weights == 1].tolist() == list(range(24))
    assert weights.count_nonzero() == 24


def test_one_sum_serves_a_batch(tower: Tower) -> None:
    with mock.patch.object(
        module, "embedding_bag", wraps=module.embedding_bag
    ) as summed:
        interpolated(tower, GRIDS[1], patched=True)
    summed.assert_called_once()


def test_known_frames_are_not_computed(tower: Tower) -> None:
    with mock.patch.object(module, "_frame", wraps=module._frame) as computed:
        interpolated(tower, GRIDS[1], patched=True)
    # The third frame is the first one again.
    assert [call.args[1:3] for call in computed.call_args_list] == [(4, 6), (6, 4)]


def test_new_weights_count(tower: Tower) -> None:
    weight = tower.visual.get_parameter("embeddings.position_embedding.weight")
    before = interpolated(tower, GRIDS[1], patched=True)
    weight.data.mul_(2)
    try:
        after = interpolated(tower, GRIDS[1], patched=True)
    finally:
        weight.data.div_(2)
    torch.testing.assert_close(after, 2 * before)


def test_only_for_flashinfer() -> None:
    other = small_tower("glm4v", "TORCH_SDPA")
    interpolated(other, GRIDS[1], patched=True)
    assert CACHE not in vars(other.visual)

# SPDX-License-Identifier: Apache-2.0
"""What a pass makes once for the blocks that are given the same: tables and offsets."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_flashinfer_vit.blocks.spec import ANGLES, Rotary  # noqa: E402
from vllm_flashinfer_vit.blocks.tower_pass import Pass, Widths  # noqa: E402

ROWS = 6


@pytest.fixture
def now() -> Pass:
    widths = Widths(hidden=16, qkv=24)
    return Pass([widths], torch.zeros(ROWS, 8), None, False)


def random(*shape: int) -> Any:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_blocks_that_are_given_other_angles_have_other_tables(now: Pass) -> None:
    one, other = random(ROWS, 4), random(ROWS, 4) + 1
    made = now.tables(ANGLES, (one,))
    assert now.tables(ANGLES, (one,)) is made
    for angles in (other, one):
        cos, sin = now.tables(ANGLES, (angles,))
        assert torch.equal(cos, angles.cos()) and torch.equal(sin, angles.sin())


def test_one_table_of_two_may_be_another(now: Pass) -> None:
    rotary = Rotary("doubled", ("cos", "sin"))
    cos, sin, other = random(ROWS, 8), random(ROWS, 8) + 1, random(ROWS, 8) + 2
    for given in ((cos, sin), (cos, other), (sin, other)):
        found = now.tables(rotary, given)
        for table, whole in zip(found, given, strict=True):
            assert torch.equal(table, whole[:, :4])


def test_the_next_batch_may_have_other_angles_in_the_same_place(now: Pass) -> None:
    angles = random(ROWS, 4)
    now.tables(ANGLES, (angles,))
    angles += 1
    now.rest()
    assert torch.equal(now.tables(ANGLES, (angles,))[0], angles.cos())


def test_what_a_block_makes_is_of_the_sizes_that_it_is_given(now: Pass) -> None:
    made: list[tuple[int, ...]] = []

    def make(given: tuple[Any, ...]) -> torch.Tensor:
        made.append(given)
        return torch.full((given[0], 2, 2), float(given[1]))

    # Of one sequence, of which a batch of as many rows has two or three.
    rotary = Rotary("real", ("rows", "columns"))
    for given in ((3, 1), (3, 1), (2, 5), (3, 1)):
        for table in now.own_tables(rotary, make, given):
            assert torch.equal(table, torch.full((ROWS, 2), float(given[1])))
        now.rest()
    assert made == [(3, 1), (2, 5), (3, 1)]


def test_another_mask_has_other_offsets(now: Pass) -> None:
    """Of two images of three patches; what is not 0 is padding."""
    masks = [torch.zeros(2, 1, 1, 3), torch.zeros(2, 1, 1, 3)]
    masks[1][0, ..., 2:] = -1.0
    found = [now.offsets(mask).tolist() for mask in masks]
    assert found[0] != found[1]
    assert now.offsets(masks[1]) is now.offsets(masks[1])
    masks[1][1, ..., 1:] = -1.0
    now.rest()
    assert now.offsets(masks[1]).tolist() not in found

# SPDX-License-Identifier: Apache-2.0
"""A batch's metadata: equal to vLLM's, made once for its sizes, never written."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from _towers import DEVICE, FAMILIES, cpu_only, pixels, small_tower
from torch.overrides import TorchFunctionMode

from vllm_flashinfer_vit.models import metadata as module
from vllm_flashinfer_vit.models import qwen3_vl
from vllm_flashinfer_vit.models.metadata import CACHE, SizeCache
from vllm_flashinfer_vit.patches.patch import Patch, revert_group
from vllm_flashinfer_vit.plugin import all_patches
from vllm_flashinfer_vit.towers.tower import Tower

PATCHES = tuple(replace(patch) for patch in all_patches() if "-kept-" in patch.name)

# One size twice, turned, videos, ragged windows, and a batch of each order.
MIXTURES = (
    [[1, 4, 6]],
    [[1, 4, 6], [1, 6, 4], [1, 4, 6]],
    [[1, 6, 4], [1, 4, 6], [1, 4, 6]],
    [[3, 4, 6], [1, 4, 6], [3, 4, 6]],
    [[2, 8, 8], [1, 26, 38], [5, 2, 2]],
    [[1, 2, 40], [1, 30, 2]],
)
GRIDS = MIXTURES[3]

pytestmark = cpu_only


@cache
def tower_of(family: str, backend: str = "FLASHINFER") -> Tower:
    return small_tower(family, backend)


def apply(patches: Sequence[Patch]) -> None:
    for patch in patches:
        if patch.loaded:
            patch.check()
            patch.apply()


@contextmanager
def reverted(patches: Sequence[Patch]) -> Iterator[None]:
    for patch in reversed(patches):
        patch.revert()
    try:
        yield
    finally:
        apply(patches)


# What makes a tower's position embeddings, if it is called otherwise.
POSITIONS = {"glm4v": "pos_embeds_interpolate"}


@pytest.fixture(autouse=True)
def only_these() -> Iterator[None]:
    """Apply the patches above alone, to towers that hold nothing yet."""
    for family in FAMILIES:
        vars(tower_of(family).visual).pop(CACHE, None)
    targets = {patch.target for patch in PATCHES}
    others = [p for p in all_patches() if p.target in targets and p.applied]
    with reverted(others):
        apply(PATCHES)
        yield
        revert_group(PATCHES)


def prepare(tower: Tower, grids: Any, **overrides: Any) -> dict[str, Any]:
    visual: Any = tower.visual
    with tower.running():
        return visual.prepare_encoder_metadata(grids, **overrides)


def stock(tower: Tower, grids: Any, **overrides: Any) -> dict[str, Any]:
    with reverted(PATCHES):
        return prepare(tower, grids, **overrides)


def held(tower: Tower) -> SizeCache:
    return vars(tower.visual)[CACHE]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None
        else:
            assert found[name].dtype == value.dtype
            assert found[name].device == value.device
            assert torch.equal(found[name], value), name


def shared(found: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in found if found[name] is other[name] is not None}


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_all_kernels_of_positions_are_compiled_by_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By vLLM's profiling; requests would wait for the others."""
    tower = tower_of("qwen3_vl")
    visual = tower.visual
    asked: list[Any] = []

    def interpolate(self: Any, grids: Any) -> torch.Tensor:
        asked.append(grids)
        return torch.zeros(sum(math.prod(grid) for grid in grids), 1)

    monkeypatch.setattr(
        qwen3_vl, "current_platform", SimpleNamespace(is_cuda=lambda: True)
    )
    call = qwen3_vl._interpolate_once(interpolate)
    for _ in range(2):
        call(visual, [[1, 4, 6]])
    compiled = [[[1, rows, columns]] for rows in (2, 16) for columns in (2, 16)]
    assert asked == [*compiled, [[1, 4, 6]], [[1, 4, 6]]]
    vars(visual).pop(qwen3_vl._COMPILED)
    monkeypatch.setattr(qwen3_vl, "is_served", lambda _: False)
    call(visual, [[1, 4, 6]])
    assert asked[6:] == [[[1, 4, 6]]]


@pytest.mark.parametrize("family", FAMILIES)
class TestKeptMetadata:
    def test_same_values_as_stock(self, family: str) -> None:
        tower = tower_of(family)
        expected = [stock(tower, grids) for grids in MIXTURES]
        for _ in range(2):
            for grids, values in zip(MIXTURES, expected, strict=True):
                assert_same(prepare(tower, grids), values)
                as_tuples = [tuple(grid) for grid in grids]
                assert_same(prepare(tower, as_tuples), values)

    def test_a_hit_calls_nothing(self, family: str) -> None:
        tower = tower_of(family)
        embeds = torch.zeros(())
        first = prepare(tower, GRIDS)
        with (
            mock.patch.object(
                type(tower.visual),
                POSITIONS.get(family, "fast_pos_embed_interpolate"),
                lambda *_: embeds,
                create=True,
            ),
            Calls() as calls,
        ):
            again = prepare(tower, [list(grid) for grid in GRIDS])
        assert not calls.names
        # The test's own check: a miss is seen.
        with Calls() as calls:
            prepare(tower, [[1, 10, 6]])
        assert calls.names
        tensors = {name for name, value in first.items() if value is not None}
        assert shared(first, again) == tensors - {"pos_embeds"}
        if "pos_embeds" in first:
            assert again["pos_embeds"] is embeds

    def test_a_caller_may_change_the_dict(self, family: str) -> None:
        tower = tower_of(family)
        expected = stock(tower, GRIDS)
        for _ in range(3):
            found = prepare(tower, GRIDS)
            assert_same(found, expected)
            found.clear()

    def test_padded_metadata_is_made_anew(self, family: str) -> None:
        tower = tower_of(family)
        kept = prepare(tower, GRIDS)
        overrides: list[dict[str, Any]] = [
            {"max_batch_size": 20},
            {"max_frames_per_batch": 20},
            {"max_batch_size": 2, "max_frames_per_batch": 0},
            {"max_seqlen_override": 0},
            {"max_seqlen_override": 64, "max_batch_size": 8},
            {"device": torch.device(DEVICE)},
        ]
        if family == "qwen2_5_vl":
            overrides += [
                {"max_window_seqs_per_batch": 99},
                {"max_seqlen_window_override": 64},
            ]
        before = held(tower).held_bytes
        for options in overrides:
            found = prepare(tower, GRIDS, **options)
            assert_same(found, stock(tower, GRIDS, **options))
            assert shared(found, kept) == set()
            # As a graph does that captured them.
            with torch.inference_mode():
                for tensor in found.values():
                    if tensor is not None:
                        tensor.zero_()
        assert held(tower).held_bytes == before
        assert_same(prepare(tower, GRIDS), stock(tower, GRIDS))

    @pytest.mark.parametrize(
        "given",
        [{"max_batch_size": 0}, {"max_frames_per_batch": 0}, {"device": None}],
        ids=str,
    )
    def test_replays_of_exact_graphs_share(
        self, family: str, given: dict[str, Any]
    ) -> None:
        tower = tower_of(family)
        found = prepare(tower, GRIDS, **given)
        assert_same(found, stock(tower, GRIDS, **given))
        assert shared(found, prepare(tower, GRIDS)) >= {"rotary_pos_emb_cos"}

    def test_the_tower_does_not_write(self, family: str) -> None:
        tower = tower_of(family)
        values = pixels(tower.spec, GRIDS)
        with reverted(PATCHES):
            expected = tower.encode(values, GRIDS)
        for _ in range(2):
            assert torch.equal(tower.encode(values, GRIDS), expected)
        assert_same(prepare(tower, GRIDS), stock(tower, GRIDS))

    def test_bytes_are_bounded(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MAX_BYTES", 100_000)
        tower = tower_of(family)
        first = prepare(tower, [[1, 2, 2]])
        for rows in range(2, 40, 2):
            grids = [[1, rows, 4], [1, 4, rows]]
            assert_same(prepare(tower, grids), stock(tower, grids))
            assert 0 < held(tower).held_bytes <= 100_000
        assert shared(prepare(tower, grids), prepare(tower, grids))
        assert shared(prepare(tower, [[1, 2, 2]]), first) == set()

    def test_only_for_flashinfer(self, family: str) -> None:
        other = tower_of(family, "TORCH_SDPA")
        assert_same(prepare(other, GRIDS), stock(other, GRIDS))
        assert CACHE not in vars(other.visual)


def test_positions_follow_their_weights() -> None:
    tower = tower_of("qwen3_vl")
    weight: Any = tower.visual.get_parameter("pos_embed.weight")
    before = prepare(tower, GRIDS)["pos_embeds"]
    kept = held(tower).find(tuple(map(tuple, GRIDS)))
    assert kept is not None
    assert "pos_embeds" not in kept
    weight.data.mul_(2)
    try:
        assert torch.equal(prepare(tower, GRIDS)["pos_embeds"], 2 * before)
    finally:
        weight.data.div_(2)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
class TestKeptRotary:
    def test_known_frames_are_not_computed(self, family: str) -> None:
        tower = tower_of(family)
        prepare(tower, [[1, 4, 6], [1, 8, 8]])
        visual: Any = tower.visual
        with (
            mock.patch.object(
                visual.rotary_pos_emb, "get_cos_sin", side_effect=OSError
            ),
            torch.inference_mode(),
        ):
            visual.rot_pos_emb([[1, 8, 8], [7, 4, 6], [1, 8, 8]])
            with pytest.raises(OSError):
                visual.rot_pos_emb([[1, 6, 4]])

    def test_nothing_comes_from_the_host(self, family: str) -> None:
        visual: Any = tower_of(family).visual
        with torch.inference_mode(), Calls() as calls:
            visual.rot_pos_emb([[1, 8, 8], [3, 2, 6]])
        assert calls.names
        assert not {"to", "arange", "tensor", "from_numpy"} & set(calls.names)

    def test_tables_of_frames_cannot_be_written(self, family: str) -> None:
        visual: Any = tower_of(family).visual
        with torch.inference_mode():
            expected = [table.clone() for table in visual.rot_pos_emb([[1, 4, 6]])]
            for table in visual.rot_pos_emb([[1, 4, 6]]):
                table.zero_()
            again = visual.rot_pos_emb([[1, 4, 6]])
        for table, value in zip(again, expected, strict=True):
            assert torch.equal(table, value)


def tensors(rows: int) -> dict[str, torch.Tensor | None]:
    return {"x": torch.zeros(rows, dtype=torch.uint8), "nothing": None}


class TestSizeCache:
    def test_found_once_kept(self) -> None:
        cache = SizeCache(2048)
        assert cache.find((2, 5)) is None
        kept = tensors(513)
        cache.keep((2, 5), kept)
        assert cache.find((2, 5)) is kept
        assert cache.find((5, 2)) is None
        # Whole blocks of 512 bytes.
        assert cache.held_bytes == 1024

    def test_the_least_recently_used_go_first(self) -> None:
        cache = SizeCache(1024)
        kept = tensors(10)
        cache.keep(1, kept)
        cache.keep(2, tensors(10))
        assert cache.find(1) is kept
        cache.keep(3, tensors(10))
        assert cache.held_bytes == 1024
        assert cache.find(1) is kept
        assert cache.find(2) is None

    def test_more_than_all_is_not_kept(self) -> None:
        cache = SizeCache(1024)
        kept = tensors(10)
        cache.keep(1, kept)
        cache.keep(2, tensors(1025))
        assert cache.find(2) is None
        assert cache.find(1) is kept
        assert cache.held_bytes == 512

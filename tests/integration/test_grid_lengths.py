# SPDX-License-Identifier: Apache-2.0
"""The longest length that blocks get of towers with grids, and what is chosen by it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from _blocks import without
from _encoders import PACKED
from _models import Call, Result, choices, encode, engine, noise
from _towers import cpu_only
from torch import nn

from cases import relative_error
from vllm_flashinfer_vit.models.longest import largest_frame
from vllm_flashinfer_vit.patches.fingerprints import left_out

# An image, several, a video of three frames, a video and a larger image, and the like
# with the largest one first.
BATCHES = {
    "image": [[1, 4, 6]],
    "images": [[1, 4, 6], [1, 10, 2], [1, 2, 2]],
    "equal": [[1, 4, 4], [1, 4, 4]],
    "video": [[3, 4, 4]],
    "video-and-image": [[3, 4, 4], [1, 6, 8]],
    "image-and-videos": [[1, 8, 8], [2, 2, 2], [5, 4, 6]],
}
TOLERANCE = 1e-5

pytestmark = cpu_only

Grids = list[list[int]]
Ready = Callable[[Any], object]


@dataclass(frozen=True)
class Tower:
    """How a tower is called.

    Attributes:
        patch: The name of the patch that hands over the length.
        pixels: The shape of a patch.
        given: How vLLM gives the grids.
    """

    patch: str
    pixels: tuple[int, ...]
    given: Callable[[Grids], Any]


TOWERS = {
    "dots_ocr": Tower("dots_ocr-longest", (3 * 14 * 14,), list),
    "glm_ocr": Tower("glm_ocr-prepared", (3 * 2 * 14 * 14,), torch.tensor),
    "qwen3_omni-vision": Tower(
        "qwen3_omni_moe_thinker-longest", (3 * 2 * 16 * 16,), torch.tensor
    ),
}
# Those that vLLM spreads over ranks by image.
SHARDED = ("dots_ocr", "glm_ocr")


def run(
    name: str,
    backend: str,
    grids: Grids,
    ready: Ready = lambda tower: None,
    call_by: Callable[[Any, torch.Tensor], Any] | None = None,
) -> Result:
    """Encode images and videos.

    Args:
        name: Of `TOWERS`.
        backend: Attention by it.
        grids: `[[t, h, w], ...]`.
        ready: Called with the tower in front of its call.
        call_by: What calls it with pixels, in place of a plain call.
    """
    how = TOWERS[name]
    if how.patch in left_out():
        pytest.skip(f"{how.patch} is not for this vLLM")

    def build(m: Any) -> tuple[nn.Module, Call]:
        tower, _ = PACKED[name].build(m)
        pixels = noise(sum(t * h * w for t, h, w in grids), *how.pixels)

        def call() -> Any:
            ready(tower)
            if call_by is not None:
                return call_by(tower, pixels)
            return tower(pixels, grid_thw=how.given(grids))

        return tower, call

    return encode(replace(PACKED[name], build=build), engine(backend))


def noted(seen: list[Any]) -> Ready:
    """Collect the offsets and the longest length that each block gets."""

    def note(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        seen.append((given["cu_seqlens"], given["max_seqlen"]))

    def ready(tower: Any) -> None:
        for block in tower.blocks:
            block.register_forward_pre_hook(note, with_kwargs=True)

    return ready


def stock_computes(
    tower: Any, longest: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have stock's method return a length, as it is on a GPU or to be known again."""
    compute = "compute_attn_mask_seqlen"
    monkeypatch.setattr(type(tower), compute, lambda self, ends: longest)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", TOWERS)
def test_it_is_the_largest_frames_and_the_output_is_stocks(
    name: str, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids, seen = BATCHES[batch], []

    def ready(tower: Any) -> None:
        noted(seen)(tower)
        stock_computes(tower, torch.empty((), device="meta"), monkeypatch)

    found = run(name, "FLASHINFER", grids, ready)
    assert found.programs == len(seen) == 2
    for cu_seqlens, longest in seen:
        assert (longest.device.type, longest.dtype) == ("cpu", torch.int32)
        assert cu_seqlens.diff().max() == longest == max(h * w for _, h, w in grids)
    monkeypatch.undo()
    stock = run(name, "TORCH_SDPA", grids)
    assert relative_error(found.out, stock.out) < TOLERANCE


@pytest.mark.parametrize("is_patched", [True, False])
@pytest.mark.parametrize("name", TOWERS)
def test_a_kernel_is_chosen_by_it_and_not_by_the_tokens_of_all(
    name: str, is_patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def ready(tower: Any) -> None:
        nonlocal asked
        stock_computes(tower, torch.empty((), device="meta"), monkeypatch)
        # Not of what warms the tower up.
        asked = choices(monkeypatch)

    with without(*(() if is_patched else (TOWERS[name].patch,))):
        run(name, "FLASHINFER", [[3, 4, 4], [1, 4, 6]], ready)
    assert set(asked) == {24 if is_patched else 72}


@pytest.mark.parametrize("name", TOWERS)
def test_other_backends_get_stocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Patches are applied by a layer of this package.
    engine("FLASHINFER")
    stock, seen = torch.tensor(72), []

    def ready(tower: Any) -> None:
        noted(seen)(tower)
        stock_computes(tower, stock, monkeypatch)

    run(name, "TORCH_SDPA", [[3, 4, 4], [1, 4, 6]], ready)
    assert len(seen) == 2 and all(longest is stock for _, longest in seen)


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_keeps_nothing_of_a_call_even_if_it_fails(name: str) -> None:
    towers: list[Any] = []

    def ready(tower: Any) -> None:
        towers.append(tower)

        def fail(*_: Any) -> None:
            assert "compute_attn_mask_seqlen" in vars(tower)
            raise RuntimeError("out of memory")

        tower.blocks[1].register_forward_pre_hook(fail)

    with pytest.raises(RuntimeError, match="out of memory"):
        run(name, "FLASHINFER", [[1, 4, 6]], ready)
    assert "compute_attn_mask_seqlen" not in vars(towers[0])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", SHARDED)
def test_a_rank_gets_that_of_its_own_images(
    name: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import vision

    grids, seen = [[1, 2, 2], [1, 10, 6], [3, 4, 4]], []

    def call_by(tower: Any, pixels: torch.Tensor) -> Any:
        ranks = {
            "get_tensor_model_parallel_world_size": lambda: 2,
            "get_tensor_model_parallel_rank": lambda: rank,
            "tensor_model_parallel_all_gather": lambda x, dim: torch.cat([x, x], dim),
        }
        for function, answer in ranks.items():
            monkeypatch.setattr(vision, function, answer)
        spread = vision.run_dp_sharded_mrope_vision_model
        return list(spread(tower, pixels, grids, rope_type="rope_3d"))

    def ready(tower: Any) -> None:
        noted(seen)(tower)
        stock_computes(tower, torch.empty((), device="meta"), monkeypatch)

    run(name, "FLASHINFER", grids, ready, call_by)
    # The largest image alone has more patches than the other two.
    assert [int(longest) for _, longest in seen] == [(60, 16)[rank]] * 2


@pytest.mark.parametrize(
    ("grids", "expected"),
    [
        ([[3, 4, 6], [1, 2, 2]], 24),
        (torch.tensor([[3, 4, 6], [1, 2, 2]]), 24),
        (torch.tensor([[4, 6], [2, 2]]), 24),
        ([], 0),
        (torch.empty((2, 3), device="meta"), None),
    ],
)
def test_grids_on_the_device_are_not_read(grids: Any, expected: int | None) -> None:
    assert largest_frame(grids) == expected


class TestMoonvit:
    """Kimi-VL's tower, whose encoder takes a length, or leaves it to each block."""

    IMAGES = ((4, 6), (10, 2), (2, 2))

    def run(
        self,
        backend: str,
        ready: Ready = lambda tower: None,
        by_metadata: bool = False,
    ) -> Result:
        """Encode images, by their grids or the metadata of graphs."""

        def build(m: Any) -> tuple[nn.Module, Call]:
            tower, _ = PACKED["moonvit"].build(m)
            pixels = noise(sum(h * w for h, w in self.IMAGES), 3, 14, 14)
            grids = torch.tensor(self.IMAGES)

            def call() -> Any:
                ready(tower.encoder)
                if by_metadata:
                    longest = {"max_seqlen_override": 50}
                    metadata = tower.prepare_encoder_metadata(self.IMAGES, **longest)
                    return tower(pixels, None, encoder_metadata=metadata)
                return tower(pixels, grids)

            return tower, call

        return encode(replace(PACKED["moonvit"], build=build), engine(backend))

    def noted(self, seen: list[Any]) -> Ready:
        def note(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            seen.append((args[1], given["max_seqlen"]))

        def ready(encoder: Any) -> None:
            for block in encoder.blocks:
                block.register_forward_pre_hook(note, with_kwargs=True)

        return ready

    def test_it_is_the_largest_images_and_the_output_is_stocks(self) -> None:
        seen: list[Any] = []
        found = self.run("FLASHINFER", self.noted(seen))
        assert found.programs == len(seen) == 2
        for cu_seqlens, longest in seen:
            assert (longest.device.type, longest.dtype) == ("cpu", torch.int32)
            assert cu_seqlens.diff().max() == longest == 24
        stock = self.run("TORCH_SDPA")
        assert relative_error(found.out, stock.out) < TOLERANCE

    @pytest.mark.parametrize("is_patched", [True, False])
    def test_a_kernel_is_chosen_by_it_and_not_by_the_tokens_of_all(
        self, is_patched: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []

        def ready(encoder: Any) -> None:
            nonlocal asked
            asked = choices(monkeypatch)

        with without(*(() if is_patched else ("moonvit-longest",))):
            self.run("FLASHINFER", ready)
        assert set(asked) == {24 if is_patched else 48}

    def test_other_backends_get_none(self) -> None:
        # Patches are applied by a layer of this package.
        engine("FLASHINFER")
        seen: list[Any] = []
        self.run("TORCH_SDPA", self.noted(seen))
        assert [longest for _, longest in seen] == [None] * 2

    def test_one_that_is_given_stays(self) -> None:
        seen: list[Any] = []
        self.run("FLASHINFER", self.noted(seen), by_metadata=True)
        assert [int(longest) for _, longest in seen] == [50] * 2

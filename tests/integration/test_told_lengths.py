# SPDX-License-Identifier: Apache-2.0
"""Blocks whose `forward` takes no longest length are told one by their tower's call."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _blocks import without
from _encoders import PACKED
from _grid_models import GRIDS
from _models import Result, encode, engine
from _towers import cpu_only
from torch import nn

from cases import relative_error
from vllm_flashinfer_vit.blocks import attach as attach_module
from vllm_flashinfer_vit.blocks.tower_pass import TowerProgram
from vllm_flashinfer_vit.models import keye, openpangu_vl

pytestmark = cpu_only

# Keye-VL's whole videos are one sequence.
LONGEST = max(t * h * w for t, h, w in GRIDS)


def run(backend: str) -> Result:
    return encode(PACKED["keye"], engine(backend))


def test_attention_is_settled_by_the_largest_image(settled: list[Any]) -> None:
    found = run("FLASHINFER")
    assert found.programs == 2
    assert settled
    for cu_seqlens, _, _, longest in settled:
        assert (longest.device.type, longest.dtype) == ("cpu", torch.int32)
        assert int(longest) == LONGEST == int(cu_seqlens.diff().max())
    assert relative_error(found.out, run("TORCH_SDPA").out) < 1e-5


def test_without_the_patch_the_tokens_of_the_call_stand_for_it(
    settled: list[Any],
) -> None:
    with without("keye-longest"):
        run("FLASHINFER")
    assert settled and all(read[3] is None for read in settled)


def test_grids_on_the_device_are_not_read() -> None:
    """What windows hold is known without them."""
    tower = SimpleNamespace(window_size=112, spatial_merge_size=2, patch_size=16)
    grids = torch.empty(3, 3, dtype=torch.int64, device="meta")
    whole, windowed = openpangu_vl._lengths(tower, {"grid_thw": grids})
    # Three merged patches fit a window's side, of seven.
    assert whole is None and int(windowed) == 36
    assert keye._lengths(tower, {"image_grid_thw": grids}) == (None, None)


class Pangu(nn.Module):
    """A tower like openPangu-VL's, which no CPU can build, that notes what is told."""

    def __init__(self) -> None:
        super().__init__()
        self.window_size, self.spatial_merge_size, self.patch_size = 112, 2, 14
        self.fullatt_block_indexes = [1]
        self.blocks = nn.ModuleList([nn.Identity() for _ in range(3)])
        vars(self.blocks)[attach_module._PROGRAM] = TowerProgram()
        self.seen: list[dict[int, int] | None] = []

    def forward(self, x: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        program = vars(self.blocks).get(attach_module._PROGRAM)
        told = program and {index: int(x) for index, x in program.told.items()}
        self.seen.append(told)
        if not len(x):
            raise ValueError("no pixels")
        return x


def test_openpangus_windows_are_told_from_its_images() -> None:
    (patch,) = (p for p in openpangu_vl.PATCHES if p.name == "openpangu_vl-longest")
    forward = patch.replace(Pangu.forward)
    tower, grids = Pangu(), torch.tensor([[1, 4, 6], [2, 16, 32]])
    forward(tower, torch.zeros(1), grids)
    forward(tower, torch.zeros(1), grid_thw=grids)
    assert tower.seen == [{0: 64, 1: 512, 2: 64}] * 2
    # An error leaves nothing behind for the next call.
    with pytest.raises(ValueError, match="no pixels"):
        forward(tower, torch.zeros(0), grids)
    assert vars(tower.blocks)[attach_module._PROGRAM].told == {}
    # Blocks that run as vLLM's own have nobody to tell.
    del vars(tower.blocks)[attach_module._PROGRAM]
    forward(tower, torch.zeros(1), grids)
    assert tower.seen[-1] is None

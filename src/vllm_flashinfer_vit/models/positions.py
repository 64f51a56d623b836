# SPDX-License-Identifier: Apache-2.0
"""GLM-4.xV's learned positions of a whole batch, interpolated by one weighted sum."""

import functools
import math
from typing import Any

import torch
from torch.nn.functional import embedding_bag

from vllm_flashinfer_vit.models._shared import MODELS, Function, Grids, is_served
from vllm_flashinfer_vit.models.metadata import cache_of
from vllm_flashinfer_vit.patches.patch import Patch

# The parameter of cubic convolution in PyTorch's `grid_sample` and `interpolate`
# (Keys, 1981, has -0.5).
_CUBIC = -0.75

_FAMILY = f"{MODELS}.glm4_1v"
_TARGET = f"{_FAMILY}:Glm4vVisionTransformer.pos_embeds_interpolate"


def _sum_taps(original: Function) -> Function:
    @functools.wraps(original)
    def pos_embeds_interpolate(self: Any, grid_thw: Grids) -> torch.Tensor:
        if not is_served(self.blocks[0].attn):
            return original(self, grid_thw)
        table = self.embeddings.position_embedding.weight
        cache = cache_of(self)
        taps, weights = [], []
        for t, h, w in grid_thw:
            if (frame := cache.find(("taps", h, w))) is None:
                frame = _frame(table, h, w, self.spatial_merge_size)
                cache.keep(("taps", h, w), frame)
            taps += [frame["taps"]] * t
            weights += [frame["weights"]] * t
        summed = embedding_bag(
            torch.cat(taps),
            table.float(),
            per_sample_weights=torch.cat(weights),
            mode="sum",
        )
        return summed.to(self.dtype)

    return pos_embeds_interpolate


def _frame(
    table: torch.Tensor, rows: int, columns: int, merge: int
) -> dict[str, torch.Tensor]:
    """Return which positions make up those of a frame's patches.

    Args:
        table: `[side * side, C]`, the learned positions, row by row.
        rows: Rows of patches.
        columns: Columns of patches.
        merge: The rows and columns of patches that become one token; they follow one
            another in a tower.

    Returns:
        `taps`: `[rows * columns, 16] int32`, rows of `table`; `weights`: the same shape
        in fp32.
    """
    side = math.isqrt(table.shape[0])
    shape = (rows // merge, columns // merge, merge, merge, 4, 4)
    taps_down, weights_down = _along(rows, side, table.device)
    taps_right, weights_right = _along(columns, side, table.device)

    def by_patch(down: torch.Tensor, right: torch.Tensor) -> list[torch.Tensor]:
        by_row = down.view(shape[0], 1, merge, 1, 4, 1)
        by_column = right.view(1, shape[1], 1, merge, 1, 4)
        return [part.expand(shape).reshape(-1, 16) for part in (by_row, by_column)]

    first, second = by_patch(taps_down * side, taps_right)
    down, right = by_patch(weights_down, weights_right)
    return {"taps": first + second, "weights": down * right}


def _along(
    count: int, side: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bicubic taps of patches along one axis, and their weights.

    Patches and positions are cells of one length, compared by their centres; past the
    edge the last position counts (`align_corners=False`, `padding_mode="border"`).

    Args:
        count: Patches along the axis.
        side: Positions along the axis.
        device: Of the result.

    Returns:
        `[count, 4] int32` and `[count, 4] fp32`.
    """
    centres = torch.arange(count, dtype=torch.float32, device=device) + 0.5
    at = centres / count * side - 0.5
    first = at.floor()
    offsets = torch.arange(-1, 3, dtype=torch.float32, device=device)
    away = ((at - first)[:, None] - offsets).abs()
    near = ((_CUBIC + 2) * away - (_CUBIC + 3)) * away * away + 1
    far = ((away - 5) * away + 8) * away * _CUBIC - 4 * _CUBIC
    taps = (first[:, None] + offsets).clamp(0, side - 1)
    return taps.int(), torch.where(away <= 1, near, far)


PATCH = Patch(
    name="glm4_1v-summed-positions",
    target=_TARGET,
    stands_for=(
        _TARGET,
        f"{_FAMILY}:Glm4vVisionEmbeddings.__init__",
        f"{_FAMILY}:Glm4vVisionEmbeddings.forward",
    ),
    why="stock samples each image by itself, with a GPU thread for a patch, which "
    "walks through all channels: 3 ms an image",
    remove_when="vLLM samples the positions of a batch by threads for its channels",
    parameters=("self", "grid_thw"),
    replace=_sum_taps,
    compiled=False,
)

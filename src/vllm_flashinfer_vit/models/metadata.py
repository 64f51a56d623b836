# SPDX-License-Identifier: Apache-2.0
"""What follows from the sizes of a batch alone, prepared once and kept on the device.

That is offsets, longest lengths, rotary tables and the order of windows. Nothing writes
into what is kept: towers only read it, replays of CUDA graphs copy it into their own
inputs, and graphs are captured with inputs that are made for them.
"""

import functools
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from vllm_flashinfer_vit.models._shared import (
    MODELS,
    Function,
    Grids,
    is_served,
    module_of,
)
from vllm_flashinfer_vit.patches.patch import Patch

# By name; vLLM has None for what a backend does not need.
Tensors = Mapping[str, Any]

# The rotary tables of 400,000 patches: 160 bytes a patch.
MAX_BYTES = 64 * 2**20
# Attribute of a tower: its `SizeCache`.
CACHE = "vllm_flashinfer_vit_kept"
# What the CUDA allocator hands out at least.
_BLOCK_BYTES = 512

# What this package's graphs set to 0 for replays, since they pad by themselves.
_PADDING = ("max_batch_size", "max_frames_per_batch")


class SizeCache:
    """Keeps tensors by the sizes they follow from; the least recently used go first.

    Attributes:
        max_bytes: Tensors of more than that are never kept.
        held_bytes: The memory of what is kept, each tensor in whole blocks.
    """

    def __init__(self, max_bytes: int) -> None:
        """Begin empty."""
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._kept: OrderedDict[Hashable, Tensors] = OrderedDict()

    def find(self, sizes: Hashable) -> Tensors | None:
        """Return what is kept for these sizes, not to be written, or None."""
        if (tensors := self._kept.get(sizes)) is not None:
            self._kept.move_to_end(sizes)
        return tensors

    def keep(self, sizes: Hashable, tensors: Tensors) -> None:
        """Keep what nothing is kept for yet."""
        if (added := _bytes(tensors)) > self.max_bytes:
            return
        self._kept[sizes] = tensors
        self.held_bytes += added
        while self.held_bytes > self.max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.held_bytes -= _bytes(oldest)


def _bytes(tensors: Tensors) -> int:
    sizes = (tensor.nbytes for tensor in tensors.values() if tensor is not None)
    return sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in sizes)


def cache_of(tower: Any) -> SizeCache:
    """Return what a tower keeps, made when it is first asked for."""
    return vars(tower).setdefault(CACHE, SizeCache(MAX_BYTES))


def kept_metadata(
    family: str,
    tower: str,
    computed_by: tuple[str, ...],
    *,
    name: str = "",
    grids: str = "grid_thw",
    windows: bool = False,
    of_weights: Mapping[str, str] | None = None,
) -> Patch:
    """Return the patch that keeps a tower's metadata by the sizes in a batch.

    Args:
        family: vLLM's module of the model.
        tower: The class of its vision tower.
        computed_by: The tower's methods that `prepare_encoder_metadata` calls.
        name: What to call the family, if not by its module.
        grids: What `prepare_encoder_metadata` calls the grids.
        windows: Whether it takes options for windows, too.
        of_weights: What in the metadata depends on weights, which may be loaded anew,
            each with the tower's method that computes it from the grids.
    """
    window_seqs = ("max_window_seqs_per_batch",) if windows else ()
    window_len = ("max_seqlen_window_override",) if windows else ()
    return Patch(
        name=f"{name or family}-kept-metadata",
        target=f"{module_of(family)}:{tower}.prepare_encoder_metadata",
        # The tower's `forward` must not write into what is kept.
        stands_for=tuple(
            f"{module_of(family)}:{tower}.{method}"
            for method in ("prepare_encoder_metadata", "forward", *computed_by)
        ),
        why="stock prepares offsets, rotary tables and windows anew for every batch, "
        "and copies them to the device",
        remove_when="vLLM keeps the metadata of batches by their sizes",
        parameters=(
            "self",
            grids,
            *_PADDING,
            *window_seqs,
            "max_seqlen_override",
            *window_len,
            "device",
        ),
        replace=functools.partial(_keep_metadata, of_weights=of_weights or {}),
        compiled=False,
    )


def _keep_metadata(original: Function, of_weights: Mapping[str, str]) -> Function:
    @functools.wraps(original)
    def prepare_encoder_metadata(
        self: Any, *grids: Grids, **overrides: Any
    ) -> dict[str, Any]:
        if not (_is_plain(overrides) and is_served(self.blocks[0].attn)):
            return original(self, *grids, **overrides)
        (grid_thw,) = grids
        cache = cache_of(self)
        sizes = tuple((int(t), int(h), int(w)) for t, h, w in grid_thw)
        if (kept := cache.find(sizes)) is not None:
            fresh = {
                name: getattr(self, compute)(grid_thw)
                for name, compute in of_weights.items()
            }
            return {**kept, **fresh}
        metadata = original(self, grid_thw, **overrides)
        cache.keep(
            sizes, {name: metadata[name] for name in metadata if name not in of_weights}
        )
        return metadata

    return prepare_encoder_metadata


def _is_plain(overrides: Mapping[str, Any]) -> bool:
    """Whether metadata follows from the grids alone, and may be shared.

    Graphs write into what they are captured with, which has a longest length given.
    """
    return all(
        value is None or (name in _PADDING and value == 0)
        for name, value in overrides.items()
    )


def kept_rotary(family: str, tower: str, computed_by: tuple[str, ...]) -> Patch:
    """Return the patch that keeps a tower's rotary tables by the size of a frame.

    It serves new mixtures of known frames, and replays of graphs that vLLM pads.

    Args:
        family: vLLM's module of the model.
        tower: The class of its vision tower.
        computed_by: The tower's methods that it does the work of.
    """
    return Patch(
        name=f"{family}-kept-rotary",
        target=f"{MODELS}.{family}:{tower}.rot_pos_emb",
        stands_for=tuple(
            f"{MODELS}.{family}:{tower}.{method}" for method in computed_by
        ),
        why="stock computes rotary positions anew for every image of every batch, on "
        "the host",
        remove_when="vLLM keeps the rotary tables of frame sizes on the device",
        parameters=("self", "grid_thw"),
        replace=_keep_rotary,
        compiled=False,
    )


def _keep_rotary(original: Function) -> Function:
    @functools.wraps(original)
    def rot_pos_emb(self: Any, grid_thw: Grids) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_served(self.blocks[0].attn):
            return original(self, grid_thw)
        cache = cache_of(self)
        all_tables = []
        for t, h, w in grid_thw:
            if (frame := cache.find((h, w))) is None:
                tables = torch.stack(self.rotary_pos_emb.get_cos_sin(max(h, w)))
                merge = self.spatial_merge_size
                frame = {"tables": _by_patch(tables, h, w, merge)}
                cache.keep((h, w), frame)
            all_tables += [frame["tables"]] * t
        # Copies even one frame's: CUDA graphs write into the tensors they captured.
        cos, sin = torch.cat(all_tables, 1)
        return cos, sin

    return rot_pos_emb


def _by_patch(
    tables: torch.Tensor, rows: int, columns: int, merge: int
) -> torch.Tensor:
    """Return a frame's tables, from those of positions, without a copy from the host.

    Args:
        tables: `[2, P, D]`, cos and sin by position, P at least `rows` and `columns`.
        rows: Rows of patches.
        columns: Columns of patches.
        merge: The rows and columns of patches that become one token; they follow one
            another in a tower.

    Returns:
        `[2, rows * columns, 2 * D]`, contiguous: the row's values, then the column's.
    """
    down, right = rows // merge, columns // merge
    by_row = tables[:, :rows].view(2, down, 1, merge, 1, -1)
    by_column = tables[:, :columns].view(2, 1, right, 1, merge, -1)
    shape = (2, down, right, merge, merge, tables.shape[2])
    both = torch.stack((by_row.expand(shape), by_column.expand(shape)), -2)
    return both.view(2, rows * columns, -1)

# SPDX-License-Identifier: Apache-2.0
"""What graphs of exact size have to know of a model, beyond what its buffers say."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

# Attribute of a model's `EncoderCudaGraphConfig`: its `Layout`, for those that are
# captured at their exact size.
LAYOUT = "vllm_flashinfer_vit_layout"
# What models call the grids of a batch: rows of `[t, h, w]`, or of `[h, w]`.
_GRIDS = ("image_grid_thw", "video_grid_thw", "grid_thws", "image_grid_hws")


@dataclass(frozen=True)
class Layout:
    """How a model's buffers follow from the tokens of a graph.

    A packed tower has as many rows as there are patches, and prefix sums of lengths.
    In a dense one a row is an image, a tile or a frame, and holds as many tokens as any
    other.

    Attributes:
        tower: The model's attribute with a packed tower; empty for dense ones.
        merge: The tower's attribute that says how many rows and columns of patches
            become a token.
        pooled: Returns how many patches of a dense tower become a token, given the
            model.
        by_width: Whether rows are as wide as a graph's key says. vLLM before 0.33 has
            no such keys, and its rows are as wide as the budget.
    """

    tower: str = ""
    merge: str = "spatial_merge_size"
    pooled: Callable[[Any], int] | None = None
    by_width: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether sequences of any length follow one another in the buffers."""
        return bool(self.tower)

    def fits(self, config: Any) -> bool:
        """Return whether vLLM captures this model as was read.

        Args:
            config: The model's `EncoderCudaGraphConfig`.
        """
        axes = getattr(config, "capture_axes", ())
        return bool(config.modalities) and len(axes) == self.by_width

    def patches_per_token(self, model: Any) -> int:
        """Return how many patches become a token."""
        if self.pooled is not None:
            return self.pooled(model)
        merge = getattr(getattr(model, self.tower), self.merge)
        rows, columns = merge if isinstance(merge, tuple | list) else (merge, merge)
        return rows * columns

    def row_tokens(self, smallest: int, axis_keys: tuple[Hashable, ...]) -> int:
        """Return the tokens that a graph holds any multiple of.

        Args:
            smallest: Tokens of the smallest item, as the model says.
            axis_keys: What the graph is captured for beside its budget.
        """
        if self.is_packed:
            return 1
        if axis_keys:
            (width,) = axis_keys
            assert isinstance(width, int)
            return width
        return smallest


def lengths(mm_kwargs: dict[str, Any]) -> list[int]:
    """Return the patches of each image and frame of a packed tower's batch.

    Each is a sequence. Kimi-K2.5's and K3's videos attend across frames, and vLLM
    captures none of them.

    Raises:
        KeyError: It has no grids.
    """
    grids = [mm_kwargs[name] for name in _GRIDS if name in mm_kwargs]
    if not grids:
        raise KeyError(f"a batch has {', '.join(mm_kwargs)}, none of {_GRIDS}")
    rows = grids[0] if isinstance(grids[0], list) else grids[0].tolist()
    return [
        int(height) * int(width)
        for *frames, height, width in rows
        for _ in range(int(frames[0]) if frames else 1)
    ]

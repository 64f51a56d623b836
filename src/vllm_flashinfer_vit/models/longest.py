# SPDX-License-Identifier: Apache-2.0
"""The longest length of a batch, handed to blocks on the host where its sizes are.

Kernels are chosen by it. On the device nothing reads it, since that would wait.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from vllm_flashinfer_vit.models._shared import Function, Grids, is_served, module_of
from vllm_flashinfer_vit.patches.patch import Patch

WHY = (
    "stock computes the longest length on the device, where no choice of a kernel can "
    "read it"
)
REMOVE_WHEN = "vLLM's tower hands its blocks a longest length on the CPU"
# See `longest_told`.
Lengths = Callable[
    [Any, Mapping[str, Any]], tuple[torch.Tensor | None, torch.Tensor | None]
]
# The method that a tower asks for the length.
COMPUTE = "compute_attn_mask_seqlen"


def largest_frame(grids: torch.Tensor | Grids) -> torch.Tensor | None:
    """Return the patches of the largest frame, which bound every sequence's.

    Args:
        grids: `[N, 2]` or `[N, 3]` integers, of which the last two are a frame's rows
            and columns.

    Returns:
        `[] int32` on the CPU; None if the grids are on the device.
    """
    if isinstance(grids, torch.Tensor):
        if not grids.is_cpu:
            return None
        grids = grids.tolist()
    longest = max((h * w for *_, h, w in grids), default=0)
    return torch.tensor(longest, dtype=torch.int32, device="cpu")


@contextmanager
def told_longest(tower: Any, grids: torch.Tensor | Grids) -> Iterator[None]:
    """Have a tower's `compute_attn_mask_seqlen` answer by the grids of a batch."""
    longest = largest_frame(grids) if is_served(tower.blocks[0].attn) else None
    if longest is None:
        yield
        return
    vars(tower)[COMPUTE] = lambda cu_seqlens: longest
    try:
        yield
    finally:
        del vars(tower)[COMPUTE]


def longest_on_host(family: str, tower: str, stream: str) -> Patch:
    """Return the patch of a tower that asks its own method for the longest length.

    Args:
        family: vLLM's module of the model.
        tower: The class of its vision tower.
        stream: What its `forward` calls the pixels.
    """
    path = f"{module_of(family)}:{tower}"
    return Patch(
        name=f"{family}-longest",
        target=f"{path}.forward",
        stands_for=(f"{path}.forward", f"{path}.{COMPUTE}"),
        why=WHY,
        remove_when=REMOVE_WHEN,
        parameters=("self", stream, "grid_thw"),
        replace=_tell,
    )


def longest_told(
    family: str,
    tower: str,
    blocks: str,
    parameters: tuple[str, ...],
    lengths: Lengths,
    parts: tuple[str, ...] = (),
) -> Patch:
    """Return the patch of a tower whose blocks compute the longest length themselves.

    Args:
        family: vLLM's module of the model.
        tower: The class that calls the blocks.
        blocks: Where it has them.
        parameters: What its `forward` takes.
        lengths: Returns the longest length of whole images and that of windows, from
            the tower and what its `forward` was given by name; None where unknown.
        parts: Its other methods that `lengths` counts on.
    """

    def replace(original: Function) -> Function:
        from vllm_flashinfer_vit.blocks.attach import told_lengths

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **given: Any) -> Any:
            named = {**dict(zip(parameters[1:], args, strict=False)), **given}
            whole, windowed = lengths(self, named)
            # As these towers have it; without it all blocks attend to whole images.
            full = getattr(self, "fullatt_block_indexes", None)
            with told_lengths(getattr(self, blocks), full, whole, windowed):
                return original(self, *args, **given)

        return forward

    path = f"{module_of(family)}:{tower}"
    return Patch(
        name=f"{family}-longest",
        target=f"{path}.forward",
        stands_for=tuple(f"{path}.{part}" for part in ("forward", *parts)),
        why="stock computes the longest length in each block, on the device, where no "
        "choice of a kernel can read it",
        remove_when=REMOVE_WHEN,
        parameters=parameters,
        replace=replace,
    )


def _tell(original: Function) -> Function:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **given: Any) -> torch.Tensor:
        grids = given["grid_thw"] if "grid_thw" in given else args[1]
        with told_longest(self, grids):
            return original(self, *args, **given)

    return forward

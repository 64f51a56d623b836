# SPDX-License-Identifier: Apache-2.0
"""Sizes of encoder CUDA graphs, and how their buffers are filled: pure functions.

A budget counts merged tokens, as vLLM's settings do. One token is merge_size^2 patches,
and attention works on patches.
"""

from collections.abc import Callable
from typing import ClassVar

import torch

# Budgets between a power of two and the next. A batch is padded by at most 1.25, by
# 1.09 on average over sizes that are spread evenly on a logarithmic scale; vLLM's
# powers of two pad by 2 and 1.44.
_STEPS = 4

# Patches of the largest automatic graph. A block of a larger batch takes an H200 0.7 ms
# or more in 16 bits, and a host 0.1 to 0.2 to launch: a graph would only pad it.
_MOST_PATCHES = 12288
# The same where launches take a host longer. It fills a GPU: batches that are cut into
# several of it lose nothing.
_MOST_PATCHES_SLOW = 24576

# Frames that a graph has room for, if the user has not said how many: one for each
# 16 tokens (8 x 8 patches), and some more for small budgets.
_TOKENS_PER_FRAME = 16
_MORE_FRAMES = 128


class ReplayError(ValueError):
    """A graph cannot hold a batch.

    Attributes:
        kind: The label of its counter.
    """

    kind: ClassVar[str]


class ReplayPixelsError(ReplayError):
    """A batch has pixels of another dtype than the graph."""

    kind = "graph_pixels"


class ReplaySizeError(ReplayError):
    """A batch needs a larger buffer than the graph has."""

    kind = "graph_size"


class ReplayMissingError(ReplayError):
    """There is no graph of a batch's kind, whatever its budget."""

    kind = "graph_missing"


def fine_budgets(smallest: int, largest: int, step: int = 1) -> list[int]:
    """Return budgets from `smallest` to `largest`, four between two powers of two.

    Args:
        smallest: Tokens of the first.
        largest: Tokens of the last.
        step: Tokens that all of them but these two are a multiple of.

    Raises:
        ValueError: A budget is not positive, or the first above the last.
    """
    if not 0 < smallest <= largest:
        raise ValueError(f"no budgets from {smallest} to {largest}")
    budgets = {smallest, largest}
    power = smallest
    while power <= largest:
        for part in range(_STEPS):
            budgets.add((power + part * power // _STEPS) // step * step)
        power *= 2
    return sorted(b for b in budgets if smallest <= b <= largest)


def largest_budget(
    smallest: int, largest: int, patches_per_token: int, ranks: int, is_quick: bool
) -> int:
    """Return the tokens of the largest graph that is worth its memory, if any is.

    Args:
        smallest: Tokens of the smallest item.
        largest: Tokens of the largest batch.
        patches_per_token: What the tower merges.
        ranks: How many GPUs share the work on each patch.
        is_quick: Whether blocks run as programs, which a host launches soonest.
    """
    most = _MOST_PATCHES if is_quick else _MOST_PATCHES_SLOW
    return max(smallest, min(largest, most * ranks // patches_per_token))


def usual_frames(budget: int) -> int:
    """Return how many video frames an automatic graph of `budget` tokens has room for.

    Room costs time: in every layer, attention kernels start blocks for sequences that
    may be there, and vLLM's own limit, the longest video for each item, would be as
    many sequences as the budget has tokens.
    """
    return _MORE_FRAMES + budget // _TOKENS_PER_FRAME


def max_sequences(budget: int, max_items: int, max_frames: int) -> int:
    """Return the largest number of images and frames in one replay.

    Args:
        budget: Tokens of the graph.
        max_items: Images or videos of a batch.
        max_frames: Frames of a batch, 0 without videos.
    """
    # A frame has at least one token.
    return min(budget, max(max_items, max_frames))


def max_windows(budget: int, num_frames: int, window_side: int) -> int:
    """Return the largest number of windows in one replay; some batch attains it.

    A frame of h x w tokens has ceil(h / s) * ceil(w / s) windows of side s, which is at
    most (h * w + s - 1) / s: rows of one token's height have the most windows, each cut
    off after the first column of its last window. The sum over n frames is at most
    (budget + n * (s - 1)) / s.

    Args:
        budget: Tokens of the graph.
        num_frames: `max_sequences` of the graph.
        window_side: Side of a window in tokens.
    """
    frames = min(budget, num_frames)
    return (budget + frames * (window_side - 1)) // window_side


def even_split(num_tokens: int, num_seqs: int) -> list[int]:
    """Return prefix sums of `num_tokens` cut into sequences of about one length."""
    return [num_tokens * n // num_seqs for n in range(num_seqs + 1)]


def real_first(places: torch.Tensor, counts: torch.Tensor, side: int) -> torch.Tensor:
    """Return the tokens of videos in an order that has each video's padding at its end.

    Args:
        places: `[F, P, 2] int64`, column and row of each patch of F frames; -1 is
            padding. What lies in a square of patches becomes a token, row by row.
        counts: `[N]` integers on the host, frames of each video.
        side: Patches of a square's side.

    Returns:
        `[F * P / side^2] int64` on the same device, which is not waited for; a frame
        has P / side^2 tokens, padding included.
    """
    frames, patches, _ = places.shape
    x, y = places.clamp(min=0).unbind(-1)
    columns = (x.amax(1, keepdim=True) + 1) // side
    is_real = places.new_zeros(frames, patches // side**2, dtype=torch.bool)
    is_real.scatter_(1, x // side + columns * (y // side), True)
    video = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    video = video.to(places.device, non_blocking=True)
    return (2 * video[:, None] + ~is_real).flatten().argsort(stable=True)


def is_cu_seqlens(key: str) -> bool:
    """Return whether a buffer of vLLM's models holds prefix sums of lengths."""
    return key.startswith("cu_") and key.endswith("seqlens")


def fill_by(
    logic: Callable[[torch.Tensor, torch.Tensor], None],
    key: str,
    buffer: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Copy and pad as a model says, if the buffer holds all values.

    Some models cut off what does not fit.

    Args:
        logic: The model's, of buffer and values.
        key: As for `fill`, like the other arguments.
        buffer: See `key`.
        values: See `key`.

    Raises:
        ReplaySizeError: There are more values than the buffer holds.
    """
    pairs = zip(values.shape, buffer.shape, strict=False)
    if any(count > size for count, size in pairs):
        raise ReplaySizeError(
            f"{key} of this batch is {tuple(values.shape)}, the CUDA graph was "
            f"captured with {tuple(buffer.shape)}"
        )
    logic(buffer, values)


def fill(key: str, buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Copy a batch's values into a graph's buffer, and pad what is left of it.

    Prefix sums repeat their last value, which stands for empty sequences; zeros would
    make one length negative. Everything else is padded with zeros.

    Args:
        key: The buffer's name in vLLM.
        buffer: `[N, ...]`, changed in place.
        values: `[n, ...]`, n at most N.

    Raises:
        ReplaySizeError: There are more values than the buffer holds.
    """
    count = values.shape[0]
    if count > buffer.shape[0]:
        raise ReplaySizeError(
            f"{key} of this batch has {count} entries, the CUDA graph was captured "
            f"with {buffer.shape[0]}"
        )
    buffer[:count].copy_(values)
    rest = buffer[count:]
    if not rest.shape[0]:
        return
    if count and is_cu_seqlens(key):
        rest.copy_(values[-1:].expand_as(rest))
    else:
        rest.zero_()

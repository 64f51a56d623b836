# SPDX-License-Identifier: Apache-2.0
"""What pairs are turned by, of attention that turns q and k by tables that it keeps."""

from collections.abc import Callable

import torch


def turned_pairs(
    turn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, head_dim: int
) -> torch.Tensor:
    """Return what pairs are turned by, `[T, D / 2, 2]`: 1, 0 becomes cos, sin.

    Args:
        turn: Turns `[T, D]`, by pairs that lie side by side.
        x: The stream `[B, T, C]`.
        head_dim: D.
    """
    units = x.new_zeros(x.shape[1], head_dim, dtype=torch.float32)
    units[:, ::2] = 1
    return turn(units).view(len(units), -1, 2)

# SPDX-License-Identifier: Apache-2.0
"""What the block program needs of an attention layer, which lies in a room above."""

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from vllm_flashinfer_vit.kernels.formats import DeviceScales, QuantizedQKV
from vllm_flashinfer_vit.ops.batch import Batch, Layout, Taken, Turning


class Counts(Protocol):
    """Counts a tower's passes; see `engine.counting.LayerCounts`."""

    def passed(self, path: Literal["blocks"], batch: Batch, is_first: bool) -> None: ...

    def fell_back(self, reason: str) -> None: ...


class AttentionLayer(Protocol):
    """What the program needs of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    turning: Turning | None
    layouts: tuple[Layout, ...]
    is_watched: bool
    prepares_for: tuple[object, ...]
    own_scales: DeviceScales | None
    counts: Counts

    def prepare(
        self,
        batch: Batch,
        sequence_lengths: torch.Tensor | None = None,
        is_clean: bool = False,
        quantized: QuantizedQKV | None = None,
    ) -> Callable[..., torch.Tensor]: ...

    def settle_projection(self, turns: bool, quantizes: bool) -> None: ...

    @property
    def takes(self) -> set[Taken | None]: ...

    def taken(self, batch: Batch) -> Taken | None: ...

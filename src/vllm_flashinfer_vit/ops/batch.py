# SPDX-License-Identifier: Apache-2.0
"""A batch as the ops take it."""

from typing import Literal, NamedTuple

import torch

# How q, k and v lie in memory where plans are built for it: all are views of one
# projection; q and k, which the model turned, are packed and v is a view; all are
# packed, or are copied to be so.
Layout = Literal["views", "turned", "packed"]
LAYOUTS: tuple[Layout, ...] = ("views", "turned", "packed")

# What a projection may have done for attention: turned q and k, or also written all
# three as `QuantizedQKV`.
Taken = Literal["turned", "quantized"]


class Turning(NamedTuple):
    """What q and k arrive with that are not turned yet.

    Attributes:
        dtype: Of cos and sin.
        dim: How many values of a head turn.
        interleaved: Which of them turn together; see `Batch`.
    """

    dtype: torch.dtype
    dim: int
    interleaved: bool = False


class Batch(NamedTuple):
    """Packed sequences, and what turns them; the ops' first arguments, in order.

    Attributes:
        q: `[T, H, D]`, any strides.
        k: `[T, H_kv, D]`, any strides; H is a multiple of H_kv.
        v: `[T, H_kv, D]`, any strides.
        cos: `[T, R / 2]`, R the turned part of D, or None; q and k are turned first.
        sin: Like cos.
        cu_seqlens: `[N + 1] int32`, token prefix sums; None for T / seq_len equal
            sequences. A tail of zeros or repeated values stands for empty sequences.
        max_seqlen: `[] int`, or an int; on the CPU it bounds the sequence lengths, on
            the GPU it is not read, since that would stall the stream, and T bounds
            them.
        seq_len: Length of equal sequences, in tokens; 0 with `cu_seqlens`.
        interleaved: Whether columns 2 i and 2 i + 1 of a head turn together; else
            columns i and i + R / 2 do.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: torch.Tensor | int | None = None
    seq_len: int = 0
    interleaved: bool = False

    @property
    def longest(self) -> int:
        """What bounds the sequence lengths on the host, in tokens."""
        num_tokens, found = self.q.shape[0], self.max_seqlen
        if self.cu_seqlens is None:
            return self.seq_len
        if isinstance(found, int) or (found is not None and found.is_cpu):
            # Some models hand over 0 where vLLM's default backend needs no length.
            return min(int(found), num_tokens) or num_tokens
        return num_tokens

    @property
    def mean_len(self) -> float:
        """Rows for each sequence, also for empty ones."""
        if self.cu_seqlens is None:
            return self.seq_len
        return self.q.shape[0] / max(1, self.cu_seqlens.numel() - 1)


class Ready(NamedTuple):
    """A batch as kernels take it.

    Attributes:
        q: `[T, H, D]`, D-stride 1, like k and v.
        k: See `q`.
        v: See `q`.
        cos: See `Batch`.
        sin: See `Batch`.
        interleaved: See `Batch`.
        cu_seqlens: See `Batch`; never None.
        longest: See `Batch`.
        is_clean: Whether rows of no sequence are finite in v, or there are none.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    interleaved: bool
    cu_seqlens: torch.Tensor
    longest: int
    is_clean: bool


def ready(batch: Batch, is_clean: bool = False) -> Ready:
    """Derive on the device, and on the host without waiting for it, what is missing.

    Args:
        batch: The batch.
        is_clean: See `Ready`. Equal sequences leave no row out.
    """
    is_clean = is_clean or batch.cu_seqlens is None
    q, k, v, cos, sin, cu_seqlens, _, seq_len, interleaved = batch
    if cu_seqlens is None:
        cu_seqlens = torch.arange(
            0, q.shape[0] + 1, seq_len, dtype=torch.int32, device=q.device
        )
    turns = cos, sin, interleaved
    return Ready(q, k, v, *turns, cu_seqlens, batch.longest, is_clean)


def row_offsets(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Return `cu_seqlens` of a dense batch with padding, made on the device.

    Each row is two sequences: its tokens, and the padding after them. Both count where
    a kernel goes by the rows to a sequence: it starts blocks for each.

    Args:
        tokens: `[B] int32`, how many of each row are no padding.
        length: S, the tokens and padding of a row.

    Returns:
        `[2 B + 1] int32`.
    """
    ends = torch.arange(
        0,
        (tokens.shape[0] + 1) * length,
        length,
        dtype=torch.int32,
        device=tokens.device,
    )
    starts = ends[:-1]
    both = torch.stack([starts, starts + tokens], dim=1).flatten()
    return torch.cat([both, ends[-1:]])

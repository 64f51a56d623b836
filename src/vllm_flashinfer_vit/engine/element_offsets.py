# SPDX-License-Identifier: Apache-2.0
"""Batches in the form of vLLM's own FLASHINFER, for callers that were built for it."""

import torch


def token_offsets(
    cu_seqlens: torch.Tensor | None, sequence_lengths: torch.Tensor | None
) -> torch.Tensor | None:
    """Return token prefix sums of a batch in vLLM's form, and others as they are.

    In vLLM's form, `cu_seqlens` counts elements, of Q, K and O and then of V, by
    strides that depend on the ranks and, in FP8, on the padding of a head. The lengths
    beside it do not depend on them, so nothing else is read.

    Args:
        cu_seqlens: `[2 (N + 1)] int32` in elements, with the lengths of its N
            sequences; or `[N + 1] int32` in tokens; or None.
        sequence_lengths: `[N]` integers on the same device, in tokens, 0 at the end for
            what fills vLLM's buckets; or None.

    Returns:
        `[N + 1] int32` in tokens, or None. The device is not waited for.
    """
    if cu_seqlens is None or sequence_lengths is None:
        return cu_seqlens
    lengths = sequence_lengths.flatten()
    if cu_seqlens.numel() != 2 * (lengths.numel() + 1):
        return cu_seqlens
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

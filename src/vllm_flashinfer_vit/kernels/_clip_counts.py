# SPDX-License-Identifier: Apache-2.0
"""How the quantisers count what given scales cut off.

They count blocks, of 128 rows of a head. One is cut off where its largest finite value
is off by more than it rounds; NaN and Inf, which become NaN by every scale, are not.
"""

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels.formats import cut_off_above

_cut_off_above = triton.constexpr_function(cut_off_above)


@triton.jit
def count_blocks(counts_ptr, mask, H: tl.constexpr, H_KV: tl.constexpr):
    """Count a block of each head of q, k and v where `mask` is true."""
    tl.atomic_add(counts_ptr, H, mask=mask, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, H_KV, mask=mask, sem="relaxed")
    tl.atomic_add(counts_ptr + 2, H_KV, mask=mask, sem="relaxed")


@triton.jit
def count_cut_off(counts_ptr, tensor, amax, inverse, LARGEST: tl.constexpr):
    """Count a block of a tensor, by its number, if it is cut off at LARGEST.

    Args:
        counts_ptr: See `check_counts`.
        tensor: 0 for q, 1 for k, 2 for v.
        amax: Its largest finite absolute value, fp32; NaN for none.
        inverse: The reciprocal of its scale, fp32.
        LARGEST: What a scaled value can be at most.
    """
    # Few blocks are: operations of all would queue for one address.
    is_cut_off = amax * inverse > _cut_off_above(LARGEST)
    tl.atomic_add(counts_ptr + 3 + tensor, 1, mask=is_cut_off, sem="relaxed")


def check_counts(counts: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Raise ValueError unless counts are `[2, 3]` int64, for scales that are given."""
    if scales is None:
        raise ValueError("scales of blocks cut nothing off: counts need given scales")
    if (
        counts.shape != (2, 3)
        or counts.dtype != torch.int64
        or not counts.is_contiguous()
    ):
        raise ValueError(
            "counts must be [2, 3] int64 and contiguous, got "
            f"{tuple(counts.shape)} {counts.dtype}"
        )

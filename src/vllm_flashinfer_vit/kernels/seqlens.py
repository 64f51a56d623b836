# SPDX-License-Identifier: Apache-2.0
"""What kernels want to know of a packed batch, derived from cu_seqlens in one launch.

The device alone reads cu_seqlens, so there is no synchronisation, and a captured graph
derives anew in every replay. Offsets are clamped to [0, T] and never fall: a tail of
zeros, as vLLM pads cu_seqlens for a graph, reads as empty sequences, and no kernel is
sent outside of its tensors.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout

# Few images and a few hundred windows fit one block; a long batch is searched in
# strides that keep its last block from reading in hundreds of steps.
_BLOCK = 256
_BLOCK_SEEN = 4096


class SeqLens(NamedTuple):
    """Lengths and offsets of Nb sequences, those past the batch's own being empty.

    Attributes:
        lengths: `[Nb, 1, 1, 1] int32`, in tokens.
        offsets: One `[Nb + 1, 1, 1, 1] int64` for each row stride that was asked for,
            in elements. Equal strides share one tensor.
    """

    lengths: torch.Tensor
    offsets: tuple[torch.Tensor, ...]


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _load_offsets(cu_ptr, offs_n, num_seqs, num_tokens):
    """Load clamped offsets; those past the batch are 0, which a running max skips."""
    cu = tl.load(cu_ptr + offs_n, mask=offs_n <= num_seqs, other=0)
    return tl.minimum(tl.maximum(cu, 0), num_tokens)


@triton.jit
def derive_offsets(
    cu_ptr, offs_n, first, num_seqs, num_tokens, BLOCK_SEEN: tl.constexpr
):
    """Return the offsets at offs_n, which starts at first; they never fall."""
    seen = tl.zeros([BLOCK_SEEN], dtype=tl.int32)
    for start in range(0, first, BLOCK_SEEN):
        offs_seen = tl.minimum(start + tl.arange(0, BLOCK_SEEN), first - 1)
        earlier = _load_offsets(cu_ptr, offs_seen, num_seqs, num_tokens)
        seen = tl.maximum(seen, earlier)
    own = _load_offsets(cu_ptr, offs_n, num_seqs, num_tokens)
    own = tl.maximum(own, tl.max(seen, axis=0))
    return tl.associative_scan(own, 0, _larger)


# No argument's value selects a compiled variant: a call that is captured in a graph
# would compile inside the capture if no call before had the same alignment.
@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "num_slots",
        "num_tokens",
        "stride_0",
        "stride_1",
        "stride_2",
        "stride_3",
    ],
    do_not_specialize_on_alignment=["cu_ptr"],
)
def _seqlens_kernel(
    cu_ptr,
    lengths_ptr,
    offsets_0_ptr,
    offsets_1_ptr,
    offsets_2_ptr,
    offsets_3_ptr,
    num_seqs,
    num_slots,
    num_tokens,
    stride_0,
    stride_1,
    stride_2,
    stride_3,
    BLOCK: tl.constexpr,
    BLOCK_SEEN: tl.constexpr,
):
    """Derive BLOCK sequences; what came before them is only searched for its maximum.

    Grid: (cdiv(num_slots + 1, BLOCK),)
    """
    pid = tl.program_id(0)
    offs_n = pid * BLOCK + tl.arange(0, BLOCK)
    cu = derive_offsets(cu_ptr, offs_n, pid * BLOCK, num_seqs, num_tokens, BLOCK_SEEN)
    following = _load_offsets(cu_ptr, offs_n + 1, num_seqs, num_tokens)
    length = tl.maximum(following - cu, 0)

    mask_n = offs_n <= num_slots
    tl.store(lengths_ptr + offs_n, length, mask=offs_n < num_slots)
    row = cu.to(tl.int64)
    tl.store(offsets_0_ptr + offs_n, row * stride_0, mask=mask_n)
    tl.store(offsets_1_ptr + offs_n, row * stride_1, mask=mask_n)
    tl.store(offsets_2_ptr + offs_n, row * stride_2, mask=mask_n)
    tl.store(offsets_3_ptr + offs_n, row * stride_3, mask=mask_n)


def derive_seqlens(
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    num_slots: int,
    row_strides: tuple[int, int, int, int],
) -> SeqLens:
    """Derive lengths and offsets on the device; may be captured in a CUDA graph.

    Args:
        cu_seqlens: `[N + 1] int32`, contiguous token prefix sums. Where they fall, or
            leave [0, T], the sequence is empty or cut.
        num_tokens: T, the rows of the packed tensors.
        num_slots: Nb >= N, how many sequences to describe.
        row_strides: Row strides of q, k, v and the output, in elements.

    Returns:
        Fresh tensors, every element of which is written.

    Raises:
        ValueError: An argument breaks a demand above.
    """
    derive, derived = prepare(cu_seqlens, num_tokens, num_slots, row_strides)
    derive()
    return derived


def prepare(
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    num_slots: int,
    row_strides: tuple[int, int, int, int],
) -> tuple[Callable[[], None], SeqLens]:
    """Settle `derive_seqlens` for what cu_seqlens will hold.

    Args:
        cu_seqlens: As for `derive_seqlens`, like the other arguments.
        num_tokens: See `cu_seqlens`.
        num_slots: See `cu_seqlens`.
        row_strides: See `cu_seqlens`.

    Returns:
        The call; and the tensors, every element of which each call writes.

    Raises:
        ValueError: As `derive_seqlens`.
    """
    launch = _launch(cu_seqlens, num_tokens, num_slots, row_strides)
    device = cu_seqlens.device
    lengths = torch.empty((num_slots, 1, 1, 1), dtype=torch.int32, device=device)
    by_stride = {
        stride: torch.empty((num_slots + 1, 1, 1, 1), dtype=torch.int64, device=device)
        for stride in dict.fromkeys(row_strides)
    }
    offsets = tuple(by_stride[stride] for stride in row_strides)
    derive = functools.partial(launch, cu_seqlens, lengths, *offsets)
    return derive, SeqLens(lengths, offsets)


@cached_by_layout
def _launch(
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    num_slots: int,
    row_strides: tuple[int, int, int, int],
) -> Launch:
    if (
        cu_seqlens.dtype != torch.int32
        or cu_seqlens.dim() != 1
        or not cu_seqlens.is_contiguous()
        or cu_seqlens.shape[0] == 0
    ):
        raise ValueError(
            "cu_seqlens must be contiguous int32 of shape [N + 1], got "
            f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)} with strides "
            f"{cu_seqlens.stride()}"
        )
    num_seqs = cu_seqlens.shape[0] - 1
    if num_slots < num_seqs:
        raise ValueError(f"{num_slots} slots cannot hold {num_seqs} sequences")
    if not 0 <= num_tokens < 2**31:
        raise ValueError(f"{num_tokens} tokens cannot be counted in int32")
    return Launch(
        _seqlens_kernel,
        triton.cdiv(num_slots + 1, _BLOCK),
        num_seqs,
        num_slots,
        num_tokens,
        *row_strides,
        BLOCK=_BLOCK,
        BLOCK_SEEN=_BLOCK_SEEN,
    )

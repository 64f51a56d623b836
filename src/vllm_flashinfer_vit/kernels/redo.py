# SPDX-License-Identifier: Apache-2.0
"""The kernel of `flash.py` where another kernel says that its own output is wrong."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout
from vllm_flashinfer_vit.kernels.flash import (
    UNSPECIALIZED,
    Config,
    attend_block,
    check_inputs,
    constants_of,
    scalars_of,
)

# Rows of a mark, and how many marks a program looks at.
MARKED_ROWS = 64
MARKS = 32


@triton.jit
def _find(
    cu_seqlens_ptr, num_tokens, num_seqs, tile, H: tl.constexpr, BLOCK: tl.constexpr
):
    """Return a tile's sequence, and how many tiles a head has of those before it."""
    offs = tl.arange(0, 128)
    seq = 0
    before = 0
    total = 0
    for i in range(0, num_seqs, 128):
        mask = i + offs < num_seqs
        start = tl.load(cu_seqlens_ptr + i + offs, mask=mask, other=0)
        end = tl.load(cu_seqlens_ptr + i + offs + 1, mask=mask, other=0)
        end = tl.minimum(end, num_tokens)
        counts = tl.where(end > start, tl.cdiv(end - start, BLOCK), 0)
        ends = total + tl.cumsum(counts, axis=0)
        is_before = (ends * H <= tile) & mask
        seq += tl.sum(is_before.to(tl.int32), axis=0)
        before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0), axis=0))
        total += tl.sum(counts, axis=0)
    return seq, before


@triton.jit(**UNSPECIALIZED)
def _redo_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cu_seqlens_ptr,
    out_ptr,
    marks_ptr,
    num_tokens,
    num_seqs,
    scale_log2e,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    UNIT: tl.constexpr,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    D_LO: tl.constexpr,
    D_HI_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    MARKS: tl.constexpr,
):
    """Attend again for the blocks of BLOCK_M queries that are marked, mostly none.

    Grid: (marks / MARKS,)
    """
    first_mark = tl.program_id(0) * MARKS
    marks = tl.load(marks_ptr + first_mark + tl.arange(0, MARKS))
    if tl.max(marks, axis=0) == 0:
        return
    for mark in range(first_mark, first_mark + MARKS):
        if tl.load(marks_ptr + mark) != 0:
            tile = mark // PARTS
            seq, before = _find(
                cu_seqlens_ptr, num_tokens, num_seqs, tile, H, PARTS * BLOCK_M
            )
            start = tl.load(cu_seqlens_ptr + seq)
            length = tl.minimum(tl.load(cu_seqlens_ptr + seq + 1), num_tokens) - start
            tiles = tl.cdiv(length, PARTS * BLOCK_M)
            item = tile - before * H
            part = item % tiles * PARTS + mark % PARTS
            attend_block(
                q_ptr,
                k_ptr,
                v_ptr,
                out_ptr,
                start,
                length,
                part * BLOCK_M,
                item // tiles,
                scale_log2e,
                stride_qt,
                stride_qh,
                stride_kt,
                stride_kh,
                stride_vt,
                stride_vh,
                UNIT,
                H,
                H_KV,
                D,
                D_LO,
                D_HI_PAD,
                BLOCK_M,
                BLOCK_N,
                NUM_STAGES,
            )


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    marks: torch.Tensor,
    out: torch.Tensor,
    parts: int,
    scale: float,
) -> Callable[[], object]:
    """Settle that another kernel's output is mended where it says that it is wrong.

    Args:
        q: As for `flash.prepare`, aligned to 16 bytes, like k, v, cu_seqlens and scale.
        k: See `q`.
        v: See `q`.
        cu_seqlens: See `q`.
        marks: `[M]` int32, contiguous, M a multiple of `MARKS`. Mark t * parts + p is
            not 0 where part p, `MARKED_ROWS` rows, of tile t is to be computed again.
            Tiles, each `parts` parts of a head of a sequence, are numbered by sequence,
            then by head; where cu_seqlens does not rise there are none.
        out: `[T, H, D]` contiguous, in q's dtype; rows that are marked are written.
        parts: Parts of a tile.
        scale: See `q`.

    Returns:
        A call, for the current stream, on what these tensors hold by then.
    """
    launch = _launch(q, k, v, cu_seqlens, marks, parts, scale)
    return launch.settle(q, k, v, cu_seqlens, out, marks)


@cached_by_layout
def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    marks: torch.Tensor,
    parts: int,
    scale: float,
) -> Launch:
    check_inputs(q, k, v, cu_seqlens, scale)
    constants = constants_of(q, k, Config(MARKED_ROWS, 4, num_stages=2))
    # Few blocks run: none has to make room for another.
    constants["maxnreg"] = 255
    return Launch(
        _redo_kernel,
        marks.numel() // MARKS,
        *scalars_of(q, k, v, cu_seqlens.numel() - 1, scale),
        PARTS=parts,
        MARKS=MARKS,
        **constants,
    )

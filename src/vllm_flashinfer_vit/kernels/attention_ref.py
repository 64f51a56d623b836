# SPDX-License-Identifier: Apache-2.0
"""Variable-length encoder attention in plain PyTorch: the measure of every kernel.

Scores, softmax and the sum over values are fp32; the output is rounded once. Nothing
is causal. Sequences of one length are computed together, and queries in chunks, so a
thousand windows cost a few matmuls and a long sequence never has all of its scores in
memory. The lengths are read on the host, so it cannot be captured in a CUDA graph.
"""

from collections import defaultdict

import torch

# 128 MiB of fp32 scores: far from exhausting a small machine's memory.
_MAX_SCORES = 1 << 25


def attention_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    """Attend within each sequence of a packed batch.

    Args:
        q: `[T, H, D]` floating point, D-stride 1, any other strides.
        k: `[T, H_kv, D]` like q, H a multiple of H_kv.
        v: `[T, H_kv, D]` like k.
        cu_seqlens: `[N + 1]` int32 on q's device, token prefix sums. It starts at 0
            and never falls, except that a tail of zeros stands for empty sequences.
        max_seqlen: An upper bound of the sequence lengths, in tokens.
        scale: Factor on the scores, usually `D ** -0.5`.

    Returns:
        `[T, H, D]` contiguous, in q's dtype. Rows of no sequence are zeros.

    Raises:
        ValueError: A tensor or `max_seqlen` breaks a demand above.
    """
    _check_qkv(q, k, v)
    offsets = _check_cu_seqlens(q, cu_seqlens, max_seqlen)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts_by_length = defaultdict(list)
    for start, end in zip(offsets, offsets[1:], strict=False):
        if end > start:
            starts_by_length[end - start].append(start)
    for length, starts in starts_by_length.items():
        group = max(1, _MAX_SCORES // (q.shape[1] * length * length))
        for i in range(0, len(starts), group):
            first = torch.tensor(starts[i : i + group], device=q.device)
            rows = first[:, None] + torch.arange(length, device=q.device)
            out[rows] = _dense_attention(q[rows], k[rows], v[rows], scale).to(q.dtype)
    return out


def _dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return fp32 `[B, L, H, D]` for B sequences of L tokens."""
    heads_per_kv = q.shape[2] // k.shape[2]
    q = q.float().transpose(1, 2)  # [B, H, L, D]
    k = k.float().transpose(1, 2).repeat_interleave(heads_per_kv, dim=1)
    v = v.float().transpose(1, 2).repeat_interleave(heads_per_kv, dim=1)
    chunk = max(1, _MAX_SCORES // (q.shape[0] * q.shape[1] * q.shape[2]))
    outs = []
    for part in q.split(chunk, dim=2):
        scores = (part @ k.transpose(2, 3)).mul_(scale)
        outs.append(scores.softmax(dim=-1) @ v)
    return torch.cat(outs, dim=2).transpose(1, 2)


def _check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if any(x.dim() != 3 or x.stride(2) != 1 for x in (q, k, v)):
        found = [(tuple(x.shape), x.stride()) for x in (q, k, v)]
        raise ValueError(f"q, k, v must be [T, H, D] with D-stride 1, got {found}")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(
            "k and v must be [T, H_kv, D] with the T and D of q, got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"{q.shape[1]} query heads are no multiple of {k.shape[1]} kv heads"
        )


def _check_cu_seqlens(
    q: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> list[int]:
    """Return the offsets on the host, without the tail of zeros."""
    if (
        cu_seqlens.dim() != 1
        or cu_seqlens.dtype != torch.int32
        or cu_seqlens.device != q.device
        or cu_seqlens.numel() == 0
    ):
        raise ValueError(
            f"cu_seqlens must be [N + 1] int32 on {q.device}, got "
            f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype} on {cu_seqlens.device}"
        )
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {offsets[0]}")
    while len(offsets) > 1 and offsets[-1] == 0:
        offsets.pop()
    for i, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if end < start:
            raise ValueError(
                f"cu_seqlens must not fall before its tail of zeros, but entry {i + 1} "
                f"is {end} after {start}"
            )
        if end - start > max_seqlen:
            raise ValueError(
                f"sequence {i} has {end - start} tokens, more than "
                f"max_seqlen={max_seqlen}"
            )
    if offsets[-1] > q.shape[0]:
        raise ValueError(
            f"cu_seqlens ends at {offsets[-1]}, but q has {q.shape[0]} rows"
        )
    return offsets

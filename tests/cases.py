# SPDX-License-Identifier: Apache-2.0
"""Batches that every attention kernel is tested on, and how exact it must be."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

# Largest error, as a part of max |v|. An output is a weighted mean of values: half a
# unit for rounding the weights and half for rounding the output make one eps, doubled
# for rounded partial sums. fp32 has no such rounding, only sums of up to a thousand
# terms in the scores and in the mean.
TOLERANCES = {
    torch.float32: 64 * torch.finfo(torch.float32).eps,
    torch.float16: 2 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps,
}


@dataclass(frozen=True)
class Case:
    """One packed batch.

    Attributes:
        name: The test id.
        lengths: Tokens of each sequence.
        repeats: How often the last offset is repeated at the end of cu_seqlens.
        zeros: How many zeros end cu_seqlens, as vLLM pads it for a graph's replay.
        pad_rows: Rows of q, k and v after the last sequence.
    """

    name: str
    lengths: tuple[int, ...]
    repeats: int = 0
    zeros: int = 0
    pad_rows: int = 0

    @property
    def tokens(self) -> int:
        """Rows of q, k and v that belong to a sequence."""
        return sum(self.lengths)

    @property
    def rows(self) -> int:
        """T: all rows of q, k and v."""
        return self.tokens + self.pad_rows

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence, 0 without one."""
        return max(self.lengths, default=0)

    def cu_seqlens(self, device: str = "cpu") -> torch.Tensor:
        """Token prefix sums `[N + 1] int32`, padded as the case says."""
        offsets = [0]
        for length in self.lengths:
            offsets.append(offsets[-1] + length)
        offsets += [offsets[-1]] * self.repeats + [0] * self.zeros
        return torch.tensor(offsets, dtype=torch.int32, device=device)


def window_lengths(height: int, width: int) -> tuple[int, ...]:
    """Tokens of Qwen2.5-VL's 8 x 8 windows over a grid of patches, cut at its edge."""
    return tuple(
        min(8, height - top) * min(8, width - left)
        for top in range(0, height, 8)
        for left in range(0, width, 8)
    )


# Both lists hold each way a batch can be odd once, at sizes that a CPU does in
# milliseconds; heads, head dims and dtypes vary in the tests, not here.
SHORT_CASES = [
    Case("no-sequence", ()),
    Case("one-token", (1,)),
    Case("one-window", (64,)),
    Case("windows-exact", window_lengths(16, 24)),
    Case("windows-ragged-26x38", window_lengths(26, 38)),
    Case("windows-two-images", window_lengths(10, 12) + window_lengths(4, 4)),
    Case("empty-first-middle-last", (0, 17, 0, 0, 33, 0)),
    Case("single-tokens", (1, 1, 5, 1)),
    Case("video-frames-of-100", (100,) * 4),
    Case("zero-tail", (10, 10), zeros=2, pad_rows=12),
    Case("repeated-tail", (10, 30), repeats=3, pad_rows=24),
    Case("all-zeros", (), zeros=4, pad_rows=8),
]
LONG_CASES = [
    Case("one-image-26x38", (988,)),
    Case("one-off-a-block", (129, 255, 257)),
    Case("mixed-images", (256, 988, 4, 64)),
    Case("short-and-long-zero-tail", (16, 300), zeros=5, pad_rows=68),
]
CASES = SHORT_CASES + LONG_CASES

# As the engine runs them; too large for the CPU.
GPU_CASES = [
    Case("1x4096", (4096,)),
    Case("8x1024", (1024,) * 8),
    Case("20x400", (400,) * 20),
    Case("video-16x1024-padded", (1024,) * 16, zeros=16, pad_rows=640),
    Case("mixed-six-images", (8160, 4096, 1024, 256, 4624, 4)),
    Case("windows-64x64", window_lengths(64, 64)),
    Case("windows-84x96", window_lengths(84, 96)),
]


# Triton's interpreter takes seconds for these; each is odd in no way of its own.
LARGE = frozenset({"windows-ragged-26x38", "one-image-26x38", "mixed-images"})


def params(cases: list[Case], extended: Collection[str] = ()) -> list:
    """The cases with their ids, for `pytest.mark.parametrize`.

    Args:
        cases: In any order.
        extended: Names of those that only `make test-all` runs.
    """
    return [
        pytest.param(
            case,
            id=case.name,
            marks=[pytest.mark.extended] * (case.name in extended),
        )
        for case in cases
    ]


def values(fast: Iterable[Any], extended: Iterable[Any]) -> list:
    """Values for `pytest.mark.parametrize`, some of them for `make test-all` only."""
    return [
        *fast,
        *(pytest.param(*_row(x), marks=pytest.mark.extended) for x in extended),
    ]


def _row(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def make_qkv(
    case: Case,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    kv_heads: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    pad_value: float = float("nan"),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q `[T, H, D]`, k and v `[T, H_kv, D]` as views of one `[T, (H + 2 H_kv) D]`
    projection, N(0, 1); padding rows hold NaN, so that a read of one shows."""
    kv_heads = heads if kv_heads is None else kv_heads
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.rows, heads + 2 * kv_heads, head_dim)
    qkv = torch.randn(shape, generator=generator, device=device).to(dtype)
    qkv[case.tokens :] = pad_value
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    return q, k, v


def make_cos_sin(
    case: Case,
    rotary_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[T, rotary_dim / 2]` of random angles."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.rows, rotary_dim // 2)
    angle = torch.rand(shape, generator=generator, device=device) * 6.283
    return angle.cos().to(dtype), angle.sin().to(dtype)


def attention_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case, scale: float
) -> torch.Tensor:
    """The op as a model would write it in q's dtype, one sequence at a time."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // k.shape[1]
    start = 0
    for length in case.lengths:
        rows = slice(start, start + length)
        start += length
        key = k[rows].repeat_interleave(group, dim=1).permute(1, 2, 0)  # [H, D, L]
        value = v[rows].repeat_interleave(group, dim=1).transpose(0, 1)
        scores = q[rows].transpose(0, 1) @ key * scale
        out[rows] = (scores.softmax(dim=-1) @ value).transpose(0, 1)
    return out


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """`|actual - expected| / |expected|` in the 2-norm, 0 for empty tensors."""
    difference = (actual.float() - expected.float()).norm()
    return (difference / expected.float().norm().clamp_min(1e-30)).item()

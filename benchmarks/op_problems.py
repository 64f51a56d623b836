# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of the op run: inputs of each case, and their right outputs."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from correctness import attention_fp32

NUM_HEADS = 16
# Six images: 256 x 256, 560 x 560, 1280 x 720, 1920 x 1080, 1024 x 1024 and 352 x 608
# pixels in patches of 16.
MIXED_LENS = (16 * 16, 36 * 36, 44 * 80, 68 * 120, 64 * 64, 22 * 38)
CASES: dict[str, tuple[int, ...]] = {
    "1x256": (256,),
    "1x1024": (1024,),
    "1x4096": (4096,),
    "1x8160": (8160,),
    "1x15376": (15376,),
    "1x35344": (35344,),
    "8x1024": (1024,) * 8,
    "8x4096": (4096,) * 8,
    "20x400": (400,) * 20,
    "video16x1024": (1024,) * 16,
    "mixed": MIXED_LENS,
    "win64x256": (64,) * 256,
    "win64x1024": (64,) * 1024,
}
SMOKE_CASES = {"1x64": (64,), "3x16": (16,) * 3, "ragged": (1, 40, 7)}


class Room(NamedTuple):
    """What a CUDA graph holds: rows and sequences, of which a batch fills some."""

    rows: int
    sequences: int


# Batches as an engine's graphs hold them: in one for a single image, and in one with
# the room of automatic budgets (`graphs/sizes.py`).
ROOMS: dict[str, tuple[tuple[int, ...], Room]] = {
    "1x988 in 1024": ((988,), Room(1024, 1)),
    "1x988 in 1024 for 144": ((988,), Room(1024, 144)),
    "1x3300 in 4096": ((3300,), Room(4096, 1)),
    "1x3300 in 4096 for 192": ((3300,), Room(4096, 192)),
    "20x400 in 8192 for 256": ((400,) * 20, Room(8192, 256)),
    "52x64 in 4096 for 64": ((64,) * 52, Room(4096, 64)),
}
SMOKE_ROOMS = {"2x16 in 40 for 4": ((16, 16), Room(40, 4))}


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, as a vision attention class has them.

    Attributes:
        lens: Sequence lengths in tokens; T is their sum, or what a graph holds.
        qkv: The projection's output, `[T, 3 * H * D]`.
        cos: Rotary table, `[T, D / 2]`, in the activation dtype.
        sin: See `cos`.
        q: Rotated, `[T, H, D]` contiguous.
        k: As `q`.
        v: View of `qkv`, `[T, H, D]` with row stride 3 * H * D.
        cu_seqlens: `[N + 1] int32` on the device; a graph's end in empty sequences.
        max_seqlen: `[] int32` on the CPU.
    """

    lens: tuple[int, ...]
    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: torch.Tensor

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return self.q.shape[2] ** -0.5

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return q, k and v before rotation, as views of the projection."""
        shape = (self.qkv.shape[0], 3, NUM_HEADS, self.q.shape[2])
        return self.qkv.view(shape).unbind(1)


def make_problem(
    lens: tuple[int, ...],
    head_dim: int,
    dtype: torch.dtype,
    on: torch.device,
    room: Room | None = None,
) -> Problem:
    """Draw the inputs of a case; the same ones in every run.

    Args:
        lens: Sequence lengths in tokens.
        head_dim: D, in elements.
        dtype: Of the activations.
        on: The device.
        room: What a graph holds them in; None where they fill all.
    """
    random = torch.Generator(on).manual_seed(0)
    tokens, sequences = room or Room(sum(lens), len(lens))
    empty = (0,) * (sequences - len(lens))
    width = 3 * NUM_HEADS * head_dim
    qkv = torch.randn(tokens, width, dtype=dtype, device=on, generator=random)
    angle = 100 * torch.rand(tokens, head_dim // 2, device=on, generator=random)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q, k, v = qkv.view(tokens, 3, NUM_HEADS, head_dim).unbind(1)
    return Problem(
        lens=lens,
        qkv=qkv,
        cos=cos,
        sin=sin,
        q=rotate_fp32(q, cos, sin).to(dtype),
        k=rotate_fp32(k, cos, sin).to(dtype),
        v=v,
        cu_seqlens=torch.tensor([0, *lens, *empty]).cumsum(0).to(on, torch.int32),
        max_seqlen=torch.tensor(tokens if room else max(lens), dtype=torch.int32),
    )


def rotate_fp32(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head of `[T, H, D]` against each other, in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1)


def reference(bench: str, problem: Problem) -> torch.Tensor:
    """Return a problem's output in fp32; see `attention_fp32`."""
    q, k, v = problem.q, problem.k, problem.v
    if bench == "qkv_attention":
        q, k, v = problem.parts()
        q = rotate_fp32(q, problem.cos, problem.sin)
        k = rotate_fp32(k, problem.cos, problem.sin)
    return attention_fp32(q, k, v, problem.lens, problem.scale)

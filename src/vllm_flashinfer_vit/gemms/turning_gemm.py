# SPDX-License-Identifier: Apache-2.0
"""The QKV projection that turns q and k as it writes them: one GEMM of QuACK's.

Without it, a pass of its own reads q and k once more, and writes them once more.
`gemms.turning_kernel` is the kernel, for weights of 16 bits and in FP8. It needs QuACK
0.6; see `epilogue_gemm`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_flashinfer_vit.gemms import epilogue_gemm
from vllm_flashinfer_vit.gemms.epilogue_gemm import FP8, Kernel, Layer, Tile, project
from vllm_flashinfer_vit.gemms.quack import is_close
from vllm_flashinfer_vit.kernels._alignment import UNIT
from vllm_flashinfer_vit.kernels.rope_ref import rope_ref

# Columns of a tile are multiples, and no more than in QuACK's own on Hopper.
_TILE_UNIT = 16
_MAX_TILE = 192
# Two neighbours of a table are loaded at once.
_PAIR = 2
# What the epilogue reads.
_TABLES = (torch.float32, torch.float16, torch.bfloat16)


class Heads(NamedTuple):
    """What a projection's columns are.

    Attributes:
        head_dim: D.
        queries: H.
        keys: H_kv.
        is_interleaved: Which columns turn together; see `Batch`.
    """

    head_dim: int
    queries: int
    keys: int
    is_interleaved: bool

    @property
    def turned(self) -> int:
        """How many heads q and k have together; v's follow."""
        return self.queries + self.keys

    def tiles(self, dtype: torch.dtype) -> tuple[Tile, ...]:
        """Return the tiles of the kernel; none if it cannot turn these heads.

        A tile is whole heads, and all of it is turned or nothing. Of 128 columns it may
        have more rows in 16 bits, which is faster where they fill the GPU as well.

        Args:
            dtype: The weight's.
        """
        columns = self.head_dim * heads_of_tile(self.head_dim, self.turned)
        if not columns:
            return ()
        usual = Tile(128, columns, (2, 1))
        has_tall = columns == 128 and dtype != FP8
        return (Tile(192, 128, (1, 2)), usual) if has_tall else (usual,)


def heads_of_tile(head_dim: int, *counts: int) -> int:
    """Return how many heads the widest tile has, 0 if there is none.

    Args:
        head_dim: D.
        *counts: Numbers of heads that tiles divide.
    """
    for heads in range(_MAX_TILE // head_dim, 0, -1):
        is_whole = all(count % heads == 0 for count in counts)
        if is_whole and heads * head_dim % _TILE_UNIT == 0:
            return heads
    return 0


def fits(like: Layer, heads: Heads, table: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether the kernel can run a projection.

    Args:
        like: A layer.
        heads: What its outputs are.
        table: The dtype of cosines and sines.
        dtype: The output's.
    """
    return (
        epilogue_gemm.loads(like.weight, dtype)
        and heads.head_dim % UNIT == 0
        and bool(heads.tiles(like.weight.dtype))
        and table in _TABLES
        and (like.bias is None or like.bias.dtype == dtype)
    )


def reads(table: torch.Tensor) -> bool:
    """Whether the kernel can read cosines or sines, `[T, D / 2]`, where they are."""
    is_paired = table.stride(0) % _PAIR == 0
    address = table.data_ptr() % (_PAIR * table.element_size())
    return table.stride(1) == 1 and is_paired and address == 0


def reads_tables(
    cos: torch.Tensor, sin: torch.Tensor, rows: int, half: int, dtype: torch.dtype
) -> bool:
    """Whether the kernel `reads` both, and they are `[rows, half]` of a dtype."""
    return all(
        x.dtype == dtype and x.shape == (rows, half) and reads(x) for x in (cos, sin)
    )


def trial_tables(
    rows: int, half: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, `[rows, half]`, to try a kernel with."""
    angles = torch.linspace(0, 6, rows * half, device=device).view(-1, half)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def compiled(
    like: Layer, heads: Heads, table: torch.dtype, dtype: torch.dtype, tile: Tile
) -> Kernel:
    """Compile the kernel, or load it from QuACK's folder, for seconds.

    Args:
        like: A layer that `fits`.
        heads: As for `fits`, like `table` and `dtype`.
        table: See `heads`.
        dtype: See `heads`.
        tile: One of the heads'.

    Raises:
        Exception: Of any kind, where QuACK is built otherwise than is known here.
    """
    weight = like.weight
    angles = weight.new_empty(1, heads.head_dim // 2, dtype=table)
    return epilogue_gemm.compiled(
        ("turning_kernel", "TurningGemm"),
        like,
        weight.new_empty(1, len(weight), dtype=dtype),
        {"cos": angles, "sin": angles},
        tile,
        head_dim=heads.head_dim,
        turned=heads.turned * heads.head_dim,
        is_interleaved=heads.is_interleaved,
    )


def prepare(
    kernel: Kernel,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
) -> Callable[[Layer], None]:
    """Settle the projection for layers of the same sizes.

    Args:
        kernel: From `compiled`.
        x: `[T, K]` of the weight's dtype, rows of whole 16 bytes. Calls read what it
            holds by then.
        cos: `[T, D / 2]` of the kernel's dtype, which it `reads`.
        sin: Like cos.
        out: `[T, N]`, contiguous; each call overwrites it. Interleaved pairs stay where
            they are.

    Returns:
        A call that launches it for any layer like the kernel's.
    """
    function, arguments, schedule = kernel

    def launch(layer: Layer) -> None:
        weight, *others = layer
        function(x, weight, out, None, arguments(cos, sin, *others), *schedule)

    return launch


def build(
    like: Layer, heads: Heads, table: torch.dtype, dtype: torch.dtype
) -> str | None:
    """Compile the kernels of all tiles, and compare their results with PyTorch's.

    Call it when weights are loaded, as `quack.build`.

    Args:
        like: A layer that `fits`. What it has for `row_scales` is not read.
        heads: As for `compiled`, like the other arguments.
        table: See `heads`.
        dtype: See `heads`.

    Returns:
        None if all is right, else that its results are wrong.

    Raises:
        Exception: Of any kind, where it cannot be run at all.
    """
    tiles = heads.tiles(like.weight.dtype)
    x = epilogue_gemm.trial_rows(like.weight, max(tiles))
    like = epilogue_gemm.with_row_scales(like, len(x))
    cos, sin = trial_tables(len(x), heads.head_dim // 2, table, x.device)
    right = turned(project(x, like), cos, sin, heads).to(dtype)
    for tile in tiles:
        out = torch.empty_like(right)
        kernel = compiled(like, heads, table, dtype, tile)
        prepare(kernel, x, cos, sin, out)(like)
        if not is_close(out, right):
            return f"its results with tiles of {tile.rows} rows are wrong"
    return None


def turned(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: Heads
) -> torch.Tensor:
    """Return what the kernel writes, in plain PyTorch, from a projection's output.

    Args:
        qkv: `[T, N]`.
        cos: `[T, D / 2]`.
        sin: Like cos.
        heads: What the outputs are.
    """
    by_head = qkv.unflatten(1, (-1, heads.head_dim))
    both, v = by_head.tensor_split([heads.turned], dim=1)
    both = rope_ref(both, both, cos, sin, heads.is_interleaved)[0]
    if heads.is_interleaved:
        # It returns halves.
        both = both.unflatten(2, (2, -1)).transpose(2, 3).flatten(2)
    return torch.cat([both, v], dim=1).flatten(1)


class Kernels:
    """What runs a tower's projections of the same sizes; `build` found nothing wrong.

    Projections that have the same object can use each other's settled calls.
    """

    def __init__(
        self,
        like: Layer,
        heads: Heads,
        table: torch.dtype,
        dtype: torch.dtype,
        min_rows: int,
        multiprocessors: int,
    ) -> None:
        """Load the kernels, which QuACK has kept.

        Args:
            like: A layer, of which nothing is held.
            heads: What its outputs are.
            table: The dtype of cosines and sines.
            dtype: The output's.
            min_rows: From how many rows on it is faster than what else there is.
            multiprocessors: The GPU's.
        """
        self._outputs = len(like.weight)
        self._half, self._table = heads.head_dim // 2, table
        self._min_rows, self._multiprocessors = min_rows, multiprocessors
        self._kernels = {
            tile: compiled(like, heads, table, dtype, tile)
            for tile in heads.tiles(like.weight.dtype)
        }

    def turns(self, rows: int, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether it runs a batch of so many rows, with these cosines and sines."""
        return rows >= self._min_rows and reads_tables(
            cos, sin, rows, self._half, self._table
        )

    def prepare(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor
    ) -> Callable[[Layer], None]:
        """Settle it, see `prepare`, for tables for which it `turns`."""
        sizes = len(x), self._outputs, self._multiprocessors
        kernel = self._kernels[epilogue_gemm.tile_for(tuple(self._kernels), *sizes)]
        return prepare(kernel, x, cos, sin, out)

# SPDX-License-Identifier: Apache-2.0
"""The QKV projection that writes what FP8 attention reads: one GEMM of QuACK's.

Without it, a pass of its own reads q, k and v once more, turns q and k, and writes all
three in e4m3. `gemms.quantizing_kernel` is the kernel, for weights of 16 bits and in
FP8. It needs QuACK 0.6; see `epilogue_gemm`.
"""

from collections.abc import Callable

import torch

from vllm_flashinfer_vit.gemms import epilogue_gemm, turning_gemm
from vllm_flashinfer_vit.gemms.epilogue_gemm import (
    FP8,
    FP8_TOLERANCE,
    Kernel,
    Layer,
    Tile,
)
from vllm_flashinfer_vit.gemms.quack import is_close
from vllm_flashinfer_vit.gemms.turning_gemm import Heads
from vllm_flashinfer_vit.kernels import quantize_ref
from vllm_flashinfer_vit.kernels.flash_fp8_ref import dequantize_ref
from vllm_flashinfer_vit.kernels.formats import BLOCK, QuantizedQKV

# Where cu_seqlens starts is a multiple of so many bytes.
_ALIGNMENT = 16


def tile_of(heads: Heads) -> Tile | None:
    """Return the kernel's tile, a block of whole heads of one kind, or None."""
    count = turning_gemm.heads_of_tile(heads.head_dim, heads.queries, heads.keys)
    if not count:
        return None
    tiles = (heads.queries + 2 * heads.keys) // count
    # Two beside each other share rows, so sequences may end anywhere.
    return Tile(BLOCK, count * heads.head_dim, (1, 1 + (tiles % 2 == 0)))


def empty(heads: Heads, num_blocks: int, device: torch.device | str) -> QuantizedQKV:
    """Return what the kernel writes, for so many blocks; nothing need be in it."""
    rows = num_blocks * BLOCK
    d_qk, d_v = _round_up(heads.head_dim, 32), _round_up(heads.head_dim, 16)
    shapes = (
        ((heads.queries, rows, d_qk), FP8),
        ((heads.keys, rows, d_qk), FP8),
        ((heads.keys, d_v, rows), FP8),
        ((heads.queries, num_blocks), torch.float32),
        ((heads.keys, num_blocks), torch.float32),
        ((heads.keys, num_blocks), torch.float32),
    )
    return QuantizedQKV(
        *(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)
    )


def fits(like: Layer, heads: Heads, table: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether the kernel can run a projection.

    Args:
        like: A layer.
        heads: What its outputs are.
        table: The dtype of cosines and sines.
        dtype: What the layer itself would return.
    """
    outputs = (heads.queries + 2 * heads.keys) * heads.head_dim
    return (
        tile_of(heads) is not None
        and 32 <= heads.head_dim <= 128
        and len(like.weight) == outputs
        and turning_gemm.fits(like, heads, table, dtype)
    )


def compiled(
    like: Layer, heads: Heads, table: torch.dtype, dtype: torch.dtype
) -> Kernel:
    """Compile the kernel, or load it from QuACK's folder, for seconds.

    Args:
        like: A layer that `fits`.
        heads: As for `fits`, like `table` and `dtype`.
        table: See `heads`.
        dtype: See `heads`.

    Raises:
        Exception: Of any kind, where QuACK is built otherwise than is known here.
    """
    tile = tile_of(heads)
    assert tile is not None
    weight = like.weight
    word = weight.new_empty(1, dtype=torch.int32)
    scale = weight.new_empty(1, dtype=torch.float32)
    angles = weight.new_empty(1, heads.head_dim // 2, dtype=table)
    words = dict.fromkeys(("q", "k", "v", "cu_seqlens"), word)
    scales = dict.fromkeys(("q_scale", "k_scale", "v_scale"), scale)
    return epilogue_gemm.compiled(
        ("quantizing_kernel", "QuantizingGemm"),
        like,
        None,
        {**words, **scales, "cos": angles, "sin": angles},
        tile,
        by_sequences=True,
        head_dim=heads.head_dim,
        turned=heads.turned * heads.head_dim,
        is_interleaved=heads.is_interleaved,
        q_heads=heads.queries,
        kv_heads=heads.keys,
    )


def prepare(
    kernel: Kernel,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: QuantizedQKV,
) -> Callable[[Layer], None]:
    """Settle the projection for layers of the same sizes.

    Args:
        kernel: From `compiled`.
        x: `[T, K]` of the weight's dtype, rows of whole 16 bytes. Calls read what it
            holds by then.
        cos: `[T, D / 2]` of the kernel's dtype, which `turning_gemm.reads`.
        sin: Like cos.
        cu_seqlens: `[N + 1]` int32, contiguous, at a multiple of 16 bytes, token prefix
            sums from 0. Where it does not rise is an empty sequence, so it may end in
            zeros. Calls read what it holds by then.
        out: From `empty` for T // 128 + N blocks; each call overwrites the blocks
            of all sequences.

    Returns:
        A call that launches it for any layer like the kernel's.
    """
    function, arguments, schedule = epilogue_gemm.with_sequences(kernel, cu_seqlens)
    written = [part.view(torch.int32).view(-1) for part in out[:3]]
    written += [scale.view(-1) for scale in out[3:]]
    fixed = *written, cu_seqlens, cos, sin

    def launch(layer: Layer) -> None:
        weight, *others = layer
        function(x, weight[None], None, None, arguments(*fixed, *others), *schedule)

    return launch


def build(
    like: Layer, heads: Heads, table: torch.dtype, dtype: torch.dtype
) -> str | None:
    """Compile the kernel, and compare its results with PyTorch's.

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
    tile = tile_of(heads)
    assert tile is not None
    x = epilogue_gemm.trial_rows(like.weight, tile)
    tokens, half, device = len(x), heads.head_dim // 2, x.device
    like = epilogue_gemm.with_row_scales(like, tokens)
    # The last block of a sequence is not full, and an empty one ends at zero.
    ends = torch.tensor([0, tokens // 2, tokens, 0], dtype=torch.int32).to(device)
    cos, sin = turning_gemm.trial_tables(tokens, half, table, device)
    out = empty(heads, tokens // BLOCK + 3, device)
    prepare(compiled(like, heads, table, dtype), x, cos, sin, ends, out)(like)
    right = quantized(epilogue_gemm.project(x, like), cos, sin, ends, heads)
    sizes = ends, tokens, out.q.shape[2]
    both = dequantize_ref(out, *sizes), dequantize_ref(right, *sizes)
    pairs = zip(*both, strict=True)
    is_right = all(is_close(*pair, FP8_TOLERANCE) for pair in pairs)
    return None if is_right else "its results are wrong"


def quantized(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cu_seqlens: torch.Tensor,
    heads: Heads,
) -> QuantizedQKV:
    """Return what the kernel writes, in plain PyTorch, from a projection's output.

    Args:
        qkv: `[T, N]` fp32.
        cos: `[T, D / 2]`.
        sin: Like cos.
        cu_seqlens: As for `prepare`.
        heads: What the outputs are.

    Returns:
        As the kernel, with zeros in the blocks of no sequence.
    """
    dim, sizes = heads.head_dim, (heads.queries, heads.keys, heads.keys)
    q, k, v = qkv.unflatten(1, (-1, dim)).split(sizes, dim=1)
    found = quantize_ref.quantize_blocks_ref(
        q, k, v, cu_seqlens, cos, sin, interleaved=heads.is_interleaved
    )
    # Where it has each of a head's columns.
    places = torch.arange(found.q.shape[2])
    if not heads.is_interleaved:
        places[:dim] = quantize_ref.column_order(dim, dim).argsort()
    order = places[column_order(dim)].to(qkv.device)
    return found._replace(q=found.q[..., order], k=found.k[..., order])


def column_order(head_dim: int) -> torch.Tensor:
    """Return the column int64 of a head that each column of q and k holds.

    A thread has two neighbours in each eight columns. It stores those of 32 together,
    in eight bytes; columns from D on are zeros.
    """
    place = torch.arange(_round_up(head_dim, 32))
    step, lane, group, e = (
        place // 32,
        place // 8 % 4,
        place // 2 % 4,
        place % 2,
    )
    return 32 * step + 8 * group + 2 * lane + e


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


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
        min_mean_rows: int,
    ) -> None:
        """Load the kernel, which QuACK has kept.

        Args:
            like: A layer, of which nothing is held.
            heads: What its outputs are.
            table: The dtype of cosines and sines.
            dtype: What the layer itself would return.
            min_mean_rows: From how many rows to a sequence on, empty ones included, it
                is faster than what else there is.
        """
        self._heads, self._table = heads, table
        self._min_mean_rows = min_mean_rows
        self._kernel = compiled(like, heads, table, dtype)

    def reads(
        self, rows: int, cos: torch.Tensor, sin: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> bool:
        """Whether it runs a batch of so many rows, with these tensors.

        Not with offsets that attention refuses: that names the layer.
        """
        half, sequences = self._heads.head_dim // 2, cu_seqlens.numel() - 1
        return (
            cu_seqlens.dtype == torch.int32
            and cu_seqlens.device == cos.device
            and cu_seqlens.stride() == (1,)
            and cu_seqlens.data_ptr() % _ALIGNMENT == 0
            and 0 < sequences <= rows // self._min_mean_rows
            and turning_gemm.reads_tables(cos, sin, rows, half, self._table)
        )

    def prepare(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cu_seqlens: torch.Tensor,
    ) -> tuple[Callable[[Layer], None], QuantizedQKV]:
        """Settle it, see `prepare`, for a batch that it `reads`.

        Returns:
            The call, and what it writes.
        """
        num_blocks = len(x) // BLOCK + len(cu_seqlens) - 1
        out = empty(self._heads, num_blocks, x.device)
        return prepare(self._kernel, x, cos, sin, cu_seqlens, out), out

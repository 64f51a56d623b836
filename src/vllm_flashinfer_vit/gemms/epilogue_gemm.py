# SPDX-License-Identifier: Apache-2.0
"""GEMMs of QuACK's with this package's epilogues: what they share on the host.

They need QuACK 0.6, which is imported where a tower asks for one, not with this module.
"""

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_flashinfer_vit.gemms import quack
from vllm_flashinfer_vit.kernels._alignment import UNIT

FP8 = torch.float8_e4m3fn
# Neighbours in e4m3 are 1/8 of a value apart at most.
FP8_TOLERANCE = 0.13

_ROOM = "vllm_flashinfer_vit.gemms."
_TILES_TRIED = 3


class Tile(NamedTuple):
    """A tile of a kernel, and how many share what they load.

    Attributes:
        rows: Its rows.
        columns: Its columns.
        cluster: Tiles beside each other in rows, and in columns.
    """

    rows: int
    columns: int
    cluster: tuple[int, int]


class Layer(NamedTuple):
    """A layer's parameters, as settled calls take them.

    Attributes:
        weight: `[N, K]` of 16 bits or e4m3, rows contiguous.
        bias: `[N]` of 16 bits, or None.
        row_scales: fp32, one or `[T]`, of rows in e4m3, else None.
        col_scales: fp32, one or `[N]`, of a weight in e4m3, else None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    row_scales: torch.Tensor | None = None
    col_scales: torch.Tensor | None = None

    @property
    def alike(self) -> tuple[object, ...]:
        """What layers have alike that one kernel serves."""
        return tuple(None if x is None else (x.shape, x.dtype) for x in self)


class Kernel(NamedTuple):
    """A compiled kernel, for any number of rows.

    Attributes:
        function: Launches it on the current stream.
        arguments: Makes what the epilogue reads.
        schedule: How tiles are handed out.
    """

    function: Callable[..., object]
    arguments: Callable[..., Any]
    schedule: tuple[Any, ...]


def is_available() -> bool:
    """Whether QuACK is installed with what the kernels need, on a GPU for it."""
    if not quack.has_quack():
        return False
    try:
        return importlib.util.find_spec("quack.gemm_runtime") is not None
    # That imports QuACK, and a broken install fails in any way.
    except Exception:
        return False


def loads(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels can load a weight, and rows of as many values.

    Args:
        weight: `[N, K]`, of `dtype` or e4m3.
        dtype: Of 16 bits.
    """
    outputs, inputs = weight.shape
    # FP8 is loaded in vectors of as many bytes.
    is_whole = weight.dtype != FP8 or inputs % (2 * UNIT) == 0
    return (
        quack.fits(outputs, inputs, dtype, None)
        and is_whole
        and weight.dtype in (dtype, FP8)
    )


def tile_for(
    tiles: tuple[Tile, ...], rows: int, outputs: int, multiprocessors: int
) -> Tile:
    """Choose the tile with which the GPU's waves take the least time.

    Args:
        tiles: Of which.
        rows: The batch's.
        outputs: The weight's rows.
        multiprocessors: How many tiles make a wave.

    Returns:
        On a tie the first.
    """
    return min(
        tiles, key=lambda tile: quack.work(rows, outputs, tile[:2], multiprocessors)
    )


def compiled(
    gemm: tuple[str, str],
    like: Layer,
    out: torch.Tensor | None,
    read: Mapping[str, torch.Tensor],
    tile: Tile,
    by_sequences: bool = False,
    **attributes: object,
) -> Kernel:
    """Compile a kernel, or load it from QuACK's folder, for seconds.

    Args:
        gemm: A module of this room and a class in it.
        like: A layer.
        out: `[1, N]` like what is written, or None where the epilogue writes.
        read: What else the epilogue reads and writes. Of tensors nothing is asked for
            but dtypes, strides, and what the class makes constants of.
        tile: Its tile.
        by_sequences: Whether tiles begin at sequences: it runs `with_sequences`, and
            its weight is `[1, N, K]`.
        **attributes: The class's own.

    Raises:
        Exception: Of any kind, where QuACK is built otherwise than is known here.
    """
    from quack.cute_dsl_utils import get_device_capacity
    from quack.gemm_runtime.host import build_gemm_epi_plan
    from quack.gemm_tvm_ffi_utils import make_varlen_args

    module, name = gemm
    kernel = getattr(importlib.import_module(_ROOM + module), name)
    weight = like.weight
    plan = build_gemm_epi_plan(
        kernel,
        get_device_capacity(weight.device),
        weight[:1],
        weight[None] if by_sequences else weight,
        out,
        None,
        epi_values={**like._asdict(), **read},
        tile_M=tile.rows,
        tile_N=tile.columns,
        cluster_M=tile.cluster[0],
        cluster_N=tile.cluster[1],
        # Two groups of warps have a tile each, in turns.
        pingpong=True,
        varlen_m=by_sequences,
        post_init_attrs=(*attributes.items(), ("revision", revision(module))),
    )
    schedule = plan.scheduler_static, make_varlen_args(None, None, None), None, None
    return Kernel(plan.compiled_fn, kernel.EpilogueArguments, schedule)


def with_sequences(kernel: Kernel, cu_seqlens: torch.Tensor) -> Kernel:
    """Return a kernel that was compiled `by_sequences` with a batch's.

    Args:
        kernel: From `compiled`.
        cu_seqlens: `[N + 1]` int32, contiguous, at a multiple of 16 bytes.
    """
    from quack.gemm_tvm_ffi_utils import make_varlen_args

    options, _, *others = kernel.schedule
    offsets = make_varlen_args(cu_seqlens, None, None)
    return kernel._replace(schedule=(options, offsets, *others))


def project(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Return a layer's output in fp32, in plain PyTorch: `[T, N]`."""
    sums = x.float() @ layer.weight.float().t()
    if layer.row_scales is not None:
        sums *= layer.row_scales.view(-1, 1)
    if layer.col_scales is not None:
        sums *= layer.col_scales.view(1, -1)
    if layer.bias is not None:
        # Outputs may be padded, their bias not.
        sums[:, : len(layer.bias)] += layer.bias.float()
    return sums


def trial_rows(weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return `[rows, K]` to try a layer's kernel with.

    A multiprocessor gets three tiles and more, so that its groups of warps take turns.
    """
    if not weight.is_cuda:
        return quack.some_rows(weight)
    gpu = torch.cuda.get_device_properties(weight.device)
    across = -(-len(weight) // tile.columns)
    down = -(-_TILES_TRIED * gpu.multi_processor_count // across)
    return quack.some_rows(weight, tile.rows * down + 1)


def with_row_scales(layer: Layer, rows: int) -> Layer:
    """Return a layer with other scales of rows, to try it with.

    They are not one for all, so that rows that were mixed up would show.
    """
    if layer.row_scales is None:
        return layer
    device = layer.weight.device
    return layer._replace(row_scales=torch.linspace(0.5, 2, rows, device=device))


def revision(module: str) -> str:
    """Name a kernel's sources: QuACK's folder may hold another one's results."""
    found = hashlib.sha256()
    # Of what kernels derive from, and make constants of, too.
    rooms = (_ROOM + module, _ROOM + "turning_kernel", _ROOM + "epilogue_kernel")
    for name in (*rooms, "vllm_flashinfer_vit.kernels.formats"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        found.update(Path(spec.origin).read_bytes())
    return found.hexdigest()[:16]

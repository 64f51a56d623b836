# SPDX-License-Identifier: Apache-2.0
"""The QKV projection that turns q and k as it writes them: one GEMM of QuACK's.

Without it, a pass of its own reads q and k once more, and writes them once more.
`kernels.turning_gemm` is the kernel. It needs QuACK 0.6, and is imported where it is
built, not with this module.
"""

import functools
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_flashinfer_vit.blocks import quack
from vllm_flashinfer_vit.kernels._alignment import UNIT
from vllm_flashinfer_vit.kernels.rope_ref import rope_ref

# Columns: QuACK's tiles are multiples, and of its default's width no wider.
_TILE_UNIT = 16
_MAX_TILE = 192
# Two neighbours of a table are loaded at once.
_PAIR = 2


class Heads(NamedTuple):
    """What a projection's columns are.

    Attributes:
        head_dim: D.
        turned: How many heads q and k have together; v's follow.
        is_interleaved: Which columns turn together; see `Batch`.
    """

    head_dim: int
    turned: int
    is_interleaved: bool

    @property
    def tile(self) -> int:
        """Columns of a tile, 0 if none will do: whole heads, all turned or none."""
        for heads in range(_MAX_TILE // self.head_dim, 0, -1):
            columns = heads * self.head_dim
            if columns % _TILE_UNIT == 0 and self.turned % heads == 0:
                return columns
        return 0


class Kernel(NamedTuple):
    """A compiled kernel, for any number of rows.

    Attributes:
        function: Launches it on the current stream.
        arguments: Makes what the epilogue reads of cosines, sines and bias.
        schedule: How tiles are handed out.
    """

    function: Callable[..., object]
    arguments: Callable[..., Any]
    schedule: tuple[Any, ...]


def is_available() -> bool:
    """Whether QuACK is installed with what the kernel needs, on a GPU for it."""
    return (
        quack.has_quack() and importlib.util.find_spec("quack.gemm_runtime") is not None
    )


def fits(
    weight: torch.Tensor, bias: torch.Tensor | None, heads: Heads, table: torch.dtype
) -> bool:
    """Whether the kernel can run a projection.

    Args:
        weight: `[outputs, inputs]`.
        bias: `[outputs]`, or None.
        heads: What the outputs are.
        table: The dtype of cosines and sines.
    """
    return (
        quack.fits(len(weight), weight.shape[1], weight.dtype, None)
        and heads.head_dim % UNIT == 0
        and heads.tile > 0
        and table in (torch.float32, torch.float16, torch.bfloat16)
        and (bias is None or bias.dtype == weight.dtype)
    )


def reads(table: torch.Tensor) -> bool:
    """Whether the kernel can read cosines or sines, `[T, D / 2]`, where they are."""
    is_paired = table.stride(0) % _PAIR == 0
    address = table.data_ptr() % (_PAIR * table.element_size())
    return table.stride(1) == 1 and is_paired and address == 0


def compiled(
    weight: torch.Tensor, bias: torch.Tensor | None, heads: Heads, table: torch.dtype
) -> Kernel:
    """Compile the kernel, or load it from QuACK's folder, for seconds.

    Args:
        weight: A projection's, which `fits`.
        bias: As for `fits`, like the other arguments.
        heads: See `bias`.
        table: See `bias`.

    Raises:
        Exception: Of any kind, where QuACK is built otherwise than is known here.
    """
    from quack.cute_dsl_utils import get_device_capacity
    from quack.gemm_runtime.host import build_gemm_epi_plan
    from quack.gemm_tvm_ffi_utils import make_varlen_args

    from vllm_flashinfer_vit.kernels.turning_gemm import TurningGemm

    # Of tensors it asks for nothing but dtypes and strides.
    x, out = weight[:1], weight.new_empty(1, len(weight))
    angles = weight.new_empty(1, heads.head_dim // 2, dtype=table)
    config = quack.config_of(weight.device, heads.tile)
    plan = build_gemm_epi_plan(
        TurningGemm,
        get_device_capacity(weight.device),
        x,
        weight,
        out,
        None,
        epi_values={"cos": angles, "sin": angles, "bias": bias},
        tile_M=config.tile_m,
        tile_N=config.tile_n,
        cluster_M=config.cluster_m,
        cluster_N=config.cluster_n,
        pingpong=config.pingpong,
        post_init_attrs=(
            ("head_dim", heads.head_dim),
            ("turned", heads.turned * heads.head_dim),
            ("is_interleaved", heads.is_interleaved),
            ("revision", _revision()),
        ),
    )
    schedule = plan.scheduler_static, make_varlen_args(None, None, None), None, None
    return Kernel(plan.compiled_fn, TurningGemm.EpilogueArguments, schedule)


def prepare(
    kernel: Kernel,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
) -> Callable[[quack.Views], None]:
    """Settle the projection for layers of the same sizes.

    Args:
        kernel: From `compiled`.
        x: `[T, inputs]` of the weight's dtype, rows of whole 16 bytes. Calls read what
            it holds by then.
        cos: `[T, D / 2]` of the kernel's dtype, which it `reads`.
        sin: Like cos.
        out: `[T, outputs]`, contiguous; each call overwrites it. Interleaved pairs stay
            where they are.

    Returns:
        A call that launches it for any layer like the kernel's, given as `views`.
    """
    function, arguments, schedule = kernel

    def launch(layer: quack.Views) -> None:
        reads = arguments(cos, sin, layer.bias)
        function(x, layer.weight, out, None, reads, *schedule)

    return launch


def views(weight: torch.Tensor, bias: torch.Tensor | None) -> quack.Views:
    """Return a layer's parameters as the call of `prepare` takes them."""
    return quack.Views(weight, bias)


def build(
    weight: torch.Tensor, bias: torch.Tensor | None, heads: Heads, table: torch.dtype
) -> str | None:
    """Compile the kernel, and compare its results with PyTorch's for a few rows.

    Call it when weights are loaded, as `quack.build`.

    Args:
        weight: As for `compiled`, like the other arguments.
        bias: See `weight`.
        heads: See `weight`.
        table: See `weight`.

    Returns:
        None if all is right, else why the kernel cannot run the projection.
    """
    x = quack.some_rows(weight)
    half = heads.head_dim // 2
    angles = torch.linspace(0, 6, len(x) * half, device=x.device).view(-1, half)
    cos, sin = angles.cos().to(table), angles.sin().to(table)
    out = weight.new_empty(len(x), len(weight))
    try:
        kernel = compiled(weight, bias, heads, table)
        prepare(kernel, x, cos, sin, out)(views(weight, bias))
        right = turned(torch.nn.functional.linear(x, weight, bias), cos, sin, heads)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if quack.is_close(out, right) else "its results are wrong"


def turned(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: Heads
) -> torch.Tensor:
    """Return what the kernel writes, in plain PyTorch, from a projection's output.

    Args:
        qkv: `[T, outputs]`.
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


@functools.cache
def _revision() -> str:
    """Name the kernel's source: QuACK's folder may hold another one's results."""
    spec = importlib.util.find_spec("vllm_flashinfer_vit.kernels.turning_gemm")
    assert spec is not None and spec.origin is not None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]

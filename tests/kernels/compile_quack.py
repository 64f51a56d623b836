# SPDX-License-Identifier: Apache-2.0
"""Compile QuACK's kernels for a Hopper GPU, with none here, and print their number.

A process of its own: QuACK reads its settings when it is imported.
"""

import itertools
import os
import sys
from pathlib import Path

os.environ |= {
    # Where there is a GPU, nothing may be launched on fake tensors.
    "CUDA_VISIBLE_DEVICES": "",
    "QUACK_ARCH": "sm_90",
    "CUTE_DSL_ARCH": "sm_90a",
    "QUACK_CACHE_DIR": sys.argv[1],
    "QUACK_CACHE_ENABLED": "1",
    "QUACK_COMPILE_ONLY_STRICT": "1",
}

import quack.cache
import torch
from _activating_gemm import TOWERS, act_of
from _quack import linear_act
from _quantizing_gemm import TOWERS as PROJECTIONS
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_flashinfer_vit.gemms import (
    activating_gemm,
    epilogue_gemm,
    quantizing_gemm,
    turning_gemm,
)
from vllm_flashinfer_vit.gemms.quack import (
    QUICK_GELU,
    SWIGLU,
    TANH_GELU,
    TILE_WIDTHS,
    _is_05,
)
from vllm_flashinfer_vit.gemms.turning_gemm import Heads

# QuACK 0.5 compiles for fake tensors in a mode of its own only.
MODE = getattr(quack.cache, "compile_only_mode", FakeTensorMode)


def kernels() -> int:
    """Return how many compiled kernels are on disk."""
    return len(list(Path(sys.argv[1]).rglob("*.o")))


def compile_for(
    activation: str | None,
    inputs: int,
    outputs: int,
    has_bias: bool,
    width: int,
    rows: int,
) -> Exception | None:
    """Run a layer on fake tensors, and return why that ended early, if it did."""
    with MODE():
        bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
        x = torch.empty(rows, inputs, **bf16)
        weight = torch.empty(outputs, inputs, **bf16)
        bias = torch.empty(outputs, **bf16) if has_bias else None
        try:
            out = linear_act(x, weight, bias, activation, width)
        except Exception as error:
            # QuACK 0.6 compiles, then asks the driver for a GPU's size.
            return error
    parts = 2 if activation == SWIGLU else 1
    assert (out.shape, out.dtype) == ((rows, outputs // parts), torch.bfloat16)
    return None


def compile_turning(
    heads: Heads,
    inputs: int,
    table: torch.dtype,
    dtype: torch.dtype,
    tile: epilogue_gemm.Tile,
) -> Exception | None:
    """Compile a QKV projection that turns q and k, as `compile_for`."""
    outputs = (heads.queries + 2 * heads.keys) * heads.head_dim
    with MODE():
        weight = torch.empty(outputs, inputs, dtype=dtype, device="cuda")
        bias = torch.empty(outputs, dtype=torch.bfloat16, device="cuda")
        scales = (None, None)
        if dtype != torch.bfloat16:
            scales = (torch.empty(1, device="cuda"), torch.empty(1, device="cuda"))
        layer = epilogue_gemm.Layer(weight, bias, *scales)
        try:
            turning_gemm.compiled(layer, heads, table, torch.bfloat16, tile)
        except Exception as error:
            return error
    return None


def compile_quantizing(
    heads: Heads,
    inputs: int,
    table: torch.dtype,
    dtype: torch.dtype,
    has_bias: bool,
) -> Exception | None:
    """Compile a QKV projection that writes e4m3, as `compile_for`."""
    outputs = (heads.queries + 2 * heads.keys) * heads.head_dim
    with MODE():
        weight = torch.empty(outputs, inputs, dtype=dtype, device="cuda")
        bias = torch.empty(outputs, dtype=torch.bfloat16, device="cuda")
        scales = (None, None)
        if dtype != torch.bfloat16:
            scales = (torch.empty(1, device="cuda"), torch.empty(1, device="cuda"))
        layer = epilogue_gemm.Layer(weight, bias if has_bias else None, *scales)
        try:
            quantizing_gemm.compiled(layer, heads, table, torch.bfloat16)
        except Exception as error:
            return error
    return None


def compile_activating(
    tower: tuple[str, int, int, int, int], dtype: torch.dtype, has_no_bias: bool
) -> Exception | None:
    """Compile a first layer with its activation, as `compile_for`."""
    _, inputs, outputs, padded, _ = tower
    with MODE():
        weight = torch.empty(padded, inputs, dtype=epilogue_gemm.FP8, device="cuda")
        bias = torch.empty(outputs, dtype=torch.bfloat16, device="cuda")
        scales = torch.empty(1, device="cuda"), torch.empty(1, device="cuda")
        layer = epilogue_gemm.Layer(weight, None if has_no_bias else bias, *scales)
        try:
            activating_gemm.compiled(layer, act_of(tower, dtype))
        except Exception as error:
            return error
    return None


def main() -> None:
    done = 0
    layers = (
        (QUICK_GELU, 1280, 5120, True),
        (SWIGLU, 1280, 6912, True),
        (SWIGLU, 1280, 6912, False),
        (TANH_GELU, 1152, 4304, True),
        (None, 1280, 3840, True),
    )
    for layer, width in itertools.product(layers, TILE_WIDTHS):
        # What is built for a few rows serves all others.
        for rows in (16, 1024, 5001):
            error = compile_for(*layer, width, rows)
            if kernels() != done + 1:
                raise SystemExit(f"{layer[0]}, {width}, {rows} rows: {error!r}")
        done += 1
    projections = (
        (Heads(80, 16, 16, False), 1280),
        (Heads(72, 16, 16, False), 1152),
        (Heads(72, 12, 12, True), 1536),
        (Heads(64, 12, 12, False), 768),
        (Heads(128, 12, 12, False), 1536),
    )
    # QuACK 0.5 has no place for the rotation.
    tables = (torch.float32, torch.bfloat16)
    dtypes = (torch.bfloat16, torch.float8_e4m3fn)
    for one, table, dtype in itertools.product(
        () if _is_05() else projections, tables, dtypes
    ):
        heads, inputs = one
        for tile in heads.tiles(dtype):
            error = compile_turning(heads, inputs, table, dtype, tile)
            if kernels() != done + 1:
                raise SystemExit(f"{heads}, {table}, {dtype}, {tile}: {error!r}")
            done += 1
    # Tables in 16 bits, or no bias, with one of the weights.
    for one, (dtype, table, has_bias) in itertools.product(
        () if _is_05() else PROJECTIONS,
        (
            (torch.bfloat16, torch.float32, True),
            (torch.bfloat16, torch.bfloat16, False),
            (torch.float8_e4m3fn, torch.float32, True),
        ),
    ):
        error = compile_quantizing(*one, table, dtype, has_bias)
        if kernels() != done + 1:
            raise SystemExit(f"{one}, {table}, {dtype}: {error!r}")
        done += 1
    seen = set()
    for tower, dtype, has_no_bias in itertools.product(
        () if _is_05() else TOWERS, (epilogue_gemm.FP8, torch.bfloat16), (False, True)
    ):
        act = act_of(tower, dtype)
        # Of the sizes only that of a gate is constant.
        one = act.activation, act.is_gated and act.width, dtype, has_no_bias
        if one in seen or not (act.quantizes or act.is_gated):
            continue
        seen.add(one)
        error = compile_activating(tower, dtype, has_no_bias)
        if kernels() != done + 1:
            raise SystemExit(f"{tower}, {dtype}: {error!r}")
        done += 1
    print(done)


if __name__ == "__main__":
    main()

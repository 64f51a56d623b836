# SPDX-License-Identifier: Apache-2.0
"""QuACK's GEMM with bias and activation or none, as the vision towers call it."""

import dataclasses
import functools
import importlib
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from cases import relative_error

if importlib.util.find_spec("quack") is None:
    pytest.skip("QuACK is not installed", allow_module_level=True)

from _quack import ACTIVATIONS, SIZES, exact, hopper, linear_act, make_inputs

from vllm_flashinfer_vit.gemms import quack as ours
from vllm_flashinfer_vit.gemms.quack import (
    QUICK_GELU,
    SWIGLU,
    TANH_GELU,
    TILE_WIDTHS,
    fits,
    prepare,
    tile_width,
    views,
)

pytestmark = pytest.mark.usefixtures("nan_empty")

DTYPES = [torch.bfloat16, torch.float16]
# The same on two and four ranks, and Qwen3-VL's small tower.
OTHER_SIZES = [
    (QUICK_GELU, 1280, 2560),
    (QUICK_GELU, 1280, 1280),
    (SWIGLU, 1280, 3456),
    (SWIGLU, 1280, 1792),
    (TANH_GELU, 1152, 2152),
    (TANH_GELU, 1024, 4096),
    (None, 1280, 1920),
    (None, 1280, 960),
    (None, 1152, 3456),
    (None, 1152, 864),
    (None, 1024, 3072),
]


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """`linear_act` with the tile that a layer takes."""
    gpu = torch.cuda.get_device_properties(x.device)
    width = tile_width(len(x), len(weight), gpu.multi_processor_count)
    return linear_act(x, weight, bias, activation, width)


def run_prepared(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    width: int,
) -> torch.Tensor:
    """`linear_act` by a call that was prepared with another layer's parameters."""
    out = x.new_empty(len(x), len(weight) // (2 if activation == SWIGLU else 1))
    other = torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
    prepare(x, *other, out, activation, width)(views(weight, bias, activation))
    return out


def assert_as_exact_as_cublas(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    act: Callable[..., torch.Tensor] = run,
) -> None:
    out = act(x, weight, bias, activation)
    expected = exact(x, weight, bias, activation)
    assert (out.dtype, out.shape) == (x.dtype, expected.shape)
    assert out.is_contiguous()
    unfused = ACTIVATIONS[activation](linear(x, weight, bias).float()).to(x.dtype)
    assert relative_error(out, expected) <= 1.05 * relative_error(unfused, expected)


@pytest.mark.extended
def test_quack_compiles_for_hopper(tmp_path):
    """QuACK changes between releases; no GPU is needed to see whether it compiles."""
    script = Path(__file__).with_name("compile_quack.py")
    env = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == ("10" if ours._is_05() else "76")


@pytest.mark.parametrize(
    ("rows", "outputs", "width"),
    [
        (1024, 5120, 160),
        (8192, 3456, 192),
        (8192, 1280, 160),
        # 40 waves of five tiles, and 48 of six.
        (128 * 132 * 8, 960, 192),
    ],
)
def test_tile_width(rows, outputs, width):
    assert tile_width(rows, outputs, 132) == width


@pytest.mark.parametrize("multiprocessors", [78, 114, 132])
def test_no_other_tile_takes_less(multiprocessors):
    def columns(rows: int, outputs: int, width: int) -> int:
        tiles = math.ceil(rows / 128) * math.ceil(outputs / width)
        return math.ceil(tiles / multiprocessors) * width

    for rows in (1024, 1025, 2048, 4096, 8000, 65536):
        for outputs in (*range(8, 4000, 104), 5120, 6912):
            width = tile_width(rows, outputs, multiprocessors)
            work = {w: columns(rows, outputs, w) for w in (192, 160)}
            assert work[width] == min(work.values())
            assert width == 192 or work[160] < work[192]


@pytest.mark.parametrize("activation", SIZES)
@pytest.mark.parametrize("release", ["0.5", "0.6"])
def test_quack_gets_the_tile(activation, release, monkeypatch):
    """QuACK 0.6 finds what it launched before by the configuration's identity."""
    configs: list[Any] = []

    def gemm(*args: Any, config: Any, **kwargs: Any) -> None:
        configs.append(config)

    @dataclasses.dataclass(frozen=True)
    class Config:
        tile_n: int = 192
        pingpong: bool = False

    default = Config(pingpong=True)
    quack = SimpleNamespace(default_config=lambda device: default)
    if release == "0.5":
        quack.gemm_act_tuned = quack.gemm_gated_tuned = SimpleNamespace(fn=gemm)
    else:
        quack.gemm_act = gemm
    monkeypatch.setattr(ours, "_gemm_interface", lambda: quack)
    config = functools.cache(ours._config.__wrapped__)
    monkeypatch.setattr(ours, "_config", config)
    x, weight = torch.zeros(16, 64), torch.zeros(32, 64)
    for width in (*TILE_WIDTHS, *TILE_WIDTHS):
        linear_act(x, weight, None, activation, width)
    assert [config.tile_n for config in configs] == 2 * [192, 160]
    assert all(dataclasses.replace(c, tile_n=192) == default for c in configs)
    assert configs[0] is configs[2] and configs[1] is configs[3]


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype", "activation", "expected"),
    [
        (4304, 1152, torch.bfloat16, TANH_GELU, True),
        (4304, 1152, torch.float16, None, True),
        (4304, 1152, torch.float32, TANH_GELU, False),
        (4300, 1152, torch.bfloat16, TANH_GELU, False),
        (4304, 1148, torch.bfloat16, TANH_GELU, False),
        (6912, 1280, torch.bfloat16, SWIGLU, True),
        (6840, 1280, torch.bfloat16, SWIGLU, False),
    ],
)
def test_which_layers_fit(outputs, inputs, dtype, activation, expected):
    assert fits(outputs, inputs, dtype, activation) is expected


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("act", [linear_act, run_prepared])
@pytest.mark.parametrize(
    ("rows", "width"), [(1024, 160), (4096, 192), (4097, 160), (5000, 192)]
)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", SIZES)
def test_linear_act_is_as_exact_as_cublas(
    activation, dtype, has_bias, rows, width, act
):
    sizes = SIZES[activation]
    inputs = make_inputs(rows, *sizes, dtype=dtype, has_bias=has_bias)
    act = functools.partial(act, width=width)
    assert_as_exact_as_cublas(*inputs, activation, act)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "inputs", "outputs"), OTHER_SIZES)
def test_linear_act_of_other_sizes(activation, inputs, outputs):
    assert_as_exact_as_cublas(*make_inputs(4100, inputs, outputs), activation)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", SIZES)
def test_linear_act_of_large_values(activation):
    x, weight, bias = make_inputs(4096, *SIZES[activation])
    # Exponentials that overflow or vanish must leave neither NaN nor infinity.
    assert_as_exact_as_cublas(300 * x, weight, bias, activation)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", SIZES)
def test_linear_act_of_a_strided_view(activation):
    inputs, outputs = SIZES[activation]
    wide, _, _ = make_inputs(4097, inputs + 72, 8)
    _, weight, bias = make_inputs(1, inputs, outputs)
    view = wide[:, 8 : 8 + inputs]
    assert not view.is_contiguous()
    out = run(view, weight, bias, activation)
    assert torch.equal(out, run(view.contiguous(), weight, bias, activation))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", SIZES)
def test_linear_act_gives_the_same_bits_twice(activation):
    inputs = make_inputs(5000, *SIZES[activation])
    first = run(*inputs, activation)
    assert torch.equal(run(*inputs, activation), first)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", SIZES)
def test_linear_act_in_a_graph(activation):
    inputs = make_inputs(1024, *SIZES[activation])
    x, weight, bias = inputs
    for width in TILE_WIDTHS:
        # As at load: compiles outside the capture, whose own rows have not run yet.
        linear_act(x[:16], weight, bias, activation, width)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*inputs, activation)
    new = make_inputs(1024, *SIZES[activation], seed=1)
    for held, values in zip(inputs, new, strict=True):
        held.copy_(values)
    for _ in range(2):
        graph.replay()
        assert torch.equal(out, run(*new, activation))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", SIZES)
def test_linear_act_keeps_rows_apart(activation):
    x, weight, bias = make_inputs(4097, *SIZES[activation])
    before = run(x, weight, bias, activation)
    x[1000] = float("nan")
    after = run(x, weight, bias, activation)
    assert after[1000].isnan().all()
    assert torch.equal(after[:1000], before[:1000])
    assert torch.equal(after[1001:], before[1001:])


@hopper
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("activation", SIZES)
def test_linear_act_of_more_than_int32_elements(activation):
    inputs, outputs = SIZES[activation]
    width = outputs // 2 if activation == SWIGLU else outputs
    rows = 2**31 // width + 64
    x, weight, bias = make_inputs(rows, inputs, outputs)
    out = run(x, weight, bias, activation)
    assert out.numel() > 2**31
    for some in (slice(0, 64), slice(-64, None)):
        expected = exact(x[some], weight, bias, activation)
        assert relative_error(out[some], expected) < 4e-3

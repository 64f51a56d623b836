# SPDX-License-Identifier: Apache-2.0
"""QuACK's GEMM with bias and activation or none, as the vision towers call it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import gelu, linear, silu

from cases import relative_error

if importlib.util.find_spec("quack") is None:
    pytest.skip("QuACK is not installed", allow_module_level=True)

from vllm_flashinfer_vit.quack_linear import (
    QUICK_GELU,
    SWIGLU,
    TANH_GELU,
    can_read,
    linear_act,
)

pytestmark = pytest.mark.usefixtures("nan_empty")

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
DTYPES = [torch.bfloat16, torch.float16]
# Inputs and outputs of the models' layers: the MLPs of Qwen2-VL, Qwen2.5-VL (padded)
# and Qwen3-VL, and the QKV projection of the first two.
SIZES = {
    QUICK_GELU: (1280, 5120),
    SWIGLU: (1280, 6912),
    TANH_GELU: (1152, 4304),
    None: (1280, 3840),
}
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
ACTIVATIONS = {
    QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    SWIGLU: lambda x: silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    TANH_GELU: lambda x: gelu(x, approximate="tanh"),
    None: lambda x: x,
}


def make_inputs(
    rows: int,
    inputs: int,
    outputs: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    has_bias: bool = True,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x as a norm returns it, a weight and a bias; sums are about N(0, 1)."""
    random = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device="cuda")

    x = normal(rows, inputs).to(dtype)
    weight = (normal(outputs, inputs) / inputs**0.5).to(dtype)
    bias = normal(outputs).to(dtype) if has_bias else None
    return x, weight, bias


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    bias = None if bias is None else bias.float()
    return ACTIVATIONS[activation](linear(x.float(), weight.float(), bias))


def assert_as_exact_as_cublas(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> None:
    out = linear_act(x, weight, bias, activation)
    expected = exact(x, weight, bias, activation)
    assert (out.dtype, out.shape) == (x.dtype, expected.shape)
    assert out.is_contiguous()
    unfused = ACTIVATIONS[activation](linear(x, weight, bias).float()).to(x.dtype)
    assert relative_error(out, expected) <= 1.05 * relative_error(unfused, expected)


def test_quack_compiles_for_hopper(tmp_path):
    """QuACK changes between releases; no GPU is needed to see whether it compiles."""
    script = Path(__file__).with_name("compile_quack.py")
    env = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "5"


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4096, 4097, 5000])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", SIZES)
def test_quack_linear(activation, dtype, has_bias, rows):
    sizes = SIZES[activation]
    inputs = make_inputs(rows, *sizes, dtype=dtype, has_bias=has_bias)
    assert_as_exact_as_cublas(*inputs, activation)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "inputs", "outputs"), OTHER_SIZES)
def test_quack_linear_of_other_sizes(activation, inputs, outputs):
    assert_as_exact_as_cublas(*make_inputs(4100, inputs, outputs), activation)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", SIZES)
def test_quack_linear_of_large_values(activation):
    x, weight, bias = make_inputs(4096, *SIZES[activation])
    # Exponentials that overflow or vanish must leave neither NaN nor infinity.
    assert_as_exact_as_cublas(300 * x, weight, bias, activation)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", SIZES)
def test_quack_linear_of_a_strided_view(activation):
    inputs, outputs = SIZES[activation]
    wide, _, _ = make_inputs(4097, inputs + 72, 8)
    _, weight, bias = make_inputs(1, inputs, outputs)
    view = wide[:, 8 : 8 + inputs]
    assert can_read(view) and not view.is_contiguous()
    out = linear_act(view, weight, bias, activation)
    assert torch.equal(out, linear_act(view.contiguous(), weight, bias, activation))
    assert not can_read(wide[:, 4 : 4 + inputs])
    assert not can_read(wide[:, ::2])
    assert not can_read(wide.cpu())
    assert not can_read(make_inputs(4, inputs + 4, 8)[0][:, :inputs])


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", SIZES)
def test_quack_linear_gives_the_same_bits_twice(activation):
    inputs = make_inputs(5000, *SIZES[activation])
    first = linear_act(*inputs, activation)
    assert torch.equal(linear_act(*inputs, activation), first)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", SIZES)
def test_quack_linear_in_a_graph(activation):
    inputs = make_inputs(5000, *SIZES[activation])
    linear_act(*inputs, activation)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear_act(*inputs, activation)
    new = make_inputs(5000, *SIZES[activation], seed=1)
    for held, values in zip(inputs, new, strict=True):
        held.copy_(values)
    for _ in range(2):
        graph.replay()
        assert torch.equal(out, linear_act(*new, activation))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", SIZES)
def test_quack_linear_keeps_rows_apart(activation):
    x, weight, bias = make_inputs(4097, *SIZES[activation])
    before = linear_act(x, weight, bias, activation)
    x[1000] = float("nan")
    after = linear_act(x, weight, bias, activation)
    assert after[1000].isnan().all()
    assert torch.equal(after[:1000], before[:1000])
    assert torch.equal(after[1001:], before[1001:])


@hopper
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("activation", SIZES)
def test_quack_linear_of_more_than_int32_elements(activation):
    inputs, outputs = SIZES[activation]
    width = outputs // 2 if activation == SWIGLU else outputs
    rows = 2**31 // width + 64
    x, weight, bias = make_inputs(rows, inputs, outputs)
    out = linear_act(x, weight, bias, activation)
    assert out.numel() > 2**31
    for some in (slice(0, 64), slice(-64, None)):
        expected = exact(x[some], weight, bias, activation)
        assert relative_error(out[some], expected) < 4e-3

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
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import gelu, linear, silu

from cases import relative_error

if importlib.util.find_spec("quack") is None:
    pytest.skip("QuACK is not installed", allow_module_level=True)

from vllm_flashinfer_vit.blocks import quack as ours
from vllm_flashinfer_vit.blocks.quack import (
    QUICK_GELU,
    SWIGLU,
    TANH_GELU,
    TILE_WIDTHS,
    Views,
    build,
    can_read,
    fits,
    linear_act,
    prepare,
    tile_width,
    views,
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
    assert done.stdout.splitlines()[-1] == "10"


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
def test_fits(outputs, inputs, dtype, activation, expected):
    assert fits(outputs, inputs, dtype, activation) is expected


class Compiled:
    """What QuACK compiles: notes the arguments of each launch."""

    def __init__(self) -> None:
        self.launches: list[list[Any]] = []

    def __call__(self, *arguments: Any) -> None:
        # A tensor's values are those at the launch.
        self.launches.append(
            [
                (a.data_ptr(), a.shape, a.stride(), a.tolist())
                if isinstance(a, torch.Tensor)
                else (type(a), repr(a))
                for argument in arguments
                for a in (argument if isinstance(argument, tuple) else [argument])
            ]
        )


@pytest.fixture(scope="module")
def function() -> Compiled:
    """One for all tests: QuACK keeps what it compiled."""
    return Compiled()


@pytest.fixture
def compiled(function, monkeypatch) -> Compiled:
    """The installed QuACK on the CPU, in all but the function that it compiles."""
    monkeypatch.setenv("QUACK_ARCH", "sm_90")
    function.launches.clear()
    if ours._is_05():
        module = importlib.import_module("quack.gemm_act")
        name = "_compile_gemm_act"
    else:
        module = importlib.import_module("quack.gemm_runtime.host")
        name = "_compile_gemm_epi"
    monkeypatch.setattr(module, name, lambda *args, **kwargs: function)
    monkeypatch.setattr(module, "get_max_active_clusters", lambda size: 66)
    return function


def make_layers(
    activation: str | None, has_bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor | None]]]:
    """x, out and three layers' parameters, on the CPU."""
    x = torch.randn(24, 64).bfloat16()
    out = torch.zeros(24, 16 if activation == SWIGLU else 32).bfloat16()
    layers = [
        (
            torch.randn(32, 64).bfloat16(),
            torch.randn(32).bfloat16() if has_bias else None,
        )
        for _ in range(3)
    ]
    return x, out, layers


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("activation", SIZES)
def test_a_prepared_call_launches_what_quack_would(compiled, activation, has_bias):
    x, out, layers = make_layers(activation, has_bias)
    call = prepare(x, *layers[0], out, activation, 160)
    assert not compiled.launches
    for weight, bias in layers:
        x += 1
        layer = views(weight, bias, activation)
        # QuACK's interface copies nothing but what `views` does.
        ours._run(x, weight, layer.bias, out, activation, 160)
        call(layer)
        plain, prepared = compiled.launches[-2:]
        assert plain == prepared
    # None of them went through QuACK's interface.
    assert call.__name__.startswith("replay")


@pytest.mark.parametrize("activation", SIZES)
def test_views_of_a_bias(compiled, activation):
    weight, bias = torch.zeros(4, 8), torch.arange(4.0)
    expected = [0, 2, 1, 3] if activation == SWIGLU else [0, 1, 2, 3]
    assert views(weight, bias, activation).bias.tolist() == [expected]
    assert views(weight, None, activation).bias is None


def test_preparing_leaves_quack_as_it_was(compiled, monkeypatch):
    if ours._is_05():
        module, name = importlib.import_module("quack.gemm_act"), "_compile_gemm_act"
    else:
        module = importlib.import_module("quack.gemm_runtime.host")
        name = "launch_gemm"
    original = getattr(module, name)
    x, out, layers = make_layers(TANH_GELU)
    prepare(x, *layers[0], out, TANH_GELU, 192)
    assert getattr(module, name) is original

    def fail(*args: Any) -> None:
        raise RuntimeError("stop")

    monkeypatch.setattr(ours, "_run", fail)
    with pytest.raises(RuntimeError, match="stop"):
        prepare(x, *layers[0], out, TANH_GELU, 192)
    assert getattr(module, name) is original


class Epilogue(NamedTuple):
    """As QuACK's."""

    out: torch.Tensor
    bias: torch.Tensor | None


def test_replay_puts_in_the_layer_only():
    x, out, layers = make_layers(None)
    first, second = (Views(weight, bias[None]) for weight, bias in layers[:2])
    launches = []
    arguments = (x, first.weight, None, Epilogue(out, first.bias), (1, 2))
    recorded = ours._Recorded(lambda *args: launches.append(args), arguments)
    call = ours._replay(recorded, x, first, out)
    call(second)
    ((x_taken, weight, none, epilogue, rest),) = launches
    assert x_taken is x and weight is second.weight and none is None
    assert isinstance(epilogue, Epilogue) and epilogue.out is out
    assert epilogue.bias is second.bias
    assert rest == (1, 2)


def test_what_is_not_known_is_not_replayed():
    x, out, layers = make_layers(None)
    weight, bias = layers[0]
    first, none = Views(weight, bias[None]), Views(weight, None)
    good = (x, weight, Epilogue(out, first.bias))
    for known, arguments, layer in (
        (True, good, first),
        (True, (x, weight, (out,)), none),
        (False, (x.clone(), *good[1:]), first),
        (False, (x, weight.clone(), good[2]), first),
        (False, (x, weight, weight, good[2]), first),
        (False, (x, weight.t(), good[2]), first),
        (False, (x, weight, Epilogue(out.clone(), first.bias)), first),
        (False, (x, weight, Epilogue(out, first.bias.clone())), first),
        (False, (x, weight, Epilogue(out, bias)), first),
        (False, (x, weight, out), none),
    ):
        recorded = ours._Recorded(lambda *args: None, arguments)
        assert (ours._replay(recorded, x, layer, out) is not None) is known


@pytest.mark.parametrize("activation", SIZES)
def test_without_a_record_the_call_is_quacks_own(compiled, activation, monkeypatch):
    monkeypatch.setattr(ours, "_record", lambda run: None)
    x, out, layers = make_layers(activation)
    call = prepare(x, *layers[0], out, activation, 192)
    for weight, bias in layers:
        layer = views(weight, bias, activation)
        call(layer)
        ours._run(x, weight, layer.bias, out, activation, 192)
        assert compiled.launches[-1] == compiled.launches[-2]
    assert len(compiled.launches) == 6


def test_another_release_is_not_recorded(compiled, monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda path: SimpleNamespace())
    assert ours._record(lambda: pytest.fail("launched")) is None


def test_build_says_why(monkeypatch):
    weight = torch.zeros(32, 64, dtype=torch.bfloat16)
    assert "64 values on cpu" in build(weight, None, None, torch.zeros_like)

    def prepare(x, weight, bias, out, activation, width):
        if weight.isnan().any():
            raise ValueError("no kernel")
        return lambda layer: out.fill_(width)

    monkeypatch.setattr(ours, "can_read", lambda x: True)
    monkeypatch.setattr(ours, "prepare", prepare)
    monkeypatch.setattr(ours, "views", lambda *args: None)

    def returns(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.full((len(x), 32), value)

    assert "160 columns are wrong" in build(weight, None, None, returns(192))
    weight.fill_(math.nan)
    assert build(weight, None, None, returns(192)) == "ValueError: no kernel"
    monkeypatch.setattr(ours, "TILE_WIDTHS", (192,))
    assert build(torch.zeros_like(weight), None, None, returns(192)) is None


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("activation", SIZES)
def test_build(activation, has_bias):
    _, weight, bias = make_inputs(1, *SIZES[activation], has_bias=has_bias)

    def right(x: torch.Tensor) -> torch.Tensor:
        return exact(x, weight, bias, activation).to(x.dtype)

    assert build(weight, bias, activation, right) is None
    reason = build(weight, bias, activation, lambda x: 2 * right(x))
    assert "are wrong" in reason


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 1024, 4097])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("activation", SIZES)
def test_a_prepared_call_has_the_bits_of_linear_act(activation, has_bias, rows):
    """One call for two layers, on what x holds by then."""
    sizes = SIZES[activation]
    layers = [
        make_inputs(rows, *sizes, has_bias=has_bias, seed=seed) for seed in range(2)
    ]
    for width in TILE_WIDTHS:
        x = torch.zeros_like(layers[0][0])
        expected = [linear_act(*layer, activation, width) for layer in layers]
        out = torch.empty_like(expected[0])
        call = prepare(x, *layers[0][1:], out, activation, width)
        assert call.__name__.startswith("replay")
        held = [views(*layer[1:], activation) for layer in layers]
        for i in (0, 1, 0):
            x.copy_(layers[i][0])
            call(held[i])
            assert torch.equal(out, expected[i])


@hopper
@pytest.mark.gpu
def test_a_prepared_call_of_padded_buffers():
    """Rows of a longer buffer, and an x with columns beside it."""
    inputs, outputs = SIZES[TANH_GELU]
    wide, weight, bias = make_inputs(2000, inputs, outputs)
    x, out = wide[:1500], wide.new_zeros(2000, outputs)
    prepare(x, weight, bias, out[:1500], TANH_GELU, 192)(views(weight, bias, TANH_GELU))
    assert torch.equal(out[:1500], linear_act(x, weight, bias, TANH_GELU, 192))
    assert (out[1500:] == 0).all()


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", SIZES)
def test_a_prepared_call_is_launched_on_the_current_stream(activation):
    inputs = make_inputs(1024, *SIZES[activation])
    x, weight, bias = inputs
    expected = linear_act(*inputs, activation, 192)
    out = torch.zeros_like(expected)
    call = prepare(*inputs, out, activation, 192)
    layer = views(weight, bias, activation)
    call(layer)
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    # A launch on another stream would not be captured.
    with torch.cuda.graph(graph):
        call(layer)
    assert (out == 0).all()
    graph.replay()
    assert torch.equal(out, expected)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("act", [linear_act, run_prepared])
@pytest.mark.parametrize(
    ("rows", "width"), [(1024, 160), (4096, 192), (4097, 160), (5000, 192)]
)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", SIZES)
def test_linear_act(activation, dtype, has_bias, rows, width, act):
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
    assert can_read(view) and not view.is_contiguous()
    out = run(view, weight, bias, activation)
    assert torch.equal(out, run(view.contiguous(), weight, bias, activation))
    assert not can_read(wide[:, 4 : 4 + inputs])
    assert not can_read(wide[:, ::2])
    assert not can_read(wide.cpu())
    assert not can_read(make_inputs(4, inputs + 4, 8)[0][:, :inputs])


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

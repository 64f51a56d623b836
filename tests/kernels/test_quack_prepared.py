# SPDX-License-Identifier: Apache-2.0
"""Calls of QuACK that are prepared once, and what a layer is built with."""

import importlib
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

if importlib.util.find_spec("quack") is None:
    pytest.skip("QuACK is not installed", allow_module_level=True)

from _quack import SIZES, exact, hopper, linear_act, make_inputs

from vllm_flashinfer_vit.gemms import quack as ours
from vllm_flashinfer_vit.gemms.quack import (
    SWIGLU,
    TANH_GELU,
    TILE_WIDTHS,
    Views,
    build,
    prepare,
    views,
)
from vllm_flashinfer_vit.kernels import _launch

pytestmark = pytest.mark.usefixtures("nan_empty")


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
def test_without_a_record_the_call_is_quacks_own(
    compiled, activation, monkeypatch, caplog
):
    _launch.say_unknown.cache_clear()
    caplog.set_level("INFO", "vllm.plugins.flashinfer_vit")
    monkeypatch.setattr(ours, "_record", lambda run: None)
    x, out, layers = make_layers(activation)
    call = prepare(x, *layers[0], out, activation, 192)
    for weight, bias in layers:
        layer = views(weight, bias, activation)
        call(layer)
        ours._run(x, weight, layer.bias, out, activation, 192)
        assert compiled.launches[-1] == compiled.launches[-2]
    assert len(compiled.launches) == 6
    (record,) = caplog.records
    assert "QuACK" in record.getMessage()


def test_another_release_is_not_recorded(compiled, monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda path: SimpleNamespace())
    assert ours._record(lambda: pytest.fail("launched")) is None


def test_build_says_why(monkeypatch):
    weight = torch.zeros(32, 64, dtype=torch.bfloat16)

    monkeypatch.setattr(
        ours, "prepare", lambda *args: lambda layer: args[3].fill_(args[5])
    )
    monkeypatch.setattr(ours, "views", lambda *args: None)

    def returns(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.full((len(x), 32), value)

    assert "160 columns are wrong" in build(weight, None, None, returns(192))
    monkeypatch.setattr(ours, "TILE_WIDTHS", (192,))
    assert build(weight, None, None, returns(192)) is None


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("activation", SIZES)
def test_a_build_whose_results_are_wrong_is_refused(activation, has_bias):
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

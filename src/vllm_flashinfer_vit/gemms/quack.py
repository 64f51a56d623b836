# SPDX-License-Identifier: Apache-2.0
"""QuACK's GEMM for a linear layer, its bias and any activation after it.

QuACK's kernel applies both to the fp32 sums before it writes them: what the layer
returns is neither read nor written once more, and is rounded once, not twice. QuACK
(quack-kernels) comes with vLLM; it is imported where its kernel is built, not with this
module.

Its interface takes the host five times as long as the compiled function that it calls
in the end. `prepare` records that call for one layer, and replays it for all layers of
the same sizes.
"""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from vllm_flashinfer_vit.kernels._alignment import UNIT
from vllm_flashinfer_vit.kernels._launch import say_unknown

# QuACK's default on Hopper, and one whose last wave is fuller for some sizes.
TILE_WIDTHS = (192, 160)
_TILE_ROWS = 128

SWIGLU = "swiglu"
TANH_GELU = "gelu_tanh_approx"
# QuACK finds kernels on disk by this name, so it says what is computed.
QUICK_GELU = "vllm_flashinfer_vit.swiglu_oai(x, 0.0)"

# Gate and up are stacked in the weight; QuACK's own layout has them in turns.
_STACKED = ("B",)
# One kernel serves all numbers of rows.
_BUILD_ROWS = 16
# Two roundings to bf16 are off by less.
_TOLERANCE = 0.02


class Views(NamedTuple):
    """A layer's parameters as the compiled function takes them, see `views`.

    Attributes:
        weight: A view of the layer's weight.
        bias: `[1, outputs]`, or None without one. A copy for `SWIGLU`.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None


class _Recorded(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def has_quack() -> bool:
    """Whether QuACK is installed, and the GPU is of the kind it was measured on."""
    from vllm.platforms import current_platform

    return (
        current_platform.is_cuda()
        and current_platform.is_device_capability(90)
        and importlib.util.find_spec("quack") is not None
    )


def fits(outputs: int, inputs: int, dtype: torch.dtype, activation: str | None) -> bool:
    """Whether the kernel can run a layer: 16 bits, rows of whole vectors.

    Args:
        outputs: The weight's rows, padding included.
        inputs: The weight's columns, likewise.
        dtype: The weight's.
        activation: As for `prepare`.
    """
    width = outputs // 2 if activation == SWIGLU else outputs
    return (
        dtype in (torch.float16, torch.bfloat16)
        and width % UNIT == 0
        and inputs % UNIT == 0
    )


def tile_width(rows: int, outputs: int, multiprocessors: int) -> int:
    """Choose the width of tiles with which the GPU's waves take the least time.

    Args:
        rows: The batch's.
        outputs: The weight's rows.
        multiprocessors: How many tiles make a wave.

    Returns:
        One of `TILE_WIDTHS`, on a tie the first.
    """

    return min(
        TILE_WIDTHS,
        key=lambda width: work(rows, outputs, (_TILE_ROWS, width), multiprocessors),
    )


def work(rows: int, outputs: int, tile: tuple[int, int], multiprocessors: int) -> int:
    """Return how many values a multiprocessor computes: a tile in each of the waves.

    Args:
        rows: As for `tile_width`, like the other arguments.
        outputs: See `rows`.
        tile: Rows and columns of a tile.
        multiprocessors: See `rows`.
    """
    tiles = -(-rows // tile[0]) * -(-outputs // tile[1])
    return -(-tiles // multiprocessors) * tile[0] * tile[1]


def views(
    weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> Views:
    """Return a layer's parameters as the call of `prepare` takes them.

    Make them again when a bias has new values: `SWIGLU` copies it.

    Args:
        weight: As for `prepare`.
        bias: As for `prepare`.
        activation: As for `prepare`.
    """
    if _is_05():
        view = weight.unsqueeze(0).permute(1, 2, 0)
    else:
        # It transposes by itself where nothing is stacked.
        view = weight if activation == SWIGLU else weight.t()
    return Views(view, _row(bias, activation))


def prepare(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str | None,
    width: int,
) -> Callable[[Views], None]:
    """Settle QuACK's GEMM on a Hopper GPU for layers of the same sizes.

    Args:
        x: `[T, inputs]` fp16 or bf16, rows of whole 16 bytes. Calls read what it holds
            by then.
        weight: One layer's, `[outputs, inputs]` of the same dtype, contiguous, of sizes
            that `fits`.
        bias: That layer's, `[outputs]` of the same dtype, or None.
        out: `[T, outputs]`, for `SWIGLU` `[T, outputs / 2]`, contiguous; each call
            overwrites it.
        activation: `SWIGLU`, `TANH_GELU`, `QUICK_GELU`, or None for none. `SWIGLU` is
            of stacked [gate; up].
        width: Columns of a tile, one of `TILE_WIDTHS`.

    Returns:
        A call that launches the GEMM for any layer with a weight and bias like these,
        given as `views`. It has the bits of QuACK's interface.
    """
    first = views(weight, bias, activation)

    def run(layer: Views) -> None:
        plain = layer.weight.as_strided(weight.shape, weight.stride())
        _run(x, plain, layer.bias, out, activation, width)

    recorded = _record(functools.partial(run, first))
    replay = recorded and _replay(recorded, x, first, out)
    if replay is None:
        say_unknown("QuACK")
        return run
    return replay


def build(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    expected: Callable[[torch.Tensor], torch.Tensor],
) -> str | None:
    """Compile or load the kernels of all widths of tiles, and check what they return.

    Call it when weights are loaded: neither a request nor the capture of a CUDA graph
    should compile.

    Args:
        weight: As for `prepare`.
        bias: As for `prepare`.
        activation: As for `prepare`.
        expected: Returns what a call should write, about, from `[rows, inputs]`.

    Returns:
        None if all is right, else that its results are wrong.

    Raises:
        Exception: Of any kind, where it cannot be run at all.
    """
    x = some_rows(weight)
    layer = views(weight, bias, activation)
    right = expected(x)
    for width in TILE_WIDTHS:
        out = torch.empty_like(right, memory_format=torch.contiguous_format)
        prepare(x, weight, bias, out, activation, width)(layer)
        # vLLM takes any release of QuACK from 0.3.3 on.
        if not is_close(out, right):
            return f"its results with tiles of {width} columns are wrong"
    return None


def some_rows(weight: torch.Tensor, rows: int = _BUILD_ROWS) -> torch.Tensor:
    """Return `[rows, inputs]` to try a layer's kernel with, whatever its rows."""
    inputs = weight.shape[1]
    x = torch.linspace(-1, 1, rows * inputs, device=weight.device)
    return x.to(weight.dtype).view(rows, inputs)


def is_close(
    out: torch.Tensor, right: torch.Tensor, rounding: float = _TOLERANCE
) -> bool:
    """Whether a kernel's results are right but for roundings.

    Args:
        out: The results.
        right: What they should be, of the same dtype.
        rounding: By how much of a value they may be off.
    """
    # Sums that cancel are off by more.
    atol = _TOLERANCE * right.abs().max().item()
    return torch.allclose(out, right, rtol=rounding, atol=atol)


def _row(bias: torch.Tensor | None, activation: str | None) -> torch.Tensor | None:
    """Return `[outputs]` as `[1, outputs]`, for `SWIGLU` gate and up in turns."""
    if bias is None:
        return None
    if activation == SWIGLU:
        # As QuACK would itself, anew in each call.
        bias = bias.view(2, -1).t().flatten()
    return bias.unsqueeze(0)


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str | None,
    width: int,
) -> None:
    """Call QuACK's interface, with a bias that `_row` returned."""
    is_gated = activation == SWIGLU
    layout = {"concat_layout": _STACKED} if is_gated else {}
    quack, config = _gemm_interface(), _config(x.device, width)
    if _is_05():
        # It calls it through PyTorch's dispatcher, for half of the host's time.
        kernel = quack.gemm_gated_tuned if is_gated else quack.gemm_act_tuned
        kernel.fn(
            x, weight.t(), None, out, None, bias, activation, config=config, **layout
        )
    else:
        quack.gemm_act(
            x,
            weight.t(),
            bias=bias,
            activation=activation,
            postact_out=out,
            store_preact=False,
            # Without one it would tune, for minutes.
            config=config,
            **layout,
        )


def _record(run: Callable[[], None]) -> _Recorded | None:
    """Return the compiled function that `run` would call, and its arguments.

    QuACK compiles or loads the function, but nothing is launched. None if QuACK is not
    built as it is known here.
    """
    calls: list[_Recorded] = []

    def recorder(function: Callable[..., Any]) -> Callable[..., None]:
        return lambda *arguments: calls.append(_Recorded(function, arguments))

    if _is_05():
        module_name, name = "quack.gemm_act", "_compile_gemm_act"
    else:
        module_name, name = "quack.gemm_runtime.host", "launch_gemm"
    try:
        module = importlib.import_module(module_name)
        original = getattr(module, name)
    except (ImportError, AttributeError):
        return None

    def compile_05(*args: Any, **kwargs: Any) -> Callable[..., None]:
        return recorder(original(*args, **kwargs))

    def launch(plan: Any, *args: Any, **kwargs: Any) -> None:
        noting = plan._replace(compiled_fn=recorder(plan.compiled_fn))
        original(noting, *args, **kwargs)

    setattr(module, name, compile_05 if _is_05() else launch)
    try:
        run()
    finally:
        setattr(module, name, original)
    return calls[0] if len(calls) == 1 else None


def _replay(
    recorded: _Recorded, x: torch.Tensor, first: Views, out: torch.Tensor
) -> Callable[[Views], None] | None:
    """Return a call with another layer's parameters in the places of the first's.

    None if the arguments are not as they are known: the weight beside x, the bias in a
    tuple with the output.
    """
    function, arguments = recorded.function, list(recorded.arguments)
    weights = _places(arguments, first.weight)
    epilogues = [
        place
        for place, argument in enumerate(arguments)
        if isinstance(argument, tuple) and _places(argument, out)
    ]
    if len(weights) != 1 or len(epilogues) != 1 or not _places(arguments, x):
        return None
    (weight_at,), (epilogue_at,) = weights, epilogues
    taken = arguments[weight_at]
    if (taken.shape, taken.stride()) != (first.weight.shape, first.weight.stride()):
        return None
    if first.bias is None:

        def replay(layer: Views) -> None:
            arguments[weight_at] = layer.weight
            function(*arguments)

        return replay

    epilogue = arguments[epilogue_at]
    fields, make = list(epilogue), getattr(epilogue, "_make", tuple)
    biases = _places(fields, first.bias)
    if len(biases) != 1 or fields[biases[0]].shape != first.bias.shape:
        return None
    (bias_at,) = biases

    def replay_with_bias(layer: Views) -> None:
        fields[bias_at] = layer.bias
        arguments[weight_at] = layer.weight
        arguments[epilogue_at] = make(fields)
        function(*arguments)

    return replay_with_bias


def _places(values: Sequence[Any], tensor: torch.Tensor) -> list[int]:
    """Return where values are tensors of the same memory."""
    address = tensor.data_ptr()
    return [
        place
        for place, value in enumerate(values)
        if isinstance(value, torch.Tensor) and value.data_ptr() == address
    ]


def _is_05() -> bool:
    """Whether QuACK is of the releases before 0.6, which have another interface."""
    return hasattr(_gemm_interface(), "gemm_act_tuned")


@functools.cache
def _gemm_interface() -> Any:
    """Import QuACK, and teach it QuickGELU."""
    from quack import gemm_interface
    from quack.activation import act_fn_map, swiglu_oai

    def quick_gelu(x: Any) -> Any:
        # x * sigmoid(1.702 x) * (0 + 1)
        return swiglu_oai(x, 0.0)

    act_fn_map[QUICK_GELU] = quick_gelu
    return gemm_interface


@functools.cache
def _config(device: torch.device, width: int) -> Any:
    """Return QuACK's default for a device with tiles of another width.

    It is kept since QuACK 0.6 finds what it launched before by the object's id.
    """
    default = _gemm_interface().default_config(device)
    return dataclasses.replace(default, tile_n=width)

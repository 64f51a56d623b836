# SPDX-License-Identifier: Apache-2.0
"""An unquantized linear layer, its bias and any activation after it, by one GEMM.

QuACK's kernel applies both to the fp32 sums before it writes them: what the layer
returns is neither read nor written once more, and is rounded once, not twice. A layer
with no activation runs by it where it is faster than cuBLAS. Small batches run as
before. QuACK (quack-kernels) comes with vLLM; it is imported where its kernel is
built, not with this module.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_flashinfer_vit.blocks.aligned_linear import AlignedLinearMethod
from vllm_flashinfer_vit.blocks.gelu_linear import GeluLinearMethod
from vllm_flashinfer_vit.kernels._alignment import UNIT, is_aligned

logger = init_logger("vllm.plugins.flashinfer_vit")

# A call takes the host up to twice as long as cuBLAS and an activation: with fewer rows
# an eager tower would wait for it.
MIN_ROWS = 4096
# A CUDA graph's replay does not wait for the host; with 256 rows the GPU is slower too.
MIN_GRAPH_ROWS = 1024
# Without an activation there is less to save: with 1024 rows cuBLAS is faster.
MIN_PLAIN_GRAPH_ROWS = 2048

# QuACK's default on Hopper, and one whose last wave is fuller for some sizes.
TILE_WIDTHS = (192, 160)
_TILE_ROWS = 128

SWIGLU = "swiglu"
TANH_GELU = "gelu_tanh_approx"
# QuACK finds kernels on disk by this name, so it says what is computed.
QUICK_GELU = "vllm_flashinfer_vit.swiglu_oai(x, 0.0)"

# Gate and up are stacked; QuACK's own layout has them in turns.
_STACKED = ("B", "bias")
# One kernel serves all numbers of rows.
_BUILD_ROWS = 16
# Two roundings to bf16 are off by less.
_TOLERANCE = 0.02


class QuackLinearMethod(UnquantizedLinearMethod):
    """Returns `act(x @ weight.T + bias)`: small batches by the method it replaces."""

    def __init__(
        self,
        inner: UnquantizedLinearMethod,
        act: Callable[[torch.Tensor], torch.Tensor],
        activation: str | None,
    ) -> None:
        """Wrap a layer's method.

        Args:
            inner: The method that the layer had.
            act: What runs after `inner` for the same result.
            activation: QuACK's name of what `inner` and `act` apply to the layer's sum;
                `SWIGLU` is of stacked [gate; up], None is of no activation.
        """
        super().__init__()
        self.inner = inner
        self.act = act
        self.activation = activation
        # From how many rows on QuACK runs the layer, in eager mode and in CUDA graphs.
        self.min_rows = MIN_ROWS
        self.min_graph_rows = MIN_GRAPH_ROWS if activation else MIN_PLAIN_GRAPH_ROWS
        # None until the weights are loaded.
        self.is_built: bool | None = None
        # The GPU's, once the kernels are built.
        self.multiprocessors = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do what the replaced method does, then build the kernels, once.

        There is one for each width of tiles. They are compiled or loaded here since
        neither a request nor the capture of a CUDA graph should do so. Unless all are
        right, every batch runs as small ones do.
        """
        self.inner.process_weights_after_loading(layer)
        if self.is_built is None:
            self.is_built = self._build(layer)

    def _build(self, layer: Any) -> bool:
        inputs = layer.weight.shape[1]
        x = torch.linspace(-1, 1, _BUILD_ROWS * inputs, device=layer.weight.device)
        x = x.to(layer.weight.dtype).view(_BUILD_ROWS, inputs)
        if not can_read(x):
            return False
        try:
            gpu = torch.cuda.get_device_properties(x.device)
            self.multiprocessors = gpu.multi_processor_count
            expected = self.act(self.inner.apply(layer, x, layer.bias))
            atol = _TOLERANCE * expected.abs().max().item()
            for width in TILE_WIDTHS:
                out = linear_act(x, layer.weight, layer.bias, self.activation, width)
                # vLLM takes any release of QuACK from 0.3.3 on.
                if not torch.allclose(out, expected, rtol=_TOLERANCE, atol=atol):
                    raise RuntimeError("its results differ from small batches'")
        except Exception as error:
            logger.warning_once(
                "QuACK cannot run a layer of the vision tower, so batches of every "
                "size run as small ones do: building %s failed with %s: %s",
                self.activation or "a plain GEMM",
                type(error).__name__,
                # Text is told apart from what was said before, an exception is not.
                str(error),
            )
            return False
        return True

    def apply(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply the layer, and its activation if it has one, to `[..., inputs]`."""
        # A compiler fuses activations by itself.
        if not torch.compiler.is_compiling() and self.is_built:
            rows = x.reshape(-1, x.shape[-1])
            if self._takes(rows):
                width = tile_width(len(rows), len(layer.weight), self.multiprocessors)
                out = linear_act(rows, layer.weight, bias, self.activation, width)
                return out.view(*x.shape[:-1], -1)
        return self.act(self.inner.apply(layer, x, bias))

    def _takes(self, x: torch.Tensor) -> bool:
        rows = x.shape[0]
        if rows >= self.min_rows:
            return can_read(x)
        # In this order: without CUDA the last one raises.
        return (
            rows >= self.min_graph_rows
            and can_read(x)
            and torch.cuda.is_current_stream_capturing()
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

    def columns(width: int) -> int:
        tiles = -(-rows // _TILE_ROWS) * -(-outputs // width)
        return -(-tiles // multiprocessors) * width

    return min(TILE_WIDTHS, key=columns)


def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    width: int,
) -> torch.Tensor:
    """Run QuACK's GEMM on a Hopper GPU.

    Args:
        x: `[T, inputs]` fp16 or bf16, as `can_read` wants it.
        weight: `[outputs, inputs]` of the same dtype, contiguous; both sizes multiples
            of 8, and for `SWIGLU` outputs of 16.
        bias: `[outputs]` of the same dtype, or None.
        activation: `SWIGLU`, `TANH_GELU`, `QUICK_GELU`, or None for none.
        width: Columns of a tile, one of `TILE_WIDTHS`.

    Returns:
        `[T, outputs]`, for `SWIGLU` `[T, outputs / 2]`, contiguous.
    """
    is_gated = activation == SWIGLU
    out = x.new_empty(x.shape[0], weight.shape[0] // (2 if is_gated else 1))
    layout = {"concat_layout": _STACKED} if is_gated else {}
    quack, config = _gemm_interface(), _config(x.device, width)
    if hasattr(quack, "gemm_act_tuned"):
        # QuACK 0.5 calls it through PyTorch's dispatcher, for half of the host's time.
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
    return out


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


def can_read(x: torch.Tensor) -> bool:
    """Whether the kernel can load `[T, inputs]`: on a GPU, 16 bytes at a time."""
    return x.is_cuda and x.stride(1) == 1 and is_aligned(x)


def fits(layer: Any, activation: str | None) -> bool:
    """Whether the kernel can run a layer just built: 16 bits, rows of whole vectors."""
    padded = aligned_method(layer)
    weight = layer.weight
    outputs, inputs = padded.padded_shape(weight) if padded else weight.shape
    width = outputs // 2 if activation == SWIGLU else outputs
    return (
        weight.dtype in (torch.float16, torch.bfloat16)
        and width % UNIT == 0
        and inputs % UNIT == 0
    )


def aligned_method(layer: torch.nn.Module) -> AlignedLinearMethod | None:
    """Return the method that pads a layer's parameters, if one does."""
    method = getattr(layer, "quant_method", None)
    while isinstance(method, QuackLinearMethod | GeluLinearMethod):
        method = method.inner
    return method if isinstance(method, AlignedLinearMethod) else None

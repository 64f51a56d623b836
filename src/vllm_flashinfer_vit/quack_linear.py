# SPDX-License-Identifier: Apache-2.0
"""An unquantized linear layer, its bias and any activation behind it, by one GEMM.

QuACK's kernel applies both to the fp32 sums before it writes them: what the layer
returns is neither read nor written once more, and is rounded once, not twice. A layer
with no activation runs by it where it is faster than cuBLAS. Small batches run as
before. QuACK (quack-kernels) comes with vLLM; it is imported where its kernel is
built, not with this module.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_flashinfer_vit.aligned_linear import AlignedLinearMethod
from vllm_flashinfer_vit.gelu_linear import GeluLinearMethod
from vllm_flashinfer_vit.kernels._alignment import UNIT, is_aligned

logger = init_logger("vllm.plugins.flashinfer_vit")

# A call takes the host up to twice as long as cuBLAS and an activation: with fewer rows
# an eager tower would wait for it, and with 256 the GPU is slower too.
MIN_ROWS = 4096

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
            act: What runs behind `inner` for the same result.
            activation: QuACK's name of what `inner` and `act` apply to the layer's sum;
                `SWIGLU` is of stacked [gate; up], None is of no activation.
        """
        super().__init__()
        self.inner = inner
        self.act = act
        self.activation = activation
        # None until the weights are loaded.
        self.is_built: bool | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do what the replaced method does, then build the kernel, once.

        It is compiled or loaded here since neither a request nor the capture of a CUDA
        graph should do so. Without it every batch runs as small ones do.
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
            out = linear_act(x, layer.weight, layer.bias, self.activation)
            # vLLM takes any release of QuACK from 0.3.3 on.
            expected = self.act(self.inner.apply(layer, x, layer.bias))
            atol = _TOLERANCE * expected.abs().max().item()
            if not torch.allclose(out, expected, rtol=_TOLERANCE, atol=atol):
                raise RuntimeError("its results differ from small batches'")
        except Exception as error:
            logger.warning_once(
                "QuACK cannot run a layer of the vision tower, so batches of every "
                "size run as small ones do: building %s failed with %s: %s",
                self.activation or "a plain GEMM",
                type(error).__name__,
                error,
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
            if rows.shape[0] >= MIN_ROWS and can_read(rows):
                out = linear_act(rows, layer.weight, bias, self.activation)
                return out.view(*x.shape[:-1], -1)
        return self.act(self.inner.apply(layer, x, bias))


def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """Run QuACK's GEMM on a Hopper GPU.

    Args:
        x: `[T, inputs]` fp16 or bf16, as `can_read` wants it.
        weight: `[outputs, inputs]` of the same dtype, contiguous; both sizes multiples
            of 8, and for `SWIGLU` outputs of 16.
        bias: `[outputs]` of the same dtype, or None.
        activation: `SWIGLU`, `TANH_GELU`, `QUICK_GELU`, or None for none.

    Returns:
        `[T, outputs]`, for `SWIGLU` `[T, outputs / 2]`, contiguous.
    """
    is_gated = activation == SWIGLU
    out = x.new_empty(x.shape[0], weight.shape[0] // (2 if is_gated else 1))
    layout = {"concat_layout": _STACKED} if is_gated else {}
    quack = _gemm_interface()
    if hasattr(quack, "gemm_act_tuned"):
        # QuACK 0.5 calls it through PyTorch's dispatcher, for half of the host's time.
        kernel = quack.gemm_gated_tuned if is_gated else quack.gemm_act_tuned
        kernel.fn(x, weight.t(), None, out, None, bias, activation, **layout)
    else:
        quack.gemm_act(
            x,
            weight.t(),
            bias=bias,
            activation=activation,
            postact_out=out,
            store_preact=False,
            # The default tile is what was measured; tuning would take minutes.
            tuned=False,
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

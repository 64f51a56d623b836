# SPDX-License-Identifier: Apache-2.0
"""The linear layers of a block, each as the cheapest launch that it can be.

A step is settled once in a pass, for all layers of its place, and then called with a
layer. Layers read weight and bias where vLLM has them: it may load them anew, or move
them, while an engine runs.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from vllm.model_executor.layers.linear import (
    LinearBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from vllm_flashinfer_vit.blocks.aligned_linear import AlignedLinearMethod
from vllm_flashinfer_vit.gemms import cublaslt, quack


class Step(Protocol):
    """A layer's GEMM, its bias and maybe an activation, by one launch."""

    def prepare(self, x: torch.Tensor, out: torch.Tensor) -> Callable[[Any], object]:
        """Settle it for buffers: `x` `[T, inputs]` is read, `out` `[T, ...]` written.

        The call takes the `layer` of any step that is like this one.
        """

    @property
    def layer(self) -> Any:
        """Weight and bias, where they are now, as the settled call takes them."""


class Parameters(Protocol):
    """A layer's parameters, as what runs the layer takes them."""

    @property
    def places(self) -> list[tuple[dict[str, Any], str]]:
        """Where the layer has them."""

    def renew(self) -> None:
        """Take them as they are now."""


class Weights:
    """A linear layer's weight and bias, and what GEMMs make of where they lie.

    Attributes:
        weight: `[outputs, inputs]`.
        bias: `[outputs]`, or None.
        made: What was made of their addresses.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        """Take a layer with a `weight` and maybe a `bias`."""
        # Not by the attributes, which torch.nn.Module looks up in three dictionaries.
        self._parameters = layer._parameters
        self.renew()

    @property
    def places(self) -> list[tuple[dict[str, Any], str]]:
        """Where the layer has its parameters."""
        names = ("weight", "bias")
        found = self._parameters
        return [(found, name) for name in names if found.get(name) is not None]

    def renew(self) -> None:
        """Take the parameters as they are now; what was made of others is gone."""
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        assert weight is not None
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.made: dict[object, Any] = {}


_P = TypeVar("_P", bound=Parameters)


class BlockWeights:
    """The weights of the layers of a block that are run here."""

    def __init__(self) -> None:
        """Begin without layers."""
        self._layers: list[Parameters] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._addresses: list[int] = []

    def add(self, weights: _P) -> _P:
        """Take a layer's parameters."""
        self._layers.append(weights)
        self._places += weights.places
        self._addresses = self._now()
        return weights

    def refresh(self) -> None:
        """Renew the weights if any lie elsewhere now."""
        if (addresses := self._now()) != self._addresses:
            self._addresses = addresses
            for weights in self._layers:
                weights.renew()

    def _now(self) -> list[int]:
        # vLLM's parameters take every call through Python: 2 us each.
        with torch._C.DisableTorchFunctionSubclass():
            return [found[name].data_ptr() for found, name in self._places]


class OwnLinear:
    """A linear layer as vLLM runs it: quantised, with adapters, or over ranks."""

    def __init__(self, block: torch.nn.Module, path: str) -> None:
        """Name a layer by its path; adapters may take its place later."""
        self._block, self._path = block, path

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for `[T, inputs]`, contiguous."""
        result = self._block.get_submodule(self._path)(x)
        output, bias = result if isinstance(result, tuple) else (result, None)
        if bias is not None:
            # That the model would add itself.
            output = output + bias
        return output.contiguous()


class Gemm:
    """A layer and its bias by PyTorch's call of cuBLAS; with `gelu` of cuBLASLt.

    cuBLASLt applies bias and tanh GELU to the fp32 sums before it writes them: they are
    neither read nor written once more, and rounded once less.
    """

    def __init__(self, weights: Weights, gelu: bool = False) -> None:
        """Take a layer's parameters; a GELU needs a bias."""
        self._weights, self._gelu = weights, gelu

    @property
    def layer(self) -> Weights:
        """See `Step`."""
        return self._weights

    def prepare(
        self, x: torch.Tensor, out: torch.Tensor
    ) -> Callable[[Weights], object]:
        """See `Step`."""

        def launch(layer: Weights) -> None:
            transposed, bias = layer.weight.t(), layer.bias
            if bias is None:
                torch.mm(x, transposed, out=out)
            elif self._gelu:
                torch._addmm_activation(bias, x, transposed, use_gelu=True, out=out)
            else:
                torch.addmm(bias, x, transposed, out=out)

        return launch


class LtGemm:
    """The same by cuBLASLt, settled beforehand."""

    def __init__(
        self, weights: Weights, problems: cublaslt.Problems, gelu: bool = False
    ) -> None:
        """Take a layer that `cublaslt.fits`, and where its tower keeps algorithms."""
        self._weights, self._problems, self._gelu = weights, problems, gelu

    @property
    def layer(self) -> cublaslt.Layer:
        """See `Step`."""
        made = self._weights.made
        if (found := made.get("lt")) is None:
            weight, bias = self._weights.weight, self._weights.bias
            found = made["lt"] = cublaslt.Layer(weight, bias, self._gelu)
        return found

    def prepare(
        self, x: torch.Tensor, out: torch.Tensor
    ) -> Callable[[cublaslt.Layer], object]:
        """See `Step`."""
        return self._problems.prepare(x, self.layer, out)


class QuackGemm:
    """A layer, its bias and maybe an activation by QuACK, for `min_rows` and more."""

    def __init__(
        self, weights: Weights, activation: str | None, min_rows: int, processors: int
    ) -> None:
        """Take a layer whose kernels are built; see `quack.build`.

        Args:
            weights: The layer's parameters.
            activation: As for `quack.prepare`.
            min_rows: From how many rows on it is faster than what else there is.
            processors: The GPU's multiprocessors.
        """
        self.min_rows = min_rows
        self._weights = weights
        self._activation = activation
        self._processors = processors

    @property
    def layer(self) -> quack.Views:
        """See `Step`."""
        weights = self._weights
        made = weights.made
        if (found := made.get("quack")) is None:
            found = quack.views(weights.weight, weights.bias, self._activation)
            # SwiGLU's has a copy of the bias, which may be loaded anew in place.
            if self._activation != quack.SWIGLU or weights.bias is None:
                made["quack"] = found
        return found

    def prepare(
        self, x: torch.Tensor, out: torch.Tensor
    ) -> Callable[[quack.Views], object]:
        """See `Step`."""
        weights = self._weights
        width = quack.tile_width(len(x), len(weights.weight), self._processors)
        return quack.prepare(
            x, weights.weight, weights.bias, out, self._activation, width
        )


def gemm(weights: Weights, problems: cublaslt.Problems, gelu: bool = False) -> Step:
    """Return the cheapest step that cuBLAS has for a layer."""
    if cublaslt.is_available() and cublaslt.fits(weights.weight, weights.bias):
        return LtGemm(weights, problems, gelu)
    return Gemm(weights, gelu)


def is_unquantized(layer: Any) -> bool:
    """Whether a layer has weights as they are in a checkpoint, or padded with zeros."""
    method = type(getattr(layer, "quant_method", None))
    return method in (UnquantizedLinearMethod, AlignedLinearMethod)


def is_plain(layer: Any) -> bool:
    """Whether a layer is no more than a GEMM and its bias, whoever adds that."""
    # An adapter around a layer has the layer's attributes, too.
    if not (isinstance(layer, LinearBase) and is_unquantized(layer)):
        return False
    # Over ranks it sums its outputs, and one rank adds the bias.
    is_summed = isinstance(layer, RowParallelLinear) and layer.tp_size > 1
    is_gathered = getattr(layer, "gather_output", False) and layer.tp_size > 1
    return not (is_summed or is_gathered)


def run(
    settled: dict[object, Any],
    name: str,
    step: Step | OwnLinear,
    x: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Return a layer's output: `out`, unless the layer is vLLM's own."""
    if isinstance(step, OwnLinear):
        return step(x.flatten(1))
    found = settled.get(name)
    # Attention may return a tensor of its own each time, and blocks may differ in what
    # is padded.
    if found is None or found[0] is not x or found[1] is not out:
        flat = x.flatten(1)
        found = settled[name] = x, out, step.prepare(flat, out)
    found[2](step.layer)
    return out


def linear(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Return a layer's output for `[T, inputs]`, by PyTorch's call."""
    return torch.nn.functional.linear(x, weights.weight, weights.bias)

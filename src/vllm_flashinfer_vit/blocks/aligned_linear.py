# SPDX-License-Identifier: Apache-2.0
"""An unquantized linear layer whose weight is padded with zeros after loading.

A GEMM in 16 bits reads 16 bytes at a time, so rows of a size that is no multiple of 8
run on kernels of an older generation. Zeros change no sum: the padded outputs of one
layer are zero, and the padded inputs of the next one meet zero weights.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

logger = init_logger("vllm.plugins.flashinfer_vit")

# Values of 16 bits in 16 bytes, the most that one thread loads.
_VECTOR = 8
# GEMMs compute whole tiles of 64 anyway, and 64 values fill a line of the cache.
_TILE = 64
# Attribute by which vLLM knows parameters that are views of the host's memory.
_OFFLOADED = "_vllm_is_uva_offloaded"


def aligned_size(size: int) -> int:
    """Return `size` if vector loads can read rows of it, else the next whole tile."""
    return size if size % _VECTOR == 0 else -(-size // _TILE) * _TILE


class AlignedLinearMethod(UnquantizedLinearMethod):
    """Pads a layer's parameters when vLLM processes its loaded weights.

    Later loads, as for weights that a trainer updates, still hand over weights of the
    checkpoint's size: each parameter's loader sees that size again, and the result goes
    into the padded storage, which CUDA graphs may hold.
    """

    def __init__(self, dim: int, size: int, parts: int = 1) -> None:
        """Describe the padding.

        Args:
            dim: The dimension of the weight `[outputs, inputs]` to pad; for 0 the bias
                `[outputs]` is padded too.
            size: Rows or columns of one part on this rank.
            parts: Stacked projections along `dim`; each is padded at its end.
        """
        super().__init__()
        self.dim = dim
        self.size = size
        self.parts = parts

    def reserve(self, layer: torch.nn.Module) -> None:
        """Give the padding its room after the parameters of a layer just built."""
        for parameter in self._padded(layer):
            reserve_room(parameter, self.size, aligned_size(self.size))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pad the layer's parameters, then do what every unquantized layer does."""
        for parameter in self._padded(layer):
            self._align(parameter)
        super().process_weights_after_loading(layer)

    def _padded(self, layer: torch.nn.Module) -> list[Any]:
        return [p for p in layer.parameters(recurse=False) if p.dim() > self.dim]

    def pad(self, stock: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of a parameter with zeros after each part.

        Args:
            stock: `[outputs, inputs]` or `[outputs]`, the checkpoint's size.
            out: Where to write it, padding included; None for a new tensor.
        """
        shape = list(stock.shape)
        shape[self.dim] = aligned_size(self.size) - self.size
        zeros = stock.new_zeros(shape)
        pieces = [
            piece
            for part in stock.split(self.size, self.dim)
            for piece in (part, zeros)
        ]
        return torch.cat(pieces, self.dim, out=out)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Return a copy of a padded parameter in the checkpoint's size."""
        parts = padded.split(aligned_size(self.size), self.dim)
        pieces = [part.narrow(self.dim, 0, self.size) for part in parts]
        return torch.cat(pieces, self.dim)

    def _align(self, parameter: Any) -> None:
        # vLLM's reload leaves a bias in place, which is padded and has its loader.
        if parameter.shape[self.dim] == self.parts * self.size:
            parameter.data = into_room(parameter.data, self.pad(parameter.data))
            offload_again(parameter)
        # vLLM's reload waits for as many elements as a checkpoint has.
        unpadded = parameter.numel() // aligned_size(self.size) * self.size
        parameter.weight_loader_numel = unpadded
        # Those of another process, as `--load-format ipc_cache` has them, have none.
        load = getattr(parameter, "weight_loader", None)
        if load is not None and not hasattr(parameter, "stock_weight_loader"):
            parameter.stock_weight_loader = load
            parameter.weight_loader = self._into_padded(load)

    def _into_padded(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def weight_loader(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with self.in_stock_size(param):
                return load(param, *args, **kwargs)

        return weight_loader

    @contextmanager
    def in_stock_size(self, parameter: torch.Tensor) -> Iterator[None]:
        """Give a padded parameter the checkpoint's size while the context lasts.

        What is written meanwhile goes into the padded storage at its end.
        """
        padded = parameter.data
        parameter.data = self.unpad(padded)
        try:
            yield
        finally:
            # vLLM's reload counts copied elements, so nothing is copied by copy_.
            self.pad(parameter.data, out=padded)
            parameter.data = padded


def reserve_room(parameter: torch.Tensor, size: int, padded: int) -> None:
    """Give a parameter just built the room for its padding, after its values.

    A tensor that replaced it after loading would leave a gap, too small for the next
    block's.

    Args:
        parameter: Contiguous, of any shape.
        size: Values of one of its dimensions, or of a part of it.
        padded: How many these will be.
    """
    stock = parameter.data
    room = stock.new_empty(stock.numel() // size * padded)
    parameter.data = room[: stock.numel()].view(stock.shape)


def into_room(stock: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    """Write a padded copy over a parameter's values, if their storage has the room.

    Args:
        stock: The values. Offloaded or replaced ones have no room.
        padded: The copy, contiguous, of the same dtype.

    Returns:
        What lies in the storage of `stock` then, else `padded` itself.
    """
    room = stock.untyped_storage()
    if room.nbytes() != padded.untyped_storage().nbytes():
        return padded
    return padded.new_empty(0).set_(room).view(padded.shape).copy_(padded)


def offload_again(parameter: torch.Tensor) -> None:
    """Have vLLM offload a parameter again if it was: its values are on the device."""
    # It asks those alone that were.
    setattr(parameter, _OFFLOADED, False)


def align(first: Any, second: Any, parts: int) -> None:
    """Have what one layer returns and the other takes padded, if it is unaligned.

    Args:
        first: The unquantized layer in front of an activation that makes 0 of 0; its
            weights are not loaded.
        second: The one after it.
        parts: Stacked projections in `first`.
    """
    size = inputs_of(second)
    added = aligned_size(size) - size
    if not added:
        return
    if writes_past_loaders():
        logger.info_once(
            "The vision tower's MLPs keep rows of %d values, which are slower: weights "
            "from sharded_rdt are written where unpadded ones would be.",
            size,
        )
        return
    first.quant_method = AlignedLinearMethod(0, size, parts)
    second.quant_method = AlignedLinearMethod(1, size)
    for linear in (first, second):
        linear.quant_method.reserve(linear)
    values = added * (parts * first.weight.shape[1] + second.weight.shape[0])
    logger.info_once(
        "The vision tower's MLPs get rows of %d values instead of %d, which takes "
        "%.2f MiB more in each block.",
        size + added,
        size,
        values * second.weight.element_size() / 2**20,
    )


def writes_past_loaders() -> bool:
    """Whether an engine's weight transfer records once what loaders copy where."""
    from vllm.config import get_current_vllm_config

    transfer = getattr(get_current_vllm_config(), "weight_transfer_config", None)
    return getattr(transfer, "backend", None) == "sharded_rdt"


def inputs_of(layer: Any) -> int:
    """Return how many values a row has that a layer takes, on this rank."""
    # A ReplicatedLinear has one size alone.
    return int(getattr(layer, "input_size_per_partition", layer.input_size))


def padded_inputs(layer: Any) -> int:
    """Return how many values a row has that a layer takes, padding included."""
    size = inputs_of(layer)
    is_padded = isinstance(layer.quant_method, AlignedLinearMethod)
    return aligned_size(size) if is_padded else size

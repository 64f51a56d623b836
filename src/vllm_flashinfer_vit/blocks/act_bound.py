# SPDX-License-Identifier: Apache-2.0
"""Scales for what an MLP's activation returns, known before its first layer has run.

A layer's output is no larger than the norm of its row times the largest norm of its
weight's rows (Cauchy and Schwarz), and no GELU is larger than what it is given. Such a
scale is ten to twenty times what the row's largest value would ask for. e4m3 has three
bits at 2^-6 as at 448: what a larger scale costs are values that are thousands of times
smaller than the row's largest one.

A product of two outputs, as SwiGLU is, would be bounded ten times ten too high, so it
has no such scale.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from vllm_flashinfer_vit.gemms.epilogue_gemm import Layer
from vllm_flashinfer_vit.kernels.formats import E4M3_MAX, ROUNDED

# Sums in fp32 in another order differ by less.
_TOLERANCE = 1e-3
# Values in a table for each layer, and in the memory of factors.
_ENTRY = 4
# Outputs, inputs, the dtype of biases, and whether each output has a scale.
_Key = tuple[int, int, torch.dtype | None, bool]


def factors_of(layer: Layer) -> torch.Tensor:
    """Return `Bound.factors` of a first layer that a GELU follows: `[2]` fp32.

    Args:
        layer: Its parameters, in e4m3.
    """
    norms = torch.linalg.vector_norm(layer.weight.float(), dim=1)
    assert layer.col_scales is not None
    slope = (norms * layer.col_scales).amax() * ROUNDED
    largest = torch.zeros_like(slope)
    if layer.bias is not None:
        largest = layer.bias.float().abs().amax()
    return torch.stack([slope, largest]) / E4M3_MAX


class Source(Protocol):
    """A first layer, wherever its parameters are by then."""

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where weight, scales and bias are now, 0 for no bias."""

    def read(self) -> Layer:
        """Return the parameters as they are now."""


class _Alike(NamedTuple):
    """Layers of a tower that one launch is for.

    Attributes:
        places: Their blocks' places, in the table's order.
        table: See `kernels.act_bound.prepare`.
    """

    places: list[int]
    table: torch.Tensor


class Bounds:
    """The factors of a tower's layers, which each pass computes anew.

    A weight may be loaded in place, and nobody be told. Factors, and where weights lie,
    are in memory that stays, and that graphs read; passes on two streams would share
    it.
    """

    def __init__(self) -> None:
        """Begin without layers."""
        self._min_rows = 0
        self._layers: dict[int, Source] = {}
        self._addresses: dict[int, tuple[int, ...]] = {}
        self._factors: dict[int, torch.Tensor] = {}
        self._memory: torch.Tensor | None = None
        self._groups: dict[_Key, _Alike] = {}

    def add(self, place: int, layer: Source, min_rows: int) -> None:
        """Take a block's first layer.

        Nothing is made yet: while weights are loaded an engine uses memory that may
        lose its contents when it sleeps.

        Args:
            place: The block's.
            layer: It.
            min_rows: From how many rows on passes ask for bounds.
        """
        self._layers[place], self._min_rows = layer, min_rows
        self._addresses.pop(place, None)

    def drop(self, place: int) -> None:
        """Forget a block's layer, if there is one.

        Graphs go on to read the tables, until a pass writes them anew.
        """
        self._layers.pop(place, None)
        self._addresses.pop(place, None)

    def follow(self, rows: int) -> bool:
        """Find the layers where they are now, as a pass of so many rows begins.

        Returns:
            Whether the pass can have bounds. Not in a capture that begins before any
            other pass, or after weights have moved: a table cannot be written then.
        """
        if not self._layers or rows < self._min_rows:
            return False
        addresses = {place: layer.addresses for place, layer in self._layers.items()}
        if addresses == self._addresses:
            return True
        device = next(iter(self._layers.values())).read().weight.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        # A tensor of inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._enter(addresses, device)
        return True

    def _enter(
        self, addresses: dict[int, tuple[int, ...]], device: torch.device
    ) -> None:
        places, memory = 1 + max(self._layers), self._memory
        if memory is None or memory.device != device or len(memory) < places:
            self._memory = memory = torch.zeros(places, _ENTRY, device=device)
            # Rows of their own 16 bytes, as launches expect.
            self._factors = {at: row[:2] for at, row in enumerate(memory)}
            self._groups.clear()
        self._addresses = addresses
        keys = {place: _alike(layer.read()) for place, layer in self._layers.items()}
        for key in keys.values():
            if key not in self._groups:
                table = torch.zeros_like(memory, dtype=torch.int64)
                self._groups[key] = _Alike([], table)
        for key, (among, table) in self._groups.items():
            among[:] = [place for place in keys if keys[place] == key]
            entries = [[*self._addresses[at], at] for at in among]
            # A graph may read as many entries as the table has had once.
            entries += entries[:1] * (len(table) - len(entries))
            if entries:
                table.copy_(torch.tensor(entries, dtype=torch.int64))

    def factors(self, place: int) -> torch.Tensor:
        """Return a layer's factors, `[2]` fp32, in a pass that can have bounds."""
        return self._factors[place]

    def prepare(self) -> Callable[[], None]:
        """Settle the computation of all factors, for the current stream."""
        memory = self._memory
        assert memory is not None
        if not memory.is_cuda:
            return self._compute
        from vllm_flashinfer_vit.kernels.act_bound import prepare

        calls = [
            prepare(table[: len(places)], memory, *key)
            for key, (places, table) in self._groups.items()
            if places
        ]

        def call() -> None:
            memory.zero_()
            for each in calls:
                each()

        return call

    def _compute(self) -> None:
        for place, layer in self._layers.items():
            self._factors[place].copy_(factors_of(layer.read()))


def trial(layer: Source) -> str | None:
    """Compute a layer's factors, and compare them with PyTorch's.

    Returns:
        None if all is right, else why they cannot be computed here.

    Raises:
        Exception: Of any kind, where it cannot be run at all.
    """
    bounds = Bounds()
    bounds.add(0, layer, 0)
    if not bounds.follow(0):
        return "a CUDA graph is being captured"
    bounds.prepare()()
    found, right = bounds.factors(0), factors_of(layer.read())
    if not torch.allclose(found, right, rtol=_TOLERANCE):
        return f"its bound is {found.tolist()}, not {right.tolist()}"
    return None


def _alike(layer: Layer) -> _Key:
    """Return what layers have alike that one launch is for."""
    weight, bias, _, scales = layer
    assert scales is not None
    outputs = len(weight) if bias is None else len(bias)
    dtype = None if bias is None else bias.dtype
    return outputs, weight.shape[1], dtype, scales.numel() > 1

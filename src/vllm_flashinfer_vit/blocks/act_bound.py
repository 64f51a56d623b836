# SPDX-License-Identifier: Apache-2.0
"""Scales for what an MLP's activation returns, known before its first layer has run.

A layer's output is no larger than the norm of its row times the largest norm of its
weight's rows (Cauchy and Schwarz), and no GELU is larger than what it is given. Such a
scale is about ten times what the row's largest value would ask for, more where a few
channels are large. e4m3 has three bits at 2^-6 as at 448: what a larger scale costs are
values that are thousands of times smaller than the row's largest one.

A product of two outputs, as SwiGLU is, would be bounded ten times ten too high, so it
has no such scale.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_flashinfer_vit.blocks.quack_gemm import Layer
from vllm_flashinfer_vit.kernels.formats import E4M3_MAX, ROUNDED


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


# Sums in fp32 in another order differ by less.
_TOLERANCE = 1e-3
# Values in a table for each layer, and in the memory of factors.
_ENTRY = 4
# Outputs, inputs, the dtype of biases, and whether each output has a scale.
_Key = tuple[int, int, torch.dtype | None, bool]


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

    A weight may be loaded in place, and nobody be told. A graph reads the factors, and
    where weights lie, in memory that stays.
    """

    def __init__(self) -> None:
        """Begin without layers."""
        self._layers: dict[int, Callable[[], Layer]] = {}
        self._entries: dict[int, list[int]] = {}
        self._factors: dict[int, torch.Tensor] = {}
        self._memory: torch.Tensor | None = None
        self._groups: dict[_Key, _Alike] = {}

    def add(self, place: int, layer: Callable[[], Layer]) -> None:
        """Take a block's first layer.

        Args:
            place: The block's.
            layer: Returns the layer, where it is by then.
        """
        self._layers[place] = layer
        if self._memory is not None:
            self._make(layer().weight.device)

    @property
    def is_ready(self) -> bool:
        """Whether factors can be computed; if not yet, they can from now on.

        Not while weights are loaded: what is made then may lose its contents when an
        engine sleeps. Nor in a capture.
        """
        if self._memory is None:
            device = next(iter(self._layers.values()))().weight.device
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False
            self._make(device)
        return True

    def _make(self, device: torch.device) -> None:
        """Make the memory, or enlarge it, and write down where layers are."""
        places = 1 + max(self._layers)
        memory = self._memory
        if memory is None or memory.device != device or len(memory) < places:
            self._memory = torch.zeros(places, _ENTRY, device=device)
            # Rows of their own 16 bytes, as launches expect.
            self._factors = {at: row[:2] for at, row in enumerate(self._memory)}
            self._groups.clear()
        for place in self._layers:
            self._enter(place)

    def _enter(self, place: int) -> None:
        """Write down where a layer is, for the launch of those that are alike."""
        layer = self._layers[place]()
        entry = _entry(layer, place)
        known, self._entries[place] = self._entries.get(place), entry
        key = _alike(layer)
        if key not in self._groups:
            assert self._memory is not None
            table = torch.zeros_like(self._memory, dtype=torch.int64)
            self._groups[key] = _Alike([], table)
        for other, (places, table) in self._groups.items():
            if place in places and other != key:
                places.remove(place)
            elif place not in places and other == key:
                places.append(place)
            elif place not in places or entry == known:
                continue
            entries = torch.tensor([self._entries[at] for at in places])
            table[: len(places)].copy_(entries.view(-1, _ENTRY))

    def factors(self, place: int) -> torch.Tensor:
        """Return a layer's factors, `[2]` fp32, once it `is_ready`."""
        return self._factors[place]

    def has_moved(self, place: int) -> bool:
        """Whether a layer is elsewhere than it was; it is found there from now on."""
        moved = _entry(self._layers[place](), place) != self._entries[place]
        if moved:
            self._enter(place)
        return moved

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
            self._factors[place].copy_(factors_of(layer()))


def trial(layer: Layer) -> str | None:
    """Compute a layer's factors, and compare them with PyTorch's.

    Returns:
        None if all is right, else why they cannot be computed here.
    """
    try:
        bounds = Bounds()
        bounds.add(0, lambda: layer)
        if not bounds.is_ready:
            return "a CUDA graph is being captured"
        bounds.prepare()()
        found, right = bounds.factors(0), factors_of(layer)
        if not torch.allclose(found, right, rtol=_TOLERANCE):
            return f"its bound is {found.tolist()}, not {right.tolist()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _alike(layer: Layer) -> _Key:
    """Return what layers have alike that one launch is for."""
    weight, bias, _, scales = layer
    assert scales is not None
    outputs = len(weight) if bias is None else len(bias)
    dtype = None if bias is None else bias.dtype
    return outputs, weight.shape[1], dtype, scales.numel() > 1


def _entry(layer: Layer, place: int) -> list[int]:
    weight, bias, _, scales = layer
    assert scales is not None
    added = 0 if bias is None else bias.data_ptr()
    return [weight.data_ptr(), scales.data_ptr(), added, place]

# SPDX-License-Identifier: Apache-2.0
"""An MLP's first layer in FP8 by QuACK, which applies the activation."""

from collections.abc import Callable

import torch
from vllm.logger import init_logger

from vllm_flashinfer_vit.blocks import act_bound
from vllm_flashinfer_vit.blocks.act_bound import Bounds
from vllm_flashinfer_vit.blocks.fp8_linear import Fp8Linear
from vllm_flashinfer_vit.blocks.layers import Layers
from vllm_flashinfer_vit.blocks.linear import BlockWeights
from vllm_flashinfer_vit.gemms import activating_gemm, epilogue_gemm
from vllm_flashinfer_vit.gemms.epilogue_gemm import FP8, Layer
from vllm_flashinfer_vit.kernels.formats import Activation

logger = init_logger("vllm.plugins.flashinfer_vit")

# From how many rows on it is faster than another GEMM and a pass that activates and
# quantises, alone on an H100; and where each pass computes bounds, for which it reads
# the weights once more (docs/experiments.md).
MIN_ROWS = 256
MIN_ROWS_BOUNDED = 1024


class QuackAct:
    """A first layer with its kernel.

    Attributes:
        act: What the layer and its activation are.
        kernel: What runs both.
        min_rows: From how many rows on it is faster than what else there is.
        bounds: The factors of the scales of what is written; None where scales are
            given, or 16 bits are written.
        place: The block's, in its tower.
    """

    def __init__(
        self,
        source: Fp8Linear,
        kernel: epilogue_gemm.Kernel,
        act: activating_gemm.Act,
        min_rows: int,
        bounds: Bounds | None,
        place: int,
    ) -> None:
        """Take a layer, its kernel as `activating_gemm.build` tried it, and a bound."""
        self._source, self.kernel = source, kernel
        self.act, self.min_rows = act, min_rows
        self.bounds, self.place = bounds, place

    def prepare(
        self, rows: torch.Tensor, out: torch.Tensor, scales: torch.Tensor
    ) -> Callable[[Layer, torch.Tensor | None], None]:
        """Settle it for layers like this one; see `activating_gemm.prepare`."""
        like = self.layer(scales)
        return activating_gemm.prepare(self.kernel, rows, out, like, self.act)

    def layer(self, scales: torch.Tensor) -> Layer:
        """Return the layer's parameters, where they are now."""
        return self._source.as_layer(scales, self._source.bias)


class BoundedLayer:
    """A first layer, as `Bounds` reads it."""

    def __init__(self, source: Fp8Linear, weights: BlockWeights) -> None:
        """Take a layer, and the weights of its block."""
        self._source, self._weights = source, weights

    @property
    def addresses(self) -> tuple[int, ...]:
        """See `act_bound.Source`."""
        return self._source.weights.addresses

    def read(self) -> Layer:
        """See `act_bound.Source`."""
        self._weights.refresh()
        source = self._source
        return source.as_layer(source.like_scales, source.bias)


def resolve(
    layers: Layers,
    path: str,
    first: Fp8Linear,
    second: Fp8Linear,
    activation: Activation,
) -> QuackAct | None:
    """Return what runs an MLP's first layer and its activation, or None and say why.

    Args:
        layers: Of the block.
        path: The first layer's.
        first: It, which does not add its bias itself.
        second: The second layer, which reads the rows.
        activation: What is between them.
    """
    # Weights with scales of blocks have GEMMs of their own.
    if "quack_act" in layers.off or first.groups or second.groups:
        return None
    if not epilogue_gemm.is_available():
        return None
    layer = layers.part(path)
    needs_bound = not second.is_static
    outputs = getattr(layer, "output_size_per_partition", layer.output_size)
    dtype = layer.params_dtype
    act = activating_gemm.Act(activation, outputs, second.inputs, FP8)
    if act.is_gated and needs_bound:
        act = act._replace(columns=first.outputs // 2, dtype=dtype)
        needs_bound = False
    bounded = BoundedLayer(first, layers.weights)
    like = bounded.read()
    if not activating_gemm.fits(like, act, dtype):
        return None
    key = "quack_act", *like.alike, act
    reason = layers.tried(key, activating_gemm.build, like, act)
    if reason is None and needs_bound:
        reason = layers.tried(("act_bound", *like.alike), act_bound.trial, bounded)
    if reason is not None:
        logger.warning_once(
            "QuACK cannot run %s of the vision tower's blocks with its activation, "
            "so a pass of its own applies that: %s",
            path,
            reason,
        )
        return None
    rows = MIN_ROWS_BOUNDED if needs_bound else MIN_ROWS
    layers.steps[path] += f"; from {rows} rows on QuACK activates"
    kernel = layers.tower.gemms.get(key)
    if kernel is None:
        kernel = activating_gemm.compiled(like, act)
        layers.tower.gemms[key] = kernel
    bounds = None
    if needs_bound:
        bounds = layers.tower.bounds
        bounds.add(layers.place, bounded, rows)
    return QuackAct(first, kernel, act, rows, bounds, layers.place)

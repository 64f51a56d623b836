# SPDX-License-Identifier: Apache-2.0
"""An MLP's first layer in FP8 and its activation: one GEMM of QuACK's.

Without it, a pass of its own reads what the layer returns in 16 bits, and writes it
once more, in e4m3. Where scales can be known beforehand, the GEMM writes that itself;
of SwiGLU with scales of each token it writes half as many values, in 16 bits.
`gemms.activating_kernel` is the kernel. It needs QuACK 0.6; see `epilogue_gemm`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_flashinfer_vit.gemms import epilogue_gemm
from vllm_flashinfer_vit.gemms.epilogue_gemm import (
    FP8,
    FP8_TOLERANCE,
    Kernel,
    Layer,
    Tile,
)
from vllm_flashinfer_vit.gemms.quack import is_close
from vllm_flashinfer_vit.kernels.act_quantize_ref import act_ref
from vllm_flashinfer_vit.kernels.formats import MIN_ROW_SCALE, Activation

# The fastest of those tried in most cases (docs/experiments.md).
TILE = Tile(128, 160, (2, 1))

# Columns of gate and of up that a tile takes in turns.
_GROUP = 8
# Rows are stored in vectors of as many bytes.
_STORED = 16


class Act(NamedTuple):
    """What a first layer and its activation are.

    Attributes:
        activation: What follows the layer.
        outputs: The layer's outputs, without padding.
        columns: Of the buffer that is written.
        dtype: Of what is written: e4m3, or what the layer itself would return.
    """

    activation: Activation
    outputs: int
    columns: int
    dtype: torch.dtype

    @property
    def is_gated(self) -> bool:
        """Whether two outputs make one value."""
        return self.activation == "swiglu"

    @property
    def width(self) -> int:
        """How many values the activation returns."""
        return self.outputs // 2 if self.is_gated else self.outputs

    @property
    def quantizes(self) -> bool:
        """Whether e4m3 is written."""
        return self.dtype == FP8

    @property
    def whole_groups(self) -> int:
        """The values of a gate, and what its last group of columns has besides."""
        return -(-self.width // _GROUP) * _GROUP

    def written(self, out: torch.Tensor, padded: int) -> torch.Tensor:
        """Return the columns that are written of a buffer.

        Args:
            out: `[T, columns]`.
            padded: The layer's outputs, with padding.
        """
        if self.is_gated:
            padded = self.whole_groups
        return out[:, :padded]


def fits(like: Layer, act: Act, dtype: torch.dtype) -> bool:
    """Whether the kernel can run a layer.

    Args:
        like: A layer.
        act: What it is.
        dtype: What the layer itself would return.
    """
    weight, bias = like.weight, like.bias
    if act.is_gated:
        groups = act.whole_groups
        # All that a tile takes exists: up begins with the row after the gate's last.
        is_whole = act.width % 2 == 0 and act.width + groups <= len(weight)
        is_whole = is_whole and groups <= act.columns
        is_whole = is_whole and groups * act.dtype.itemsize % _STORED == 0
    else:
        is_whole = act.quantizes and len(weight) <= act.columns
    return (
        is_whole
        and weight.dtype == FP8
        and weight.is_contiguous()
        and epilogue_gemm.loads(weight, dtype)
        and act.columns * act.dtype.itemsize % _STORED == 0
        and like.row_scales is not None
        and like.col_scales is not None
        and (bias is None or (bias.dtype == dtype and len(bias) == act.outputs))
    )


def compiled(like: Layer, act: Act) -> Kernel:
    """Compile the kernel, or load it from QuACK's folder, for seconds.

    Args:
        like: A layer that `fits`.
        act: What it is.

    Raises:
        Exception: Of any kind, where QuACK is built otherwise than is known here.
    """
    out = act.written(
        like.weight.new_empty(1, act.columns, dtype=act.dtype), len(like.weight)
    )
    read = {}
    if act.quantizes:
        read["out_scales"] = out.new_empty(1, dtype=torch.float32)
    if act.is_gated:
        gemm = "activating_kernel", "SwigluGemm"
        return epilogue_gemm.compiled(
            gemm, like, None, {**read, "out": out}, TILE, half=act.width
        )
    gemm = "activating_kernel", "ActivatingGemm"
    return epilogue_gemm.compiled(
        gemm, like, out, read, TILE, activation=act.activation
    )


def prepare(
    kernel: Kernel, x: torch.Tensor, out: torch.Tensor, like: Layer, act: Act
) -> Callable[[Layer, torch.Tensor | None], None]:
    """Settle the layer for others of the same sizes.

    Args:
        kernel: From `compiled`.
        x: `[T, K]` e4m3, rows of whole 16 bytes. Calls read what it holds by then.
        out: `[T, columns]`, contiguous; each call overwrites what `Act.written` says.
        like: The layer.
        act: What it is.

    Returns:
        A call that launches it for any layer like this one, with the scales of e4m3
        that it writes: fp32, one or `[T]`; None for 16 bits.
    """
    function, arguments, schedule = kernel
    written = act.written(out, len(like.weight))
    is_gated = act.is_gated

    def launch(layer: Layer, out_scales: torch.Tensor | None) -> None:
        weight, *others = layer
        if is_gated:
            given = arguments(written, out_scales, *others)
            function(x, weight, None, None, given, *schedule)
        else:
            given = arguments(out_scales, *others)
            function(x, weight, written, None, given, *schedule)

    return launch


def build(like: Layer, act: Act) -> str | None:
    """Compile the kernel, and compare its results with PyTorch's.

    Call it when weights are loaded, as `quack.build`.

    Args:
        like: A layer that `fits`. What it has for `row_scales` is not read.
        act: What it is.

    Returns:
        None if all is right, else that its results are wrong.

    Raises:
        Exception: Of any kind, where it cannot be run at all.
    """
    x = epilogue_gemm.trial_rows(like.weight, TILE)
    like = epilogue_gemm.with_row_scales(like, len(x))
    sums = epilogue_gemm.project(x, like)
    right = act_ref(sums, act.width, None, act.activation)
    # Half of the range, so that what is too large shows.
    scales = (right.abs().amax(1) / 224).clamp(min=MIN_ROW_SCALE)
    written = x.new_zeros(len(x), act.columns, dtype=act.dtype)
    call = prepare(compiled(like, act), x, written, like, act)
    call(like, scales if act.quantizes else None)
    found = written[:, : act.width].float()
    if act.quantizes:
        found *= scales[:, None]
    is_right = is_close(found, right, FP8_TOLERANCE)
    return None if is_right else "its results are wrong"

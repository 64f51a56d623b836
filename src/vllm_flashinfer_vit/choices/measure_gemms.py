# SPDX-License-Identifier: Apache-2.0
"""Times the GEMMs of linear layers in FP8, scales and bias included.

Rows are quantised already, as they are in a block. A GEMM that is less exact than
vLLM's own is not timed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vllm_flashinfer_vit.choices.clock import Clock, Run
from vllm_flashinfer_vit.choices.compare import compare, relative_error
from vllm_flashinfer_vit.choices.gemm_table import GemmLayer, GemmMeasurement
from vllm_flashinfer_vit.gemms.catalog import CUTLASS, GEMMS
from vllm_flashinfer_vit.gemms.cublaslt import Problems
from vllm_flashinfer_vit.gemms.scaled_mm import ScaledWeight, cutlass_op, scaled_gemm
from vllm_flashinfer_vit.kernels.row_scales_ref import scaled_mm_ref
from vllm_flashinfer_vit.machine.stack import Stack
from vllm_flashinfer_vit.machine.verdicts import ADA

ROWS = (128, 512, 2048, 4096, 8192, 16384, 32768)
# Inputs and outputs of the QKV projection, attention's projection and the MLP's layers,
# padding included: of Qwen2-VL, of Qwen2.5-VL where they differ, and of Qwen3-VL.
SIZES = (
    (1280, 3840),
    (1280, 1280),
    (1280, 5120),
    (5120, 1280),
    (1280, 6848),
    (3456, 1280),
    (1152, 3456),
    (1152, 1152),
    (1152, 4304),
    (4352, 1152),
)
# Rounding the output makes 0.002, a sum in the tensor cores' precision no more.
_GATE = 2e-2
# What errors of two GEMMs that are equally exact differ by.
_NO_LESS_EXACT = 1.1
# More rows take the same code paths, and fp32 takes long for them.
_GATE_MAX_ROWS = 8192


class _Operands(NamedTuple):
    """What a GEMM takes; see `scaled_mm.ScaledGemm`."""

    weight: ScaledWeight
    rows: torch.Tensor
    scales: torch.Tensor
    out: torch.Tensor


def gemm_candidates(stack: Stack) -> tuple[str, ...]:
    """Return the GEMMs to compare, vLLM's own first.

    Empty where that does not run: layers in FP8 are then left to vLLM, so that there is
    nothing to choose.

    Args:
        stack: What the machine has.
    """
    if stack.capability is None or stack.capability < ADA:
        return ()
    return tuple(GEMMS) if cutlass_op() is not None else ()


def measure_gemms(
    layer: GemmLayer,
    dtype: torch.dtype,
    gemms: Sequence[str],
    row_counts: Sequence[int],
    clock: Clock,
    device: torch.device,
    advance: Callable[[str], None] = lambda name: None,
) -> tuple[list[GemmMeasurement], list[str]]:
    """Check and time GEMMs of a layer with a bias; see `compare` for those that fail.

    Args:
        layer: The layer.
        dtype: Of its output.
        gemms: The GEMMs to compare, vLLM's own first.
        row_counts: Numbers of rows, ascending.
        clock: The clock.
        device: Where to measure.
        advance: Called before each number of rows, with its name.

    Returns:
        The measurements, and what was left out and why.
    """
    times, left_out = compare(
        gemms,
        {f"{rows} rows": rows for rows in row_counts},
        lambda rows: _Inputs(layer, _draw(layer, dtype, rows, device)),
        clock,
        device,
        advance,
    )
    found = [GemmMeasurement(layer.key, rows, us) for rows, us in times.items()]
    return found, left_out


class _Inputs:
    """Operands, as `compare` takes them."""

    def __init__(self, layer: GemmLayer, operands: _Operands) -> None:
        self._layer, self._operands, self._limit = layer, operands, _GATE
        self._expected: torch.Tensor | None = None
        weight, rows, scales, out = operands
        if len(rows) <= _GATE_MAX_ROWS:
            self._expected = torch.empty_like(out, dtype=torch.float32)
            read = rows, weight.weight, scales, weight.scale, weight.bias
            scaled_mm_ref(self._expected, *read)

    def call(self, name: str) -> Run:
        layer, (weight, rows, scales, out) = self._layer, self._operands
        gemm = scaled_gemm(name, layer.scales, out.device, Problems())
        # Each has an output of its own, that none is found right by another's.
        own = torch.full_like(out, float("nan"))

        def run() -> torch.Tensor:
            # Each time, since it is for the current stream.
            gemm.prepare(weight, rows, scales, own)(weight, scales)
            return own

        return run

    def check(self, gemm: str, out: torch.Tensor) -> None:
        if self._expected is None:
            return
        error = relative_error(out, self._expected, self._limit)
        if gemm == CUTLASS:
            self._limit = error * _NO_LESS_EXACT


def _draw(
    layer: GemmLayer, dtype: torch.dtype, rows: int, device: torch.device
) -> _Operands:
    """Draw what GEMMs of a layer take, the same in every run; outputs are about 1."""
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=random)

    def scale(*shape: int) -> torch.Tensor:
        return 0.5 + torch.rand(shape, device=device, generator=random)

    e4m3 = torch.float8_e4m3fn
    inputs, outputs = layer.inputs, layer.outputs
    has_one = layer.scales != "rows"
    weight = ScaledWeight(
        normal(outputs, inputs).to(e4m3).t(),
        (scale(1) if has_one else scale(1, outputs)) * inputs**-0.5,
        normal(outputs).to(dtype),
    )
    return _Operands(
        weight,
        normal(rows, inputs).to(e4m3),
        scale(1) if layer.scales == "tensor" else scale(rows, 1),
        torch.empty(rows, outputs, dtype=dtype, device=device),
    )

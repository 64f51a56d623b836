# SPDX-License-Identifier: Apache-2.0
"""Rows in e4m3 with scales, and how exact they must be."""

from typing import NamedTuple

import torch

from vllm_flashinfer_vit.gemms.scaled_mm import ScaledGemm, ScaledWeight
from vllm_flashinfer_vit.kernels.formats import MIN_ROW_SCALE, num_groups
from vllm_flashinfer_vit.kernels.row_scales_ref import scaled_mm_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Half a unit of e4m3, whose fraction has three bits. Triton's interpreter truncates.
UNIT = 2.0**-4 if DEVICE == "cuda" else 2.0**-3
LOOSE = {"rtol": 1e-5, "atol": 0.0}
# The least positive number in e4m3.
LEAST = 2.0**-9


class Operands(NamedTuple):
    """What a GEMM of such rows takes, in its order."""

    out: torch.Tensor
    rows: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None


def scaled_weight(given: Operands) -> ScaledWeight:
    """Return the part of operands that a layer has."""
    return ScaledWeight(given.weight, given.weight_scale, given.bias)


def multiply(gemm: ScaledGemm, given: Operands) -> None:
    """Settle a GEMM for operands, and launch it."""
    weight = scaled_weight(given)
    gemm.prepare(weight, given.rows, given.scales, given.out)(weight, given.scales)


def exact(given: Operands) -> torch.Tensor:
    """Return the product of operands in fp32."""
    out = torch.empty_like(given.out, dtype=torch.float32)
    scaled_mm_ref(out, *given[1:])
    return out


def row_scales(rows: int, given: float | None) -> torch.Tensor:
    """Return one scale for all rows, or room for one of each."""
    if given is None:
        return torch.full((rows, 1), float("nan"), device=DEVICE)
    return torch.tensor([given], device=DEVICE)


def group_scales(rows: int, columns: int) -> torch.Tensor:
    """Return room for one scale of each group of a row, in contiguous columns."""
    shape = num_groups(columns), rows
    return torch.full(shape, float("nan"), device=DEVICE).t()


def distance(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return how far values are off; the interpreter may lose a carry, and a half."""
    off = (found - exact).abs()
    return off if DEVICE == "cuda" else torch.minimum(off, (2 * found - exact).abs())


def assert_quantized(
    rows: torch.Tensor, scales: torch.Tensor, exact: torch.Tensor, slack: float
) -> None:
    """Check rows in e4m3 against fp64, half a unit off, and `slack` of the largest."""
    assert rows.dtype == torch.float8_e4m3fn
    width = exact.shape[-1]
    exact = exact.reshape(-1, width)
    found = rows.reshape(len(exact), -1)
    scale = scales.double().reshape(-1, 1)
    if scales.dim() == 2:
        absmax = exact.abs().amax(-1, keepdim=True)
        least = torch.full_like(absmax, MIN_ROW_SCALE)
        torch.testing.assert_close(scale, torch.maximum(absmax / 448, least), **LOOSE)
    clamped = exact.clamp(-448 * scale, 448 * scale)
    off = distance(found[:, :width].double() * scale, clamped)
    most = UNIT * clamped.abs() + 2 * LEAST * scale + slack * exact.abs().max()
    assert (off <= most).all()
    assert not found[:, width:].float().any()

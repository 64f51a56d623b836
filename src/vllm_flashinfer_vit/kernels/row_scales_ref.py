# SPDX-License-Identifier: Apache-2.0
"""FP8 rows with a scale for all or for each, and their GEMM, in plain PyTorch."""

import torch

from vllm_flashinfer_vit.kernels.formats import (
    E4M3_MAX,
    MIN_ROW_SCALE,
    check_row_scales,
)


def quantize_rows_ref(
    x: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor
) -> None:
    """Quantise rows, `x ~ rows * scales`.

    Args:
        x: `[T, K]` floating point, any strides.
        rows: `[T, Kp]` e4m3, Kp from K on; written, with zeros from column K on.
        scales: fp32: one element in at most one dim, which is read, or `[T, 1]`, which
            is written: each row's largest absolute value is 448.

    Raises:
        ValueError: Rows or scales are of other dtypes or shapes.
    """
    values = x.float()
    if check_row_scales(rows, scales):
        absmax = values.abs().amax(-1, keepdim=True)
        scales.copy_((absmax / E4M3_MAX).clamp(min=MIN_ROW_SCALE))
    rows.zero_()
    scaled = values * scales.reciprocal()
    rows[:, : x.shape[1]] = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(rows.dtype)


def scaled_mm_ref(
    out: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Multiply FP8 rows by an FP8 weight, in fp32; as vLLM's `cutlass_scaled_mm`.

    Args:
        out: `[T, N]` floating point; written, rounded once.
        rows: `[T, K]` e4m3.
        weight: `[K, N]` e4m3.
        scales: fp32, one or one for each row.
        weight_scale: fp32, one or one for each column of the weight.
        bias: `[N]`, or None.
    """
    total = rows.float() @ weight.float()
    total = total * scales.reshape(-1, 1) * weight_scale.reshape(1, -1)
    out.copy_(total if bias is None else total + bias.float())

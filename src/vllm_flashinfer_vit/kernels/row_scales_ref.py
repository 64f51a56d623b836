# SPDX-License-Identifier: Apache-2.0
"""FP8 rows with a scale for all, each or each group, and their GEMM, in PyTorch."""

import torch

from vllm_flashinfer_vit.kernels.formats import (
    E4M3_MAX,
    GROUP,
    MIN_GROUP_SCALE,
    MIN_ROW_SCALE,
    check_row_scales,
    num_groups,
)


def quantize_rows_ref(
    x: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor
) -> None:
    """Quantise rows, `x ~ rows * scales`.

    Args:
        x: `[T, K]` floating point, any strides.
        rows: `[T, Kp]` e4m3, Kp from K on; written, with zeros from column K on.
        scales: fp32: one element in at most one dim, which is read, or `[T, 1]`, or
            `[T, num_groups(Kp)]` in contiguous columns, which is written: the largest
            absolute value of each row or group is 448.

    Raises:
        ValueError: Rows or scales are of other dtypes or shapes.
    """
    values = torch.nn.functional.pad(x.float(), (0, rows.shape[1] - x.shape[1]))
    form = check_row_scales(rows, scales)
    if form == "groups":
        end = scales.shape[1] * GROUP - rows.shape[1]
        groups = torch.nn.functional.pad(values, (0, end)).unflatten(1, (-1, GROUP))
        absmax = groups.abs().amax(-1)
        scales.copy_((absmax / E4M3_MAX).clamp(min=MIN_GROUP_SCALE))
        scales = spread(scales, values.shape)
    elif form == "own":
        absmax = values.abs().amax(-1, keepdim=True)
        scales.copy_((absmax / E4M3_MAX).clamp(min=MIN_ROW_SCALE))
    scaled = values * scales.reciprocal()
    rows.copy_(scaled.clamp(-E4M3_MAX, E4M3_MAX).to(rows.dtype))


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return scales of groups, or of a weight's blocks, as one for each value.

    Args:
        scales: `[T, num_groups(K)]`, or `[num_groups(K), num_groups(N)]`.
        shape: `[T, K]`, or `[K, N]`.
    """
    for dim in (0, 1):
        if scales.shape[dim] != shape[dim]:
            scales = scales.repeat_interleave(GROUP, dim).narrow(dim, 0, shape[dim])
    return scales


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
        scales: fp32, one or one for each row; `[T, num_groups(K)]` for a weight with
            scales of blocks.
        weight_scale: fp32, one or one for each column of the weight; or one for each of
            its blocks, `[num_groups(K), num_groups(N)]`.
        bias: `[N]`, or None.
    """
    if weight_scale.shape == (num_groups(weight.shape[0]), num_groups(weight.shape[1])):
        exact = spread(scales, rows.shape) * rows.float()
        total = exact @ (spread(weight_scale, weight.shape) * weight.float())
    else:
        total = rows.float() @ weight.float()
        total = total * scales.reshape(-1, 1) * weight_scale.reshape(1, -1)
    out.copy_(total if bias is None else total + bias.float())

# SPDX-License-Identifier: Apache-2.0
"""Residual sums and their norm in plain PyTorch: what `kernels/add_norm.py` is."""

from collections.abc import Sequence

import torch

from vllm_flashinfer_vit.kernels.formats import (
    MIN_ROW_SCALE,
    Bound,
    check_bound,
    check_number_of_terms,
    check_sum_norm_inputs,
)
from vllm_flashinfer_vit.kernels.row_scales_ref import quantize_rows_ref


def sum_norm_ref(
    terms: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    keep_sum: bool,
    scales: torch.Tensor | None = None,
    layer_scales: Sequence[torch.Tensor] = (),
    bound: Bound | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Add branches to the residual stream, and normalize the sum.

    The arithmetic is fp32. The sum is rounded to the input's dtype; what is normalized
    is the sum before that.

    Args:
        terms: The stream and one or two branches, `[..., C]` floating point, any
            strides.
        weight: `[C]`, any floating dtype.
        bias: Like weight for a LayerNorm, None for an RMSNorm.
        eps: Added to the variance, or to the mean square.
        keep_sum: Whether the sum is wanted.
        scales: As for `quantize_rows_ref`, for a norm in e4m3.
        layer_scales: `[C]` for each branch, which is multiplied by it, or none.
        bound: Scales of the rows that an activation makes of the norm, which are
            written; or None.

    Returns:
        The sum or None, and its norm, like the terms or in e4m3.

    Raises:
        ValueError: The shapes or dtypes do not fit together.
    """
    check_number_of_terms(terms)
    check_sum_norm_inputs(terms, weight, bias, layer_scales)
    x, *branches = (term.float() for term in terms)
    if layer_scales:
        pairs = zip(branches, layer_scales, strict=True)
        branches = [branch * scale.float() for branch, scale in pairs]
    total = sum(branches, x)
    if bias is None:
        mean_square = total.pow(2).mean(-1, keepdim=True)
        normed = total * torch.rsqrt(mean_square + eps) * weight.float()
    else:
        normed = torch.nn.functional.layer_norm(
            total, weight.shape, weight.float(), bias.float(), eps
        )
    if bound is not None:
        write_bound(normed.reshape(-1, x.shape[-1]), bound)
    dtype = terms[0].dtype
    kept = total.to(dtype) if keep_sum else None
    if scales is None:
        return kept, normed.to(dtype)
    rows = torch.empty_like(normed, dtype=torch.float8_e4m3fn)
    width = x.shape[-1]
    quantize_rows_ref(normed.reshape(-1, width), rows.view(-1, width), scales)
    return kept, rows


def write_bound(normed: torch.Tensor, bound: Bound) -> None:
    """Write the scales of the rows that an activation makes of a norm, `[T, C]`.

    Raises:
        ValueError: See `check_bound`.
    """
    check_bound(bound, len(normed))
    norms = normed.float().norm(dim=1, keepdim=True)
    scales = norms * bound.factors[0] + bound.factors[1]
    bound.scales.copy_(scales.clamp(min=MIN_ROW_SCALE))

# SPDX-License-Identifier: Apache-2.0
"""Streams with branches, norms and what else their kernel takes."""

import torch

from vllm_flashinfer_vit.kernels.formats import Bound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


def make_inputs(
    *shape: int, num_terms=3, has_bias=True, dtype=torch.float16, seed: int = 0
):
    """A stream with a massive activation and an offset, as towers have them, branches,
    and a norm's weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    terms = [torch.randn(shape, generator=generator) for _ in range(num_terms)]
    terms[0] += 3
    terms[0][..., 0] *= 100
    weight = 1 + 0.1 * torch.randn(shape[-1], generator=generator)
    bias = 0.1 * torch.randn(shape[-1], generator=generator)
    terms = [term.to(DEVICE, dtype) for term in terms]
    weight, bias = weight.to(DEVICE, dtype), bias.to(DEVICE, dtype)
    return terms, weight, bias if has_bias else None


def draw_layer_scales(num_terms, width, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(num_terms - 1, width, generator=generator)
    return tuple(drawn.to(DEVICE, dtype))


def make_bound(rows, *factors):
    """Return a bound with room for the scales of so many rows."""
    scales = torch.full((rows, 1), float("nan"), device=DEVICE)
    return Bound(torch.tensor(factors or (0.01, 0.3), device=DEVICE), scales)

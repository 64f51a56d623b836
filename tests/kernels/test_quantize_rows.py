# SPDX-License-Identifier: Apache-2.0
"""The quantiser that keeps rows returns the bits of the plain PyTorch reference."""

import pytest
import torch
from _quantized import MANY, RAGGED, bits, make_inputs, make_scales

from cases import (
    CASES,
    LARGE,
    Case,
    params,
)
from vllm_flashinfer_vit.kernels.quantize_ref import quantize_rows_ref
from vllm_flashinfer_vit.kernels.quantize_rows import quantize_rows

pytestmark = pytest.mark.usefixtures("nan_empty", "exact_fp8")


def check(case, *args) -> None:
    for out, expected in zip(
        quantize_rows(*args), quantize_rows_ref(*args), strict=True
    ):
        assert out.is_contiguous() and out.shape == expected.shape
        assert torch.equal(bits(out), bits(expected))
        assert (out[case.tokens :].float() == 0).all()


@pytest.mark.parametrize("case", params([RAGGED, *CASES[-3:]], extended=LARGE))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "width", "rotary_dim"),
    [(2, 2, 72, 128, 72), (2, 1, 80, 80, None), (3, 1, 72, 80, 40), (1, 1, 64, 64, 64)],
)
def test_rows_of_every_kind(case, heads, kv_heads, head_dim, width, rotary_dim):
    inputs = make_inputs(case, heads, head_dim, rotary_dim, kv_heads=kv_heads)
    args = *inputs[:4], make_scales(0.01, 0.02, 1e-3), width, *inputs[4:]
    for interleaved in (False, True):
        check(case, *args, interleaved)


def test_rows_of_many_sequences():
    inputs = make_inputs(MANY, 1, 32)
    check(MANY, *inputs[:4], make_scales(0.01, 0.02, 1e-3), 64)


def test_padding_rows_are_zeros_whatever_they_held():
    """NaN saturates to NaN, which a test of zeros sees; large numbers are likelier."""
    case = Case("two", (140, 20), repeats=1, pad_rows=100)
    inputs = make_inputs(case, 2, 72, 72, pad_value=1e4)
    check(case, *inputs[:4], make_scales(0.01, 0.02, 1e-3), 80, *inputs[4:])


def test_rows_rejects_what_it_cannot_read():
    q, k, v, cu_seqlens, *_ = make_inputs(Case("8", (8,)), 2, 64)
    with pytest.raises(ValueError, match="got 60"):
        quantize_rows(q, k, v, cu_seqlens, make_scales(1, 1, 1), 60)

# SPDX-License-Identifier: Apache-2.0
"""What the tests of the kernels for FP8 take in and compare."""

import torch

from cases import Case, make_cos_sin, make_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter truncates when it converts to bf16.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
RAGGED = Case("ragged", (130, 1, 128, 0, 5), zeros=1, pad_rows=3)
# More sequences than are searched at once, in few rows.
MANY = Case("many", tuple(i % 3 for i in range(1100)), zeros=4, pad_rows=200)


def make_inputs(case, heads, head_dim, rotary_dim=None, dtype=DTYPE, **kwargs):
    qkv = make_qkv(case, heads, head_dim, dtype, device=DEVICE, **kwargs)
    angles = (None, None)
    if rotary_dim is not None:
        angles = make_cos_sin(case, rotary_dim, dtype, device=DEVICE)
    return *qkv, case.cu_seqlens(DEVICE), *angles


def make_scales(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bits to compare, with one NaN for both: its sign means nothing."""
    if x.dtype != torch.float8_e4m3fn:
        return x
    bits = x.view(torch.uint8)
    return bits.where(bits != 0xFF, 0x7F)

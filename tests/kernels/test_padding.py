# SPDX-License-Identifier: Apache-2.0
"""Padding rows become zeros, nothing else changes, and offsets never fall."""

import pytest
import torch

from cases import CASES, make_qkv, params
from vllm_flashinfer_vit.kernels.padding import mask_padding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("case", params([case for case in CASES if case.rows]))
def test_cases(case):
    qkv = make_qkv(case, 3, 72, torch.float16, kv_heads=1, device=DEVICE)
    before = [x.clone() for x in qkv]
    out = torch.full((case.rows, 3, 72), float("nan"), device=DEVICE)
    cu_seqlens = case.cu_seqlens(DEVICE)
    mended = mask_padding(cu_seqlens, qkv[2], out)
    assert torch.equal(mended, cu_seqlens.cummax(0).values.int())
    assert out[: case.tokens].isnan().all()
    assert (out[case.tokens :] == 0).all()
    assert (qkv[2][case.tokens :] == 0).all()
    for x, old in zip(qkv, before, strict=True):
        assert torch.equal(x[: case.tokens], old[: case.tokens])
    for x in qkv[:2]:
        assert x[case.tokens :].isnan().all()

# SPDX-License-Identifier: Apache-2.0
"""Rows behind the last sequence become zeros; the others are copied bit for bit."""

import pytest
import torch

from cases import SHORT_CASES, make_qkv, params
from vllm_flashinfer_vit.kernels.zero_tail import zero_tail

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.usefixtures("nan_empty")
@pytest.mark.parametrize("head_dim", [72, 5])
@pytest.mark.parametrize("case", params(SHORT_CASES))
def test_cases(case, head_dim):
    v = make_qkv(case, 3, head_dim, torch.float16, device=DEVICE)[2]
    end = torch.tensor([0, case.tokens], dtype=torch.int32, device=DEVICE)
    out = zero_tail(v, end)
    assert out.is_contiguous()
    assert torch.equal(out[: case.tokens], v[: case.tokens])
    assert (out[case.tokens :] == 0).all()

# SPDX-License-Identifier: Apache-2.0
"""What the blocks' program reads of norms that are PyTorch's own."""

import pytest
import torch
from torch import nn

from vllm_flashinfer_vit.blocks.norms import Norm, is_known
from vllm_flashinfer_vit.kernels.add_norm_ref import sum_norm_ref
from vllm_flashinfer_vit.models import deepseek_v4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 64


def deepseek_v4_norm() -> nn.Module:
    vision = pytest.importorskip("vllm.models.deepseek_v4.common.vision")
    return vision.DeepseekV4RMSNorm(WIDTH, eps=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.RMSNorm(WIDTH),
        lambda: nn.RMSNorm(WIDTH, eps=1e-3),
        lambda: nn.LayerNorm(WIDTH, eps=1e-3),
        deepseek_v4_norm,
    ],
    ids=["RMSNorm, no eps", "RMSNorm", "LayerNorm", "DeepSeek-V4.1's"],
)
def test_values_so_small_that_eps_counts(make, dtype):
    module = make().to(DEVICE, dtype)
    assert is_known(module, deepseek_v4.SPEC.own_norm)
    norm = Norm(module)
    generator = torch.Generator().manual_seed(0)
    x = (1e-3 * torch.randn(5, WIDTH, generator=generator)).to(DEVICE, dtype)
    with torch.inference_mode():
        expected = module(x)
        terms = [x, torch.zeros_like(x)]
        found = sum_norm_ref(terms, norm.weight, norm.bias, norm.eps, False)[1]
    # With another eps they would be off by a half or more.
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)


def test_a_norm_of_a_models_own_is_known_to_its_blocks_alone():
    assert not is_known(deepseek_v4_norm())


def test_norms_without_parameters_are_unknown():
    assert not is_known(nn.RMSNorm(WIDTH, elementwise_affine=False))
    assert not is_known(nn.LayerNorm(WIDTH, elementwise_affine=False))
    assert not is_known(nn.RMSNorm((2, WIDTH)))

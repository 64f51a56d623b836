# SPDX-License-Identifier: Apache-2.0
"""Which FlashAttention vLLM picks for an engine's encoder, and which one then runs."""

import logging

import pytest
import torch

from cases import Case, make_qkv
from vllm_flashinfer_vit.kernels import flash_attn as kernel
from vllm_flashinfer_vit.kernels.catalog import KERNELS

no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="replaces the real FlashAttention"
)


@no_gpu
def test_no_version_for_the_gpu_is_an_error(monkeypatch):
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size: None)
    with pytest.raises(RuntimeError, match="head dim 80.*VLLM_FLASHINFER_VIT_KERNEL"):
        kernel.fa_version(80)


@no_gpu
def test_the_engine_that_is_built_last_decides_the_version(monkeypatch, caplog):
    from vllm.v1.attention.backends import fa_utils

    picked: list[int] = []
    monkeypatch.setattr(kernel, "_VERSIONS", {})
    monkeypatch.setattr(
        fa_utils, "get_flash_attn_version", lambda head_size: picked[-1]
    )
    monkeypatch.setattr(kernel, "_varlen_func", lambda: run)
    monkeypatch.setattr(kernel, "_forward_3", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ran: list[int] = []

    def run(q, k, v, *, fa_version, **kwargs):
        ran.append(fa_version)

    logger = logging.getLogger("vllm.plugins.flashinfer_vit")
    monkeypatch.setattr(logger, "propagate", True)
    q, k, v = make_qkv(Case("8", (8,)), 1, 80, torch.float16)
    cu_seqlens = torch.tensor([0, 8], dtype=torch.int32)
    for version in (2, 2, 3):
        picked.append(version)
        KERNELS["flash_attn"].decide(80)
        # While an engine runs vLLM knows nothing of what it was configured with.
        picked.append(2)
        kernel.prepare(q, k, v, cu_seqlens, 8, 0.1)()
    assert ran == [2, 2, 3]
    (said,) = caplog.messages
    assert "FlashAttention 3" in said and "no longer on 2" in said

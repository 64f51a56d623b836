# SPDX-License-Identifier: Apache-2.0
"""Inputs of cuDNN's FP8 attention, and what is right."""

import torch

from cases import Case, make_qkv, relative_error
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
IMAGES = Case("two-images", (100, 28))
# Rounding to e4m3 is off by up to 2^-4 and by 2.6 % on average; the weights' errors
# average out, and Hopper rounds the output too.
LIMIT = 0.05


def quantize(x, width):
    """Per-tensor e4m3 `[T, H, width]` and its scale `[1] fp32`."""
    real = x[x.isfinite().all(-1).all(-1)].float()
    amax = real.abs().max() if real.numel() else torch.ones((), device=x.device)
    scale = (amax / FP8_MAX).reshape(1)
    x8 = torch.zeros(*x.shape[:2], width, dtype=FP8, device=x.device)
    x8[..., : x.shape[2]] = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return x8, scale


def make(case, heads, head_dim, width, *, kv_heads=None, device="cpu", seed=0):
    """Quantised q, k, v and scales; rows of no sequence are NaN, to be seen if read."""
    qkv = make_qkv(
        case,
        heads,
        head_dim,
        torch.float16,
        kv_heads=kv_heads,
        device=device,
        seed=seed,
    )
    (q, q_scale), (k, k_scale), (v, v_scale) = (quantize(x, width) for x in qkv)
    return q, k, v, torch.cat([q_scale, k_scale, v_scale])


def expected(qkv, scales, case, scale, head_dim):
    """Attention in fp32 on what the quantised tensors stand for."""
    q, k, v = (
        x[..., :head_dim].float().nan_to_num() * s
        for x, s in zip(qkv, scales, strict=True)
    )
    cu_seqlens = case.cu_seqlens(q.device)
    return attention_ref(q, k, v, cu_seqlens, max(case.max_seqlen, 1), scale)


def assert_right(out, qkv, scales, case, scale, head_dim):
    assert out.shape == (*qkv[0].shape[:2], head_dim) and out.is_contiguous()
    assert not out.isnan().any()
    assert (out[case.tokens :] == 0).all()
    want = expected(qkv, scales, case, scale, head_dim)
    assert relative_error(out[: case.tokens], want[: case.tokens]) <= LIMIT

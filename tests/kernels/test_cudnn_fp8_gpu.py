# SPDX-License-Identifier: Apache-2.0
"""cuDNN's FP8 attention on a GPU against fp32."""

import functools
import math

import pytest
import torch
from _cudnn_fp8 import FP8, FP8_MAX, IMAGES, LIMIT, assert_right, make

from cases import CASES, GPU_CASES, Case, params
from vllm_flashinfer_vit.choices.trial import attempt
from vllm_flashinfer_vit.kernels import cudnn_fp8 as kernel
from vllm_flashinfer_vit.machine.versions import MIN_CUDNN_FP8_HOPPER

DEVICE = "cuda"


@functools.cache
def _refusal():
    return attempt("cudnn_fp8", 80, torch.bfloat16)


@pytest.fixture
def served():
    """Skips where cuDNN has no FP8 attention for this GPU."""
    if refusal := _refusal():
        pytest.skip(refusal)


def _run(made, case, head_dim, dtype=torch.bfloat16):
    *qkv, scales = made
    return kernel.attention(
        *qkv,
        scales,
        case.cu_seqlens(DEVICE),
        case.max_seqlen,
        head_dim**-0.5,
        head_dim,
        dtype,
    )


def _make(case, head_dim, **options):
    width = kernel.padded_head_dim(head_dim, torch.device(DEVICE, 0))
    return make(case, 16, head_dim, width, device=DEVICE, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
def test_gpu_attempt_finds_it_right(head_dim, dtype):
    major = torch.cuda.get_device_capability()[0]
    if major not in (9, 10):
        pytest.skip("cuDNN has FP8 attention for Hopper and data-centre Blackwell")
    answer = attempt("cudnn_fp8", head_dim, dtype)
    frontend, _ = kernel._frontend()
    if major == 9 and frontend.backend_version() < MIN_CUDNN_FP8_HOPPER:
        assert "FP8 on Hopper needs cuDNN" in answer
        torch.cuda.synchronize()
        return
    if major == 9:
        # Seen with cuDNN 9.24: Hopper's FP8 sums lose the small terms of long rows.
        assert "values around 2" in answer
        return
    assert answer is None


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 80])
@pytest.mark.parametrize("case", params(CASES + GPU_CASES))
def test_gpu_cases(served, nan_empty, case, head_dim):
    made = _make(case, head_dim)
    out = _run(made, case, head_dim)
    assert_right(out, made[:3], made[3], case, head_dim**-0.5, head_dim)


@pytest.mark.gpu
def test_gpu_grouped_heads(served, nan_empty):
    made = _make(IMAGES, 80, kv_heads=4)
    out = _run(made, IMAGES, 80)
    assert_right(out, made[:3], made[3], IMAGES, 80**-0.5, 80)


@pytest.mark.gpu
def test_gpu_the_largest_output_does_not_saturate(served, nan_empty):
    case = Case("one", (4096,))
    q, k, v, scales = _make(case, 72)
    v[..., :72] = torch.full_like(v[..., :72].half(), FP8_MAX).to(FP8)
    out = _run((q, k, v, scales), case, 72)
    limit = (FP8_MAX * scales[2]).item()
    assert not out.isnan().any()
    assert out.min() >= (1 - LIMIT) * limit and out.max() <= limit * (1 + 2**-7)


@pytest.mark.gpu
def test_gpu_the_second_pass_goes_beyond_int32():
    rows = 2**31 // (16 * 80) + 200
    padded = torch.ones(rows, 16, 128, device=DEVICE, dtype=torch.float16).to(FP8)
    scales = torch.tensor([1.0, 1.0, 3.0], device=DEVICE)
    end = (rows - 100) * 16 * 128
    offsets = torch.tensor([0, end], device=DEVICE).view(2, 1, 1, 1)
    out = kernel._finish(padded, scales, offsets, 80, torch.bfloat16)
    assert out.numel() > 2**31
    assert (out[:-100] == 3).all()
    assert not out[-100:].any()


@pytest.mark.gpu
def test_gpu_nan_stays_in_its_sequence(served, nan_empty):
    case = Case("three", (300, 500, 700))
    made = _make(case, 80)
    right = _run(made, case, 80)
    poisoned = tuple(x.clone() for x in made[:3])
    for x in poisoned:
        x[400] = torch.full_like(x[400].half(), math.nan).to(FP8)
    out = _run((*poisoned, made[3]), case, 80)
    assert out[300:800].isnan().any()
    assert torch.equal(out[:300], right[:300])
    assert torch.equal(out[800:], right[800:])


@pytest.mark.gpu
def test_gpu_replay_follows_lengths_and_scales(served):
    first = Case("first", (700, 300, 24))
    second = Case("second", (100, 600), zeros=1, pad_rows=324)
    made = tuple(x.clone() for x in _make(first, 80))
    cu_seqlens = first.cu_seqlens(DEVICE)

    def attend():
        *qkv, scales = made
        return kernel.attention(*qkv, scales, cu_seqlens, 1024, 0.1, 80, torch.bfloat16)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for case in (first, second):
        for mine, new in zip(made, _make(case, 80, seed=3), strict=True):
            mine.copy_(new)
        made[3].mul_(2)
        cu_seqlens.copy_(case.cu_seqlens(DEVICE))
        graph.replay()
        assert torch.equal(out, attend())
        assert_right(out, made[:3], made[3], case, 0.1, 80)

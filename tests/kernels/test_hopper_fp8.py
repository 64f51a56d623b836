# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel: that it compiles everywhere, and what it computes on a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases import GPU_CASES, Case, make_qkv, params, relative_error
from vllm_flashinfer_vit.kernels.hopper_fp8 import attention
from vllm_flashinfer_vit.kernels.quantize import quantize_blocks
from vllm_flashinfer_vit.reference.flash_fp8 import attention_fp8_ref

pytestmark = pytest.mark.usefixtures("nan_empty", "exact_fp8")

# See test_flash_fp8.py.
TOLERANCE = 1 / 16


@pytest.mark.parametrize("head_dim", [72, 80])
def test_hopper_fp8_fits_its_registers(head_dim):
    """Gluon changes between releases; no GPU is needed to see whether it still fits.

    Two scalars may spill (Triton 3.8): one is loaded once a tile, one once a block.
    """
    script = Path(__file__).with_name("compile_hopper_fp8.py")
    env = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), str(head_dim)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    spills = re.search(
        r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr
    )
    assert spills, done.stderr
    assert max(map(int, spills.groups())) <= 8
    # The compiler's word for waiting behind every product.
    assert "serialized" not in done.stderr


def _args(case, head_dim):
    cu_seqlens = case.cu_seqlens("cuda")
    dtype = torch.bfloat16
    return cu_seqlens, case.rows, case.max_seqlen, head_dim**-0.5, head_dim, dtype


def _quantized(case, heads, head_dim, **kwargs):
    qkv = make_qkv(case, heads, head_dim, torch.bfloat16, device="cuda", **kwargs)
    return qkv, quantize_blocks(*qkv, case.cu_seqlens("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 64, 72, 80])
@pytest.mark.parametrize("case", params(GPU_CASES))
def test_hopper_fp8_of_every_case(case, head_dim):
    _, quantized = _quantized(case, 16, head_dim)
    args = _args(case, head_dim)
    out = attention(quantized, *args)
    assert out.is_contiguous() and (out[case.tokens :] == 0).all()
    expected = attention_fp8_ref(quantized, *args[:-1], torch.float32)
    assert relative_error(out, expected) < TOLERANCE
    assert torch.equal(attention(quantized, *args), out)


@pytest.mark.gpu
def test_hopper_fp8_of_grouped_heads():
    case = Case("ragged", (130, 1, 640, 0, 5), pad_rows=3)
    _, quantized = _quantized(case, 8, 72, kv_heads=2)
    args = _args(case, 72)
    expected = attention_fp8_ref(quantized, *args[:-1], torch.float32)
    assert relative_error(attention(quantized, *args), expected) < TOLERANCE


@pytest.mark.gpu
def test_hopper_fp8_of_blocks_of_unlike_scales():
    case = Case("one", (600,))
    q, k, v = make_qkv(case, 1, 64, torch.bfloat16, device="cuda")
    for i, factor in enumerate((1.0, 1e-3, 100.0, 0.1, 1.0)):
        v[i * 128 : (i + 1) * 128] *= factor
        k[i * 128 : (i + 1) * 128] *= 1 + i / 4
    args = _args(case, 64)
    quantized = quantize_blocks(q, k, v, args[0])
    expected = attention_fp8_ref(quantized, *args[:-1], torch.float32)
    assert relative_error(attention(quantized, *args), expected) < TOLERANCE


@pytest.mark.gpu
def test_hopper_fp8_loses_no_small_terms_of_a_long_sum():
    """Values with a mean add up; a sum in the tensor cores' 14 bits drops the rest."""
    case = Case("long", (16384,))
    q, k, v = make_qkv(case, 1, 72, torch.bfloat16, device="cuda")
    args = _args(case, 72)
    quantized = quantize_blocks(q, k, v + 2, args[0])
    expected = attention_fp8_ref(quantized, *args[:-1], torch.float32)
    assert relative_error(attention(quantized, *args), expected) < 5e-3


@pytest.mark.gpu
def test_hopper_fp8_of_a_sequence_is_the_same_in_a_batch():
    batch = Case("batch", (70, 1300, 7, 450))
    (q, k, v), quantized = _quantized(batch, 2, 80)
    together = attention(quantized, *_args(batch, 80))
    start = 0
    for length in batch.lengths:
        alone = Case("alone", (length,))
        rows = slice(start, start + length)
        start += length
        args = _args(alone, 80)
        own = quantize_blocks(q[rows], k[rows], v[rows], args[0])
        assert torch.equal(attention(own, *args), together[rows])


@pytest.mark.gpu
def test_hopper_fp8_keeps_bad_values_in_their_sequence():
    case = Case("three", (70, 170, 70))
    (q, k, v), quantized = _quantized(case, 1, 72)
    args = _args(case, 72)
    good = attention(quantized, *args)
    for x, value in ((q, "nan"), (k, "inf"), (v, "nan")):
        x[70:240] = float(value)
    out = attention(quantize_blocks(q, k, v, args[0]), *args)
    assert out[70:240].isnan().all()
    assert torch.equal(out[:70], good[:70])
    assert torch.equal(out[240:], good[240:])


@pytest.mark.gpu
def test_hopper_fp8_in_a_graph():
    captured = Case("captured", (512, 512), repeats=2)
    q, k, v = make_qkv(captured, 4, 72, torch.bfloat16, device="cuda")
    args = _args(captured, 72)

    def run() -> torch.Tensor:
        return attention(quantize_blocks(q, k, v, args[0]), *args)

    run()  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed, case in enumerate(
        [
            Case("shorter", (300, 20, 1), repeats=1, pad_rows=703),
            Case("zero-tail", (900,), zeros=3, pad_rows=124),
            Case("nothing", (), zeros=4, pad_rows=1024),
        ]
    ):
        new = make_qkv(case, 4, 72, torch.bfloat16, device="cuda", seed=seed)
        for x, y in zip((q, k, v), new, strict=True):
            x.copy_(y)
        args[0].copy_(case.cu_seqlens())
        graph.replay()
        assert torch.equal(out, run())
        assert (out[case.tokens :] == 0).all()


@pytest.mark.gpu
def test_hopper_fp8_rejects_what_it_cannot_do():
    case = Case("8", (8,))
    _, quantized = _quantized(case, 1, 64)
    cu_seqlens = case.cu_seqlens("cuda")
    with pytest.raises(ValueError, match="head dim 72"):
        attention(quantized, cu_seqlens, 8, 8, 0.1, 72, torch.bfloat16)
    with pytest.raises(ValueError, match=r"got -0\.5"):
        attention(quantized, cu_seqlens, 8, 8, -0.5, 64, torch.bfloat16)

# SPDX-License-Identifier: Apache-2.0
"""What the Hopper kernel alone must do; see test_flash_fp8.py for the rest."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _once import once

from cases import (
    Case,
    make_qkv,
    relative_error,
    values,
)
from vllm_flashinfer_vit.kernels import hopper_fp8
from vllm_flashinfer_vit.kernels._hopper import describe, point
from vllm_flashinfer_vit.kernels.flash_fp8_ref import attention_fp8_ref
from vllm_flashinfer_vit.kernels.formats import QuantizedQKV
from vllm_flashinfer_vit.kernels.quantize import quantize_blocks

pytestmark = pytest.mark.usefixtures("nan_empty", "exact_fp8")

attention = once(hopper_fp8.prepare)


@pytest.mark.parametrize(
    "head_dim", values([72, 128], extended=[32, 48, 56, 64, 80, 88, 96, 112])
)
def test_hopper_fp8_fits_its_registers(head_dim):
    """Gluon changes between releases; no GPU is needed to see whether it still fits.

    Scalars may spill at two head dims (Triton 3.8), three or four, once a tile.
    """
    script = Path(__file__).with_name("compile_hopper.py")
    env = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), "hopper_fp8", str(head_dim)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    spills = re.search(
        r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr
    )
    assert spills, done.stderr
    assert max(map(int, spills.groups())) <= {48: 16, 88: 36}.get(head_dim, 0)
    # The compiler's word for waiting after every product.
    assert "serialized" not in done.stderr


def test_a_descriptor_of_another_tensor_is_like_a_new_one():
    x = torch.zeros(2, 128, 96, dtype=torch.float8_e4m3fn)
    kept = describe(x, 64, 32)
    # Later launches must not keep the memory of the first one's tensor.
    assert kept.base is None
    y = torch.zeros_like(x)
    layout = kept.layout
    new = hopper_fp8.TensorDescriptor(
        y, [2, 128, 96], [12288, 96, 1], [1, 64, 32], layout
    )
    pointed = point(kept, y)
    assert type(pointed) is type(new) and pointed.base is y
    assert vars(pointed) | {"base": None} == vars(new) | {"base": None}
    assert kept.base is None
    assert point(describe(x, 64, 0), y) is None


@pytest.mark.parametrize("num_tokens", [100, 200])
def test_hopper_fp8_without_sequences_clears_all_rows(monkeypatch, num_tokens):
    """There is room for no tile, nor in 100 rows for a block to describe."""
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    rows = num_tokens // 128 * 128
    x = torch.zeros(2, rows, 96, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(2, rows // 128)
    quantized = QuantizedQKV(x, x, x.view(2, 96, rows)[:, :80], scales, scales, scales)
    cu_seqlens = torch.zeros(1, dtype=torch.int32)
    args = quantized, cu_seqlens, num_tokens, 0, 0.1, 80, torch.bfloat16
    out = attention(*args)
    assert out.shape == (num_tokens, 2, 80) and torch.equal(out, torch.zeros_like(out))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 112, 128])
def test_hopper_fp8_loses_no_small_terms_of_a_long_sum(head_dim):
    """Values with a mean add up; a sum in the tensor cores' 14 bits drops the rest."""
    case = Case("long", (16384,))
    q, k, v = make_qkv(case, 1, head_dim, torch.bfloat16, device="cuda")
    cu_seqlens = case.cu_seqlens("cuda")
    quantized = quantize_blocks(q, k, v + 2, cu_seqlens)
    scale = head_dim**-0.5
    args = quantized, cu_seqlens, case.rows, case.max_seqlen, scale, head_dim
    expected = attention_fp8_ref(*args, torch.float32)
    assert relative_error(attention(*args, torch.bfloat16), expected) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
@pytest.mark.parametrize("octaves", [1.5, 6.5, 12.5, 14.5, 40])
def test_hopper_fp8_of_one_large_weight_and_many_small_ones(head_dim, octaves):
    """Thousands of weights of 2^-12 are together worth more than the largest one."""
    case = Case("long", (8192,))
    _, k, v = make_qkv(case, 1, head_dim, torch.bfloat16, device="cuda")
    q, k = torch.ones_like(k), torch.zeros_like(k)
    k[5000] = octaves * math.log(2) / head_dim
    v[5000] = 40.0
    cu_seqlens = case.cu_seqlens("cuda")
    quantized = quantize_blocks(q, k, v + 1, cu_seqlens)
    args = quantized, cu_seqlens, case.rows, case.max_seqlen, 1.0, head_dim
    expected = attention_fp8_ref(*args, torch.float32)
    assert relative_error(attention(*args, torch.bfloat16), expected) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("sign", [1, -1])
def test_hopper_fp8_of_scores_beyond_the_codes_of_fp32(sign):
    """Scores of 10^11: the code before the best one's is the same in fp32."""
    case = Case("one", (600,))
    q, k, v = make_qkv(case, 1, 72, torch.float32, device="cuda")
    q[[5, 77, 300, 599]] *= 1e5
    k[[5, 77, 300, 599]] *= 1e5 * sign
    cu_seqlens = case.cu_seqlens("cuda")
    quantized = quantize_blocks(q, k, v, cu_seqlens)
    args = quantized, cu_seqlens, case.rows, case.max_seqlen, 72**-0.5, 72
    expected = attention_fp8_ref(*args, torch.float32)
    assert relative_error(attention(*args, torch.bfloat16), expected) < 1 / 16


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_hopper_fp8_weighs_as_well_as_codes_can(head_dim):
    """Weights, of q and k from N(0, 1), are off by 3 %."""
    case = Case("two", (1000, 3000))
    q, k, v = make_qkv(case, 2, head_dim, torch.bfloat16, device="cuda")
    cu_seqlens = case.cu_seqlens("cuda")
    quantized = quantize_blocks(q, k, v, cu_seqlens)
    scale = head_dim**-0.5
    args = quantized, cu_seqlens, case.rows, case.max_seqlen, scale, head_dim
    expected = attention_fp8_ref(*args, torch.float32)
    assert relative_error(attention(*args, torch.bfloat16), expected) < 0.035


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [80, 88, 96, 112, 128])
@pytest.mark.parametrize("sign", [1, -1])
def test_hopper_fp8_of_the_largest_scores(head_dim, sign):
    """Every product is as large as it may be, and their sum must fit fp16."""
    case = Case("two", (700, 65))
    q, k, v = make_qkv(case, 2, head_dim, torch.bfloat16, device="cuda")
    q.fill_(3.0)
    k.fill_(3.0 * sign)
    cu_seqlens = case.cu_seqlens("cuda")
    quantized = quantize_blocks(q, k, v, cu_seqlens)
    args = quantized, cu_seqlens, case.rows, case.max_seqlen, 1.0, head_dim
    expected = attention_fp8_ref(*args, torch.float32)
    out = attention(*args, torch.bfloat16)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [80, 88, 96, 112, 128])
@pytest.mark.parametrize("tail", ["zeros", "repeats"])
@pytest.mark.parametrize("lengths", [(4096,), (300, 0, 2500, 17)], ids=str)
def test_hopper_fp8_passes_over_empty_sequences(lengths, tail, head_dim):
    outs = []
    for count in (0, 1500):
        case = Case("tail", lengths, pad_rows=200, **{tail: count})
        qkv = make_qkv(case, 16, head_dim, torch.bfloat16, device="cuda")
        cu_seqlens = case.cu_seqlens("cuda")
        quantized = quantize_blocks(*qkv, cu_seqlens)
        scale = head_dim**-0.5
        args = quantized, cu_seqlens, case.rows, case.max_seqlen, scale, head_dim
        outs.append(attention(*args, torch.bfloat16))
    assert torch.equal(*outs)
    assert not outs[0][sum(lengths) :].any()

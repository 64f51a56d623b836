# SPDX-License-Identifier: Apache-2.0
"""The FP8 kernels that take blocks, against plain PyTorch on the same blocks."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from _once import once

from cases import (
    CASES,
    GPU_CASES,
    LARGE,
    Case,
    make_cos_sin,
    make_qkv,
    params,
    relative_error,
    values,
)
from vllm_flashinfer_vit.kernels import flash_fp8, hopper_fp8
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.kernels.flash_fp8_ref import attention_fp8_ref
from vllm_flashinfer_vit.kernels.quantize import quantize_blocks
from vllm_flashinfer_vit.kernels.rope_ref import rope_ref

pytestmark = pytest.mark.usefixtures("nan_empty", "exact_fp8")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter truncates when it converts to bf16.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# Weights have 3 bits of mantissa: an error of at most 1/16 each, in hopper_fp8 8 %, and
# 1/64 to 1/32 in the mean; a sequence of one token has one weight, which is exact.
TOLERANCE = 1 / 16


KERNELS = {"triton_fp8": flash_fp8.prepare, "hopper_fp8": hopper_fp8.prepare}
GPU_ONLY = pytest.param("hopper_fp8", marks=pytest.mark.gpu)


@pytest.fixture(params=["triton_fp8", GPU_ONLY])
def attention(request) -> Callable[..., torch.Tensor]:
    """A kernel, where the GPU is one that it is for."""
    if request.param == "hopper_fp8" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return once(KERNELS[request.param])


def _quantized(case, heads, head_dim, **kwargs):
    qkv = make_qkv(case, heads, head_dim, DTYPE, device=DEVICE, **kwargs)
    return qkv, quantize_blocks(*qkv, case.cu_seqlens(DEVICE))


def _args(case, head_dim):
    cu_seqlens = case.cu_seqlens(DEVICE)
    return cu_seqlens, case.rows, case.max_seqlen, head_dim**-0.5, head_dim, DTYPE


def _assert_right(out, quantized, case, args) -> None:
    assert out.is_contiguous() and out.dtype == args[-1]
    assert (out[case.tokens :] == 0).all()
    expected = attention_fp8_ref(quantized, *args[:-1], torch.float32)
    # |v| of N(0, 1) stays below 5 here.
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=TOLERANCE * 5)
    assert relative_error(out, expected) < TOLERANCE


def test_fp8_of_one_layout_in_two_dtypes(attention):
    """A variant that was compiled for one output dtype must not write the other."""
    case = Case("300", (300,))
    _, quantized = _quantized(case, 1, 72)
    args = _args(case, 72)[:-1]
    expected = attention_fp8_ref(quantized, *args, torch.float32)
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        out = attention(quantized, *args, dtype)
        assert out.dtype == dtype
        assert relative_error(out, expected) < 0.05


def test_launches_of_two_dtypes_are_two():
    """Triton's interpreter compiles nothing, so that no result shows it here."""
    case = Case("300", (300,))
    _, quantized = _quantized(case, 1, 72)
    sizes = (quantized.q, quantized.v, case.cu_seqlens(DEVICE), case.rows, 1.0, 72)
    half, bfloat = (
        flash_fp8._plan(*sizes, dtype) for dtype in (torch.float16, torch.bfloat16)
    )
    assert half is not bfloat
    assert half is flash_fp8._plan(*sizes, torch.float16)


@pytest.mark.parametrize("case", params(CASES, extended=LARGE))
def test_fp8_of_every_case(attention, case):
    _, quantized = _quantized(case, 1, 72)
    args = _args(case, 72)
    _assert_right(attention(quantized, *args), quantized, case, args)


@pytest.mark.parametrize(
    "head_dim", values([40, 72, 80, 128], extended=[32, 56, 64, 88, 96, 104, 112, 120])
)
def test_fp8_of_every_head_dim(attention, head_dim):
    case = Case("ragged", (130, 1, 64, 0, 5), pad_rows=3)
    _, quantized = _quantized(case, 2, head_dim, kv_heads=1)
    args = _args(case, head_dim)
    _assert_right(attention(quantized, *args), quantized, case, args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
@pytest.mark.parametrize("head_dim", values([112], extended=[104]))
def test_nothing_after_v_is_read(head_dim, monkeypatch):
    """A tile of 128 columns has room for more than the 112 that v has."""
    from triton.runtime import interpreter

    case = Case("two", (40, 3))
    _, quantized = _quantized(case, 1, head_dim)
    v = quantized.v
    memory = torch.zeros(2 * v.numel(), dtype=torch.uint8)
    at_start = memory[: v.numel()].view(v.dtype).view(v.shape).copy_(v)
    after = memory.data_ptr() + v.numel()
    read: list[int] = []
    compiled = interpreter._interpreter

    def load(pointers, mask, *rest):
        addresses = pointers[mask]
        read.append(int(((addresses >= after) & (addresses < after + v.numel())).sum()))
        return compiled.load(pointers, mask, *rest)

    monkeypatch.setattr(
        interpreter, "_interpreter", SimpleNamespace(load=load, store=compiled.store)
    )
    args = _args(case, head_dim)
    out = once(flash_fp8.prepare)(quantized._replace(v=at_start), *args)
    assert read and not any(read)
    _assert_right(out, quantized, case, args)


def test_fp8_of_grouped_heads(attention):
    case = Case("two", (140, 5))
    _, quantized = _quantized(case, 4, 64, kv_heads=2)
    args = _args(case, 64)
    _assert_right(attention(quantized, *args), quantized, case, args)


def test_fp8_of_blocks_of_unlike_scales(attention):
    """The scales of k and v change from block to block by orders of magnitude."""
    case = Case("one", (600,))
    q, k, v = make_qkv(case, 1, 64, DTYPE, device=DEVICE)
    for i, factor in enumerate((1.0, 1e-3, 100.0, 0.1, 1.0)):
        v[i * 128 : (i + 1) * 128] *= factor
        k[i * 128 : (i + 1) * 128] *= 1 + i / 4
    quantized = quantize_blocks(q, k, v, case.cu_seqlens(DEVICE))
    args = _args(case, 64)
    expected = attention_fp8_ref(quantized, *args[:-1], torch.float32)
    assert relative_error(attention(quantized, *args), expected) < TOLERANCE


def test_fp8_of_rotated_heads(attention):
    case = Case("two", (200, 60))
    q, k, v = make_qkv(case, 2, 72, DTYPE, device=DEVICE)
    cos, sin = make_cos_sin(case, 72, DTYPE, device=DEVICE)
    cu_seqlens, *rest = _args(case, 72)
    out = attention(quantize_blocks(q, k, v, cu_seqlens, cos, sin), cu_seqlens, *rest)
    q, k = rope_ref(q, k, cos, sin)
    expected = attention_ref(q, k, v, cu_seqlens, case.max_seqlen, 72**-0.5)
    assert relative_error(out, expected) < 0.1


def test_fp8_of_a_sequence_is_the_same_in_a_batch(attention):
    batch = Case("batch", (70, 200, 7))
    (q, k, v), quantized = _quantized(batch, 2, 80)
    together = attention(quantized, *_args(batch, 80))
    start = 0
    for length in batch.lengths:
        alone = Case("alone", (length,))
        rows = slice(start, start + length)
        start += length
        cu_seqlens = alone.cu_seqlens(DEVICE)
        own = quantize_blocks(q[rows], k[rows], v[rows], cu_seqlens)
        assert torch.equal(attention(own, *_args(alone, 80)), together[rows])


def test_fp8_keeps_bad_values_in_their_sequence(attention):
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


def test_fp8_keeps_a_bad_query_in_its_row(attention):
    """v is good: only scores can show it."""
    case = Case("two", (70, 300))
    (q, k, v), _ = _quantized(case, 1, 72)
    args = _args(case, 72)
    q[200, 0, 3] = 0
    good = attention(quantize_blocks(q, k, v, args[0]), *args)
    q[200, 0, 3] = float("nan")
    out = attention(quantize_blocks(q, k, v, args[0]), *args)
    assert out[200].isnan().all()
    out[200] = good[200]
    assert torch.equal(out, good)


@pytest.mark.parametrize("place", [0, 150, 299])
def test_fp8_shows_a_bad_key(attention, place):
    """In the first block of keys, between others and in the last one."""
    case = Case("two", (70, 300))
    (q, k, v), quantized = _quantized(case, 1, 72)
    args = _args(case, 72)
    good = attention(quantized, *args)
    k[70 + place, 0, 3] = float("inf")
    out = attention(quantize_blocks(q, k, v, args[0]), *args)
    assert out[70:].isnan().all()
    assert torch.equal(out[:70], good[:70])


def test_fp8_of_offsets_beyond_all_rows(attention):
    case = Case("two", (70, 170))
    _, quantized = _quantized(case, 1, 72)
    cu_seqlens, *args = _args(case, 72)
    expected = attention(quantized, cu_seqlens, *args)
    cu_seqlens[-1] = 2**31 - 1
    assert torch.equal(attention(quantized, cu_seqlens, *args), expected)


def test_fp8_of_scores_far_from_zero(attention):
    case = Case("two", (200, 65))
    q, k, v = make_qkv(case, 1, 64, torch.float32, device=DEVICE)
    q, k = q.abs() + 3, -k.abs() - 3  # every score lies near -800
    quantized = quantize_blocks(q, k, v, case.cu_seqlens(DEVICE))
    args = case.cu_seqlens(DEVICE), case.rows, 200, 0.5, 64, DTYPE
    expected = attention_fp8_ref(quantized, *args[:-1], torch.float32)
    assert relative_error(attention(quantized, *args), expected) < TOLERANCE


@pytest.mark.parametrize("head_dim", values([72], extended=[96, 128]))
def test_fp8_of_scores_beyond_fp16(attention, head_dim):
    """Four tokens are a thousand times as large: their scores reach 10^7."""
    case = Case("one", (600,))
    qkv = make_qkv(case, 1, head_dim, torch.float32, device=DEVICE)
    for x in qkv:
        x[[5, 77, 300, 599]] *= 1000
    quantized = quantize_blocks(*qkv, case.cu_seqlens(DEVICE))
    scale = head_dim**-0.5
    args = case.cu_seqlens(DEVICE), case.rows, 600, scale, head_dim, torch.bfloat16
    expected = attention_fp8_ref(quantized, *args[:-1], torch.float32)
    assert relative_error(attention(quantized, *args), expected) < TOLERANCE


def test_fp8_rejects_what_it_cannot_do(attention):
    case = Case("8", (8,))
    _, quantized = _quantized(case, 1, 64)
    cu_seqlens = case.cu_seqlens(DEVICE)
    with pytest.raises(ValueError, match="head dim 72"):
        attention(quantized, cu_seqlens, 8, 8, 0.1, 72, DTYPE)
    with pytest.raises(ValueError, match="128 tokens"):
        attention(quantized, cu_seqlens, 128, 8, 0.1, 64, DTYPE)
    with pytest.raises(ValueError, match=r"got -0\.5"):
        attention(quantized, cu_seqlens, 8, 8, -0.5, 64, DTYPE)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 88, 96, 112, 128])
@pytest.mark.parametrize("case", params(GPU_CASES))
def test_fp8_as_the_engine_runs_it(attention, case, head_dim):
    _, quantized = _quantized(case, 16, head_dim)
    args = _args(case, head_dim)
    out = attention(quantized, *args)
    _assert_right(out, quantized, case, args)
    assert torch.equal(attention(quantized, *args), out)


@pytest.mark.gpu
def test_fp8_of_many_sequences(attention):
    # More than either kernel searches at once, and padding after them.
    case = Case("many", (130, 1, 0, 64) * 400, zeros=700, pad_rows=100)
    _, quantized = _quantized(case, 4, 72, kv_heads=2)
    args = _args(case, 72)
    _assert_right(attention(quantized, *args), quantized, case, args)


@pytest.mark.gpu
@pytest.mark.slow
def test_fp8_beyond_int32(attention):
    # The output has 2.2e9 elements, and so have the quantised tensors.
    case = Case("1700x1000", (1000,) * 1700, pad_rows=1000)
    qkv = torch.empty(case.rows, 3, 16, 80, dtype=DTYPE, device="cuda").normal_()
    qkv = qkv.unbind(1)
    args = _args(case, 80)
    out = attention(quantize_blocks(*qkv, args[0]), *args)
    assert out.numel() > 2**31
    assert not out[case.tokens :].any()
    one = Case("one", (1000,))
    args = _args(one, 80)
    # First, around 2^31 elements of the output and of q, and last.
    for sequence in (0, 1397, 1398, 1676, 1677, 1678, 1699):
        rows = slice(1000 * sequence, 1000 * (sequence + 1))
        quantized = quantize_blocks(*(x[rows] for x in qkv), args[0])
        assert torch.equal(attention(quantized, *args), out[rows])


@pytest.mark.gpu
def test_fp8_in_a_graph(attention):
    captured = Case("captured", (512, 512), repeats=2)
    q, k, v = make_qkv(captured, 4, 72, DTYPE, device="cuda")
    cu_seqlens = captured.cu_seqlens("cuda")
    args = cu_seqlens, captured.rows, 1024, 72**-0.5, 72, DTYPE

    def run() -> torch.Tensor:
        return attention(quantize_blocks(q, k, v, cu_seqlens), *args)

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
        new = make_qkv(case, 4, 72, DTYPE, device="cuda", seed=seed)
        for x, y in zip((q, k, v), new, strict=True):
            x.copy_(y)
        cu_seqlens.copy_(case.cu_seqlens())
        graph.replay()
        assert torch.equal(out, run())
        assert (out[case.tokens :] == 0).all()

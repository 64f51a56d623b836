# SPDX-License-Identifier: Apache-2.0
"""What every attention kernel owes its caller, on the GPU.

The measure is fp32 on the same inputs, the yardstick twice the error of FlashAttention
as stock vLLM calls it.
"""

from collections.abc import Callable

import pytest
import torch
from _once import once

from cases import CASES, GPU_CASES, Case, make_qkv, params, relative_error
from vllm_flashinfer_vit.kernels import cudnn
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.kernels.catalog import KERNELS, Kernel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_empty")]

HEADS = 4
# Of tests for which any will do, where a kernel takes it: Qwen2-VL's.
HEAD_DIM = 80


def _is_for_all(kernel: Kernel) -> bool:
    """Whether it takes q, k and v as they are, in fp16 and bf16, of any length."""
    special = kernel.is_fp8 or kernel.rotates or kernel.is_reference
    return not special and kernel.max_len is None


@pytest.fixture(params=[name for name, one in KERNELS.items() if _is_for_all(one)])
def kernel(request) -> Kernel:
    found = KERNELS[request.param]
    major = found.needs.major
    if major not in (None, torch.cuda.get_device_capability()[0]):
        pytest.skip(f"{found.name} is for compute capability {major}")
    return found


@pytest.fixture
def attention(kernel) -> Callable[..., torch.Tensor]:
    return once(kernel.load_prepare())


@pytest.fixture
def head_dim(kernel) -> int:
    return _nearest(kernel, HEAD_DIM)


def _nearest(kernel: Kernel, head_dim: int) -> int:
    """Return the nearest head dim that the kernel's record says it takes."""
    least, most = kernel.needs.head_dims or (head_dim, head_dim)
    return min(max(head_dim, least), most)


def _stock_error(qkv, case: Case, scale: float, expected: torch.Tensor) -> float:
    """Error of vLLM's FlashAttention on the real rows, contiguous."""
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
    )

    cu_seqlens = Case(case.name, case.lengths).cu_seqlens("cuda")
    out = flash_attn_varlen_func(
        *(x[: case.tokens].contiguous() for x in qkv),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=case.max_seqlen,
        max_seqlen_k=case.max_seqlen,
        softmax_scale=scale,
        causal=False,
        fa_version=get_flash_attn_version(head_size=qkv[0].shape[2]),
    )
    return relative_error(out, expected)


def _expected(qkv, case: Case, scale: float) -> torch.Tensor:
    """fp32 attention of the real rows."""
    q, k, v = (x[: case.tokens].float() for x in qkv)
    cu_seqlens = Case(case.name, case.lengths).cu_seqlens("cuda")
    return attention_ref(q, k, v, cu_seqlens, case.max_seqlen, scale)


def _assert_right(out: torch.Tensor, qkv, case: Case, scale: float) -> None:
    assert out.shape == qkv[0].shape
    assert out.dtype == qkv[0].dtype
    assert out.is_contiguous()
    if case.tokens == 0:
        return
    expected = _expected(qkv, case, scale)
    real = out[: case.tokens]
    assert not real.isnan().any()
    assert relative_error(real, expected) <= 2 * _stock_error(
        qkv, case, scale, expected
    )


def _run(attention, qkv, case: Case, scale: float) -> torch.Tensor:
    return attention(*qkv, case.cu_seqlens("cuda"), case.max_seqlen, scale)


def _make(case: Case, head_dim: int, dtype=torch.bfloat16, heads=HEADS, **kwargs):
    return make_qkv(case, heads, head_dim, dtype, device="cuda", **kwargs)


# Only a graph's replay has padding: eagerly, vLLM's rows all belong to a sequence.
EAGER_CASES = [c for c in CASES + GPU_CASES if not c.zeros and not c.pad_rows]


@pytest.mark.parametrize("case", params(EAGER_CASES))
@pytest.mark.parametrize(
    ("wanted", "kv_heads", "dtype"),
    [
        (80, 4, torch.bfloat16),
        (72, 4, torch.bfloat16),
        (64, 2, torch.float16),
        (128, 1, torch.bfloat16),
    ],
)
def test_it_is_as_exact_as_eager(kernel, attention, case, wanted, kv_heads, dtype):
    head_dim = _nearest(kernel, wanted)
    qkv = _make(case, head_dim, dtype, kv_heads=kv_heads)
    out = _run(attention, qkv, case, head_dim**-0.5)
    _assert_right(out, qkv, case, head_dim**-0.5)


def test_layouts_and_scales_in_one_process(attention, head_dim):
    case = Case("two-images", (1000, 24))
    q, k, v = _make(case, head_dim)
    pq, pk, pv = q.contiguous(), k.contiguous(), v.contiguous()
    layouts = [
        (pq, pk, pv),
        (q, k, v),
        (pq, pk, v),
        (pq, k, pv),
        (q, pk, pv),
        tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)),
    ]
    for _ in range(2):
        for scale in (head_dim**-0.5, 0.5):
            for qkv in layouts:
                _assert_right(_run(attention, qkv, case, scale), qkv, case, scale)


def test_twice_the_same_bits(attention, head_dim):
    case = Case("mixed", (988, 64, 1, 300))
    qkv = _make(case, head_dim)
    first = _run(attention, qkv, case, 0.1)
    assert torch.equal(_run(attention, qkv, case, 0.1), first)


# What one captured graph is replayed for: its own shape, fewer tokens, fewer
# sequences, longer sequences, nothing at all.
REPLAYS = [
    Case("as-captured", (128,) * 8),
    Case("zero-tail", (10, 10), zeros=6, pad_rows=1004),
    Case("one-sequence", (512,), zeros=7, pad_rows=512),
    Case("repeated-tail", (300, 7, 500), repeats=5, pad_rows=217),
    Case("empty-inside", (0, 100, 0, 0, 1, 0, 33, 0), pad_rows=890),
    Case("full-uneven", (1, 511, 2, 510), zeros=4),
    Case("nothing", (), zeros=8, pad_rows=1024),
]


@pytest.mark.parametrize("wanted", [80, 72])
def test_replays_hold_their_own_batch(kernel, attention, wanted):
    head_dim = _nearest(kernel, wanted)
    scale = head_dim**-0.5
    first = REPLAYS[0]
    static_qkv = _make(first, head_dim)
    static_cu = first.cu_seqlens("cuda")
    args = (*static_qkv, static_cu, 512, scale)
    attention(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*args)
    for seed, case in enumerate(REPLAYS):
        qkv = _make(case, head_dim, seed=seed)  # rows of no sequence are NaN
        for static, new in zip(static_qkv, qkv, strict=True):
            static.copy_(new)
        static_cu.copy_(case.cu_seqlens("cuda"))
        graph.replay()
        once = out.clone()
        graph.replay()
        assert torch.equal(out, once), case.name
        assert (out[case.tokens :] == 0).all(), case.name
        _assert_right(out, qkv, case, scale)


def test_replay_after_larger_eager_calls(attention, head_dim):
    """What a graph uses must survive whatever is built and allocated after it."""
    case = REPLAYS[0]
    qkv = _make(case, head_dim)
    args = (*qkv, case.cu_seqlens("cuda"), 128, 0.1)
    eager = attention(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*args)
    large = Case("large", (64,) * 3000 + (4096,))
    _run(attention, _make(large, head_dim, heads=16), large, 0.1)
    torch.full((1 << 28,), float("nan"), device="cuda")
    out.zero_()
    graph.replay()
    assert torch.equal(out, eager)


def test_max_seqlen_may_be_loose(attention, head_dim):
    case = Case("windows", (64,) * 30)
    qkv = _make(case, head_dim)
    out = attention(*qkv, case.cu_seqlens("cuda"), case.rows, 0.1)
    _assert_right(out, qkv, case, 0.1)


def test_no_token(attention, head_dim):
    empty = torch.empty(0, HEADS, head_dim, dtype=torch.bfloat16, device="cuda")
    cu_seqlens = torch.zeros(2, dtype=torch.int32, device="cuda")
    out = attention(empty, empty, empty, cu_seqlens, 0, 0.1)
    assert out.shape == empty.shape


@pytest.mark.slow
def test_beyond_int32(attention, head_dim):
    # The output alone has 2.2e9 elements, the projection three times as many.
    heads = -(-1280 // head_dim)
    lengths = (1000,) * 1700
    case = Case("1700x1000", lengths)
    shape = case.rows, 3, heads, head_dim
    qkv = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    qkv.normal_()
    q, k, v = qkv.unbind(1)
    out = _run(attention, (q, k, v), case, head_dim**-0.5)
    assert out.numel() > 2**31
    # First, around 2^31 elements of the projection, of the output, and last.
    for sequence in (0, 558, 559, 560, 1676, 1677, 1678, 1699):
        rows = slice(1000 * sequence, 1000 * (sequence + 1))
        one = Case("one", (1000,))
        _assert_right(out[rows], (q[rows], k[rows], v[rows]), one, head_dim**-0.5)


@pytest.mark.slow
def test_one_long_sequence_among_many(attention, head_dim):
    # cuDNN declares 32 x 131072 here: 5.4e9 elements a tensor with 16 heads.
    case = Case("long-and-short", (66000, *(100,) * 30))
    qkv = _make(case, head_dim, heads=16)
    out = _run(attention, qkv, case, head_dim**-0.5)
    for rows in (slice(0, 66000), slice(66000, 66100), slice(68900, 69000)):
        one = Case("one", (rows.stop - rows.start,))
        heads = slice(0, 2)
        part = tuple(x[rows, heads].contiguous() for x in qkv)
        _assert_right(out[rows, heads].contiguous(), part, one, head_dim**-0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
def test_cudnn_gives_a_token_alone_its_value(head_dim, dtype):
    case = Case("tokens", (1, 1, 1))
    q, k, v = _make(case, head_dim, dtype)
    assert torch.equal(_run(once(cudnn.prepare), (q, k, v), case, head_dim**-0.5), v)


def test_cudnn_says_why_not():
    case = Case("one", (100,))
    with pytest.raises(RuntimeError, match="multiple of 8"):
        _run(once(cudnn.prepare), _make(case, 76), case, 0.1)


def test_cudnn_builds_one_plan_for_a_bucket():
    first = Case("any", (700, 800))
    _run(once(cudnn.prepare), _make(first, 112), first, 0.1)
    before = cudnn.PLANS.built
    for lengths in ((1024,), (513,) * 8, (600, 1)):
        case = Case("any", lengths)
        qkv = _make(case, 112)
        _assert_right(_run(once(cudnn.prepare), qkv, case, 0.1), qkv, case, 0.1)
    assert cudnn.PLANS.built == before


def test_cudnn_refuses_to_build_during_capture():
    case = Case("one", (100,))
    _run(once(cudnn.prepare), _make(case, 80), case, 0.1)
    qkv = _make(case, 104)
    cu_seqlens = case.cu_seqlens("cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="before the capture"),
        torch.cuda.graph(graph),
    ):
        cudnn.prepare(*qkv, cu_seqlens, 100, 0.1)()
    _assert_right(_run(once(cudnn.prepare), qkv, case, 0.1), qkv, case, 0.1)

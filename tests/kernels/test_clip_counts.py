# SPDX-License-Identifier: Apache-2.0
"""How many blocks the quantisers count, and how many of them as cut off."""

import functools

import pytest
import torch
from _quantized import DEVICE, RAGGED, bits, make_inputs, make_scales

from cases import CASES, GPU_CASES, LARGE, Case, params, values
from vllm_flashinfer_vit.kernels import quantize
from vllm_flashinfer_vit.kernels.formats import BLOCK, cut_off_above, qk_max
from vllm_flashinfer_vit.kernels.quantize import quantize_blocks
from vllm_flashinfer_vit.kernels.quantize_ref import (
    quantize_blocks_ref,
    quantize_rows_ref,
)
from vllm_flashinfer_vit.kernels.quantize_rows import quantize_rows

pytestmark = pytest.mark.usefixtures("nan_empty", "exact_fp8")

# The largest of 128 values from N(0, 1) lies on both sides of 448 times these.
SCALES = 3.6 / 448, 3.4 / 448, 3.5 / 448


@pytest.fixture(params=["blocks", "rows"])
def kind(request):
    return request.param


def count(kind, inputs, scales, interleaved=False, is_reference=False):
    """Return the counts of one call, and what it returned."""
    counts = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    blocks, rows = quantize_blocks, quantize_rows
    if is_reference:
        blocks, rows = quantize_blocks_ref, quantize_rows_ref
    q, k, v, cu_seqlens, cos, sin = inputs
    if kind == "blocks":
        out = blocks(q, k, v, cu_seqlens, cos, sin, scales, interleaved, counts)
    else:
        width = -(-q.shape[2] // 16) * 16
        args = q, k, v, cu_seqlens, scales, width, cos, sin, interleaved
        out = rows(*args, counts)
    return counts, out


def ones(lengths, heads=2, kv_heads=2, head_dim=64, **kwargs):
    """Return inputs of ones, of which tests change some."""
    case = Case("ones", lengths, **kwargs)
    inputs = make_inputs(case, heads, head_dim, kv_heads=kv_heads, pad_value=1e4)
    for x in inputs[:3]:
        x[: case.tokens] = 1
    return inputs


@pytest.mark.parametrize("case", params([RAGGED, *CASES], extended=LARGE))
def test_counts_of_every_case(kind, case):
    inputs = make_inputs(case, 2, 72, 72, kv_heads=1, pad_value=1e4)
    scales = make_scales(*SCALES)
    counts, _ = count(kind, inputs, scales)
    expected, _ = count(kind, inputs, scales, is_reference=True)
    assert torch.equal(counts, expected)


@pytest.mark.parametrize("head_dim", values([56, 128], extended=[80]))
@pytest.mark.parametrize("interleaved", [False, True])
def test_some_blocks_are_cut_off(kind, head_dim, interleaved):
    """The bits that are written do not depend on whether anyone counts."""
    inputs = make_inputs(RAGGED, 2, head_dim, head_dim, kv_heads=1)
    # Nearly all of the large blocks are beyond 2, none of one token beyond 5.
    scales = make_scales(2 / 448, 5 / 448, 3 / 448)
    counts, out = count(kind, inputs, scales, interleaved)
    expected, _ = count(kind, inputs, scales, interleaved, is_reference=True)
    assert torch.equal(counts, expected)
    assert 0 < counts[1, 0] <= counts[0, 0] and counts[1, 1] == 0
    q, k, v, cu_seqlens, *turns = inputs
    if kind == "blocks":
        plain = quantize_blocks(*inputs, scales, interleaved)
        # Blocks of no sequence are not written.
        plain, out = (
            (x.q[:, : 2 * BLOCK], x.k[:, : 2 * BLOCK], x.v[..., : 2 * BLOCK])
            for x in (plain, out)
        )
    else:
        width = out[0].shape[2]
        plain = quantize_rows(q, k, v, cu_seqlens, scales, width, *turns, interleaved)
    for x, y in zip(out, plain, strict=True):
        assert torch.equal(bits(x), bits(y))


def test_a_block_is_128_tokens_of_a_head_of_a_sequence():
    inputs = ones((130, 1, 0, 128), heads=4, kv_heads=2, zeros=2, pad_rows=70)
    q, k, v, *_ = inputs
    q[129, 3] = -500
    k[130, 0, 5] = 500
    v[131:, 1] = 500
    v[5, 0] = v[6, 0] = v[7, 1] = 500
    counts, _ = count("blocks", inputs, make_scales(1, 1, 1))
    # Two blocks, one, none and one; what is padding counts nowhere.
    assert counts.tolist() == [[4 * 4, 4 * 2, 4 * 2], [1, 1, 3]]


def test_a_block_of_rows_is_128_rows_of_a_head():
    inputs = ones((130, 1, 0, 128), heads=4, kv_heads=2, repeats=2, pad_rows=200)
    q, k, v, *_ = inputs
    q[127, 3] = -500
    k[128, 0, 5] = k[258, 0, 5] = 500
    v[:128, 1] = 500
    counts, _ = count("rows", inputs, make_scales(1, 1, 1))
    # 259 rows: three blocks, though there are rows of padding for four.
    assert counts.tolist() == [[3 * 4, 3 * 2, 3 * 2], [1, 2, 1]]


@pytest.mark.parametrize("head_dim", values([56], extended=[88, 104, 112, 120]))
def test_a_block_of_rows_ends_before_the_next_one(head_dim):
    """A program's tiles may have room for more rows than its own."""
    inputs = ones((300,), head_dim=head_dim)
    for x in inputs[:3]:
        x[128] = 500
    counts, _ = count("rows", inputs, make_scales(1, 1, 1))
    assert counts.tolist() == [[3 * 2] * 3, [2] * 3]


def test_one_token_and_none(kind):
    scales = make_scales(1, 1, 1)
    inputs = ones((1,))
    inputs[1][0, 1, 7] = 1000
    assert count(kind, inputs, scales)[0].tolist() == [[2, 2, 2], [0, 1, 0]]
    for nothing in (ones(()), ones((0, 0), pad_rows=130)):
        assert not count(kind, nothing, scales)[0].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_cut_off(kind, bad):
    """It becomes NaN by every scale; a large number beside it counts all the same."""
    inputs = ones((128, 128))
    for x in inputs[:3]:
        x[:, 0] = bad
        x[3, 1, 9] = bad
        x[200, 1, 9] = bad
    inputs[2][201, 1, 3] = 1000
    counts, _ = count(kind, inputs, make_scales(1, 1, 1))
    assert counts.tolist() == [[4, 4, 4], [0, 0, 1]]
    expected, _ = count(kind, inputs, make_scales(1, 1, 1), is_reference=True)
    assert torch.equal(counts, expected)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_is_off_by_less_than_it_rounds_is_not_cut_off(kind, head_dim):
    """From 448 on numbers in e4m3 would be 32 apart: up to 464 they round to it."""
    most = qk_max(head_dim)
    end = 448 / most * (most + 1) if kind == "blocks" else 464
    for value, is_cut_off in ((end - 2, 0), (end + 2, 1)):
        inputs = ones((5,), heads=1, kv_heads=1, head_dim=head_dim)
        inputs[0][3, 0, 7] = value
        inputs[2][3, 0, 7] = 463 + 2 * is_cut_off
        counts, _ = count(kind, inputs, make_scales(1, 1, 1))
        assert counts[1].tolist() == [is_cut_off, 0, is_cut_off]


def test_where_rounding_ends():
    assert cut_off_above(448) == 464
    for largest in (28, 26, 24, 22):
        around = torch.tensor([0.99, 1.01]) * cut_off_above(largest)
        below, above = around.to(torch.float8_e4m3fn).float().tolist()
        assert below == largest < above


def test_calls_add_up(kind):
    inputs, scales = ones((300,)), make_scales(1, 1, 1)
    inputs[0][299] = 600
    q, k, v, cu_seqlens, *_ = inputs
    counts = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    # What 32 bits cannot hold.
    counts[0, 1] = 2**40
    if kind == "blocks":
        launch, _ = quantize.prepare(q, k, v, cu_seqlens, scales=scales, counts=counts)
        call = functools.partial(launch, scales, counts)
    else:

        def call():
            quantize_rows(q, k, v, cu_seqlens, scales, 64, counts=counts)

    for _ in range(3):
        call()
    assert counts.tolist() == [[18, 2**40 + 18, 18], [6, 0, 0]]


def test_a_prepared_call_counts_where_it_is_told():
    """Layers share it, each with scales and counts of its own."""
    inputs = make_inputs(RAGGED, 2, 72, 72, kv_heads=1)
    q, k, v, cu_seqlens, cos, sin = inputs
    layers = [make_scales(*SCALES), make_scales(*(0.9 * x for x in SCALES))]
    counts = torch.zeros(2, 2, 3, dtype=torch.int64, device=DEVICE)
    args = make_scales(1, 1, 1), False, torch.zeros_like(counts[0])
    launch, quantized = quantize.prepare(q, k, v, cu_seqlens, cos, sin, *args)
    for calls in (1, 2):
        for scales, found in zip(layers, counts, strict=True):
            launch(scales, found)
            expected, out = count("blocks", inputs, scales)
            assert torch.equal(found, calls * expected)
            assert torch.equal(bits(quantized.q), bits(out.q))
    assert not torch.equal(*counts) and not args[2].any()


def test_counts_are_refused():
    q, k, v, cu_seqlens, *_ = ones((8,))
    counts = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="need given scales"):
        quantize_blocks(q, k, v, cu_seqlens, counts=counts)
    scales = make_scales(1, 1, 1)
    for bad in (counts.int(), counts[0], counts.T.contiguous().T):
        with pytest.raises(ValueError, match="counts must be"):
            quantize_blocks(q, k, v, cu_seqlens, scales=scales, counts=bad)
        with pytest.raises(ValueError, match="counts must be"):
            quantize_rows(q, k, v, cu_seqlens, scales, 64, counts=bad)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
@pytest.mark.parametrize("case", params(GPU_CASES))
def test_counts_as_the_engine_runs_them(kind, case, head_dim):
    inputs = make_inputs(case, 16, head_dim, head_dim, kv_heads=8, pad_value=1e4)
    for scale in (4.2 / 448, 0.5 / 448, 20 / 448):
        scales = make_scales(scale, scale, scale)
        counts, _ = count(kind, inputs, scales)
        expected, _ = count(kind, inputs, scales, is_reference=True)
        assert torch.equal(counts, expected)


@pytest.mark.gpu
def test_replays_count(kind):
    """Real rows alone: what a graph's batch leaves of its buffers is padding."""
    q, k, v, cu_seqlens, cos, sin = make_inputs(Case("", (320,), repeats=2), 4, 72, 72)
    scales = make_scales(3.9 / 448, 3.9 / 448, 3.9 / 448)
    counts = torch.zeros(2, 3, dtype=torch.int64, device="cuda")

    def run():
        if kind == "blocks":
            quantize_blocks(q, k, v, cu_seqlens, cos, sin, scales, counts=counts)
        else:
            rest = scales, 80, cos, sin
            quantize_rows(q, k, v, cu_seqlens, *rest, counts=counts)

    run()  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    counts.zero_()
    expected = torch.zeros_like(counts)
    for seed, lengths in enumerate([(300, 20, 0), (1, 200), (128, 64)], start=1):
        case = Case("", lengths, repeats=3 - len(lengths), pad_rows=320 - sum(lengths))
        new = make_inputs(case, 4, 72, 72, seed=seed, pad_value=1e4)
        for x, y in zip((q, k, v, cu_seqlens), new, strict=False):
            x.copy_(y)
        graph.replay()
        inputs = q, k, v, cu_seqlens, cos, sin
        expected += count(kind, inputs, scales, is_reference=True)[0]
        assert torch.equal(counts, expected)
    assert 0 < counts[1].sum() < counts[0].sum()

# SPDX-License-Identifier: Apache-2.0
"""What a QKV projection that writes e4m3 returns on a Hopper GPU."""

import pytest
import torch
from _quantized import bits
from _quantizing_gemm import TOWERS, block_lengths, used
from _turning_gemm import BF16, FP8, hopper, make_layer

from cases import Case, relative_error
from vllm_flashinfer_vit.gemms.epilogue_gemm import Layer, project
from vllm_flashinfer_vit.gemms.quantizing_gemm import (
    build,
    compiled,
    empty,
    fits,
    prepare,
    quantized,
)
from vllm_flashinfer_vit.kernels.flash_fp8_ref import dequantize_ref
from vllm_flashinfer_vit.kernels.formats import BLOCK, qk_max
from vllm_flashinfer_vit.kernels.quantize_ref import key_order

pytestmark = [pytest.mark.usefixtures("nan_empty"), pytest.mark.gpu, hopper]

CASES = [
    # A sequence that ends at zero, and many that are empty: more than a warp has lanes.
    Case("ragged", (130, 1, 128, 0, 257, 1000), zeros=1, pad_rows=3),
    Case("empty tail", (300, 5), repeats=40, zeros=40, pad_rows=700),
    Case("one token", (1,)),
    Case("nothing", (), zeros=3, pad_rows=200),
    Case("many", (0, 3, 130) * 40, zeros=9, pad_rows=50),
    # More tiles than a wave.
    Case("large", (4096, 4000, 129), pad_rows=77),
]
DIMS = (1, 1, 2, 1, 1, 1)


def make(case, tower, *, dtype=BF16, table=torch.float32, kind="plain", seed=0):
    """Rows with NaN after the last sequence, a layer, tables, offsets."""
    heads, inputs = tower
    random = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, device="cuda")

    outputs = (heads.queries + 2 * heads.keys) * heads.head_dim
    shape = case.rows, heads.head_dim // 2
    angles = 50 * torch.rand(shape, generator=random, device="cuda")
    weight = (normal(outputs, inputs) / inputs**0.5).to(dtype)
    layer = make_layer(kind, weight, normal(outputs).to(dtype), case.rows)
    x = normal(case.rows, inputs)
    x[case.tokens :] = float("nan")
    x = x.to(dtype) if kind == "plain" else (20 * x).clamp(-400, 400).to(FP8)
    tables = angles.cos().to(table), angles.sin().to(table)
    return x, layer, *tables, case.cu_seqlens("cuda"), heads


def run(x, layer, cos, sin, cu_seqlens, heads, dtype=BF16, filler=None):
    out = empty(heads, len(x) // BLOCK + len(cu_seqlens) - 1, x.device)
    if filler is not None:
        for part in out:
            part.view(torch.uint8).fill_(filler)
    kernel = compiled(layer, heads, cos.dtype, dtype)
    prepare(kernel, x, cos, sin, cu_seqlens, out)(layer)
    return out


def is_same(one, other, lengths):
    """Whether the blocks of sequences have the same bits."""
    return all(
        torch.equal(used(bits(x), lengths, dim), used(bits(y), lengths, dim))
        for x, y, dim in zip(one, other, DIMS, strict=True)
    )


def assert_right(out, case, x, layer, cos, sin, cu_seqlens, heads):
    """Scales to fp32's accuracy, values to e4m3's, zeros where there is no token."""
    expected = quantized(project(x, layer), cos, sin, cu_seqlens, heads)
    lengths = block_lengths(case)
    # The tensor cores add products in e4m3 in fewer bits than fp32 has.
    is_fp8 = x.dtype == FP8
    rtol, most, share = (5e-3, 0.03, 0.03) if is_fp8 else (1e-3, 0.01, 0.005)
    for one, right in zip(out[3:], expected[3:], strict=True):
        found, wanted = used(one, lengths, 1), used(right, lengths, 1)
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=0)
    sizes = cu_seqlens, case.rows, out.q.shape[2]
    both = dequantize_ref(out, *sizes), dequantize_ref(expected, *sizes)
    for found, wanted in zip(*both, strict=True):
        assert not found.isnan().any()
        # Most are rounded to the same number in e4m3.
        assert not case.tokens or relative_error(found, wanted) < most
        largest = wanted.abs().max().item() if case.tokens else 0.0
        torch.testing.assert_close(found, wanted, rtol=0.15, atol=share * largest)
    v = out.v.float()[..., key_order(out.v.shape[2]).argsort().to(x.device)]
    is_empty = torch.arange(BLOCK) >= lengths[lengths > 0][:, None]
    for part in (out.q.float(), out.k.float(), v.transpose(1, 2)):
        # [blocks, rows, heads, columns]
        blocks = used(part, lengths, 1).transpose(1, 2)
        assert (blocks[is_empty.to(x.device)] == 0).all()
    if case.tokens:
        largest = used(out.q, lengths, 1).float().abs().max().item()
        assert largest <= qk_max(heads.head_dim)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tower", TOWERS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "table"),
    [(BF16, torch.float32), (BF16, BF16), (torch.float16, torch.float32)],
    ids=str,
)
def test_it_is_what_pytorch_makes(tower, case, dtype, table):
    inputs = make(case, tower, dtype=dtype, table=table)
    layer, heads = inputs[1], inputs[-1]
    assert fits(layer, heads, table, dtype)
    assert_right(run(*inputs, dtype), case, *inputs)
    bare = layer._replace(bias=None)
    inputs = inputs[0], bare, *inputs[2:]
    assert_right(run(*inputs, dtype), case, *inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tower", TOWERS, ids=str)
@pytest.mark.parametrize("kind", ["tensor", "tokens", "rows"])
def test_rows_in_fp8(tower, case, kind):
    inputs = make(case, tower, kind=kind)
    assert_right(run(*inputs), case, *inputs)


@pytest.mark.parametrize("kind", ["plain", "tokens"])
@pytest.mark.parametrize("tower", TOWERS, ids=str)
def test_a_trial_finds_nothing_wrong(tower, kind):
    inputs = make(CASES[0], tower, kind=kind)
    assert build(inputs[1], inputs[-1], torch.float32, BF16) is None


@pytest.mark.parametrize("tower", TOWERS, ids=str)
def test_it_gives_the_same_bits_twice(tower):
    case = CASES[-1]
    inputs = make(case, tower)
    assert is_same(run(*inputs), run(*inputs), block_lengths(case))


@pytest.mark.parametrize("tower", TOWERS[:5], ids=str)
def test_blocks_stay_apart(tower):
    """NaN in a token is NaN in its rows, and has no part in the scales of others."""
    case, at = CASES[0], 300
    x, *others = make(case, tower)
    cu_seqlens, heads = others[3:]
    before = run(x, *others)
    x[at] = float("nan")
    after = run(x, *others)
    lengths = block_lengths(case)
    # Token 300 is the 42nd of the fifth sequence.
    block, row = 259 // BLOCK + 4, 300 - 259
    assert all(scale[:, block].isfinite().all() for scale in after[3:])
    found = dequantize_ref(after, cu_seqlens, case.rows, heads.head_dim)
    for part in found:
        is_nan = part.isnan().any(2)
        assert is_nan[at].all() and is_nan.any(1).sum() == 1
    assert lengths[block] > row
    lengths[block] = 0  # what follows compares the other blocks
    assert is_same(before, after, lengths)


@pytest.mark.parametrize("beyond", [1000, 2**31 - 1])
@pytest.mark.parametrize("tower", TOWERS[:3], ids=str)
def test_offsets_beyond_all_rows_end_there(tower, beyond):
    case = Case("two", (70, 170))
    *inputs, cu_seqlens, heads = make(case, tower)
    expected = run(*inputs, cu_seqlens, heads, filler=0x55)
    cu_seqlens[-1] = beyond
    found = run(*inputs, cu_seqlens, heads, filler=0x55)
    assert all(map(torch.equal, map(bits, found), map(bits, expected)))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tower", TOWERS[:3], ids=str)
def test_blocks_of_no_sequence_stay(tower, case):
    out = run(*make(case, tower), filler=0x55)
    unused = 1 - block_lengths(case).clamp(max=1)
    for part, dim in zip(out, DIMS, strict=True):
        assert (used(part.view(torch.uint8), unused, dim) == 0x55).all()


@pytest.mark.parametrize("kind", ["plain", "tokens"])
@pytest.mark.parametrize("tower", TOWERS[:4], ids=str)
def test_one_call_serves_all_batches_and_layers_in_a_graph(tower, kind):
    """Batches of as many rows and offsets, in other lengths."""
    cases = [
        Case("one", (500, 524, 1000)),
        Case("zeros", (1900,), zeros=2, pad_rows=124),
        Case("other", (1024, 1, 999)),
    ]
    inputs = [make(c, tower, kind=kind, seed=i) for i, c in enumerate(cases)]
    x, layer, cos, sin, cu_seqlens, heads = inputs[0]
    layer = Layer(*(None if held is None else held.clone() for held in layer))
    held = tuple(given.clone() for given in (x, cos, sin, cu_seqlens))
    out = empty(heads, len(x) // BLOCK + 3, x.device)
    kernel = compiled(layer, heads, cos.dtype, BF16)
    call = prepare(kernel, *held, out)
    call(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(layer)
    for case, new in zip(cases[::-1], inputs[::-1], strict=True):
        for one, given in zip(held, (new[0], *new[2:5]), strict=True):
            one.copy_(given)
        for one, given in zip(layer, new[1], strict=True):
            if one is not None:
                one.copy_(given)
        graph.replay()
        assert is_same(out, run(*new), block_lengths(case))


@pytest.mark.parametrize("tower", TOWERS[:2], ids=str)
def test_attention_reads_it(tower):
    """As exact as behind the quantiser's own pass."""
    from vllm_flashinfer_vit.kernels import hopper_fp8, quantize

    case = Case("two", (900, 333), zeros=2, pad_rows=40)
    x, layer, cos, sin, cu_seqlens, heads = inputs = make(case, tower)
    rows = project(x, layer).to(BF16)
    sizes = heads.queries, heads.keys, heads.keys
    q, k, v = rows.unflatten(1, (-1, heads.head_dim)).split(sizes, dim=1)
    apart = quantize.quantize_blocks(
        q, k, v, cu_seqlens, cos, sin, interleaved=heads.is_interleaved
    )
    scale = heads.head_dim**-0.5
    given = cu_seqlens, case.rows, case.max_seqlen, scale, heads.head_dim, BF16
    expected = hopper_fp8.prepare(apart, *given)()
    found = hopper_fp8.prepare(run(*inputs), *given)()
    assert relative_error(found, expected) < 0.05

# SPDX-License-Identifier: Apache-2.0
"""The quantiser returns the bits of the plain PyTorch reference."""

import pytest
import torch
from _quantized import DEVICE, DTYPE, MANY, RAGGED, bits, make_inputs, make_scales

from cases import (
    CASES,
    GPU_CASES,
    LARGE,
    Case,
    make_cos_sin,
    params,
    relative_error,
    values,
)
from vllm_flashinfer_vit.kernels.flash_fp8_ref import dequantize_ref
from vllm_flashinfer_vit.kernels.formats import BLOCK
from vllm_flashinfer_vit.kernels.quantize import quantize_blocks
from vllm_flashinfer_vit.kernels.quantize_ref import (
    column_order,
    key_order,
    quantize_blocks_ref,
    quantize_rows_ref,
)
from vllm_flashinfer_vit.kernels.quantize_rows import quantize_rows
from vllm_flashinfer_vit.kernels.rope import rope
from vllm_flashinfer_vit.kernels.rope_ref import rope_ref

pytestmark = pytest.mark.usefixtures("nan_empty", "exact_fp8")

# For what a block does with its rows: the interpreter takes a program for each block.
FEW = Case("few", (130, 5), pad_rows=3)


def _assert_same(out, expected, cu_seqlens, num_tokens) -> None:
    """Compare the bits of all blocks that hold a sequence, padding included."""
    offsets = cu_seqlens.clamp(max=num_tokens).tolist()
    blocks = []
    for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        first = start // BLOCK + n
        blocks += range(first, first + -(-max(end - start, 0) // BLOCK))
    rows = [
        row for block in blocks for row in range(block * BLOCK, (block + 1) * BLOCK)
    ]
    for name, x, y in zip(out._fields, out, expected, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous(), name
        dim = 2 if name == "v" else 1
        index = torch.tensor(
            blocks if "scale" in name else rows, dtype=torch.int64, device=x.device
        )
        x, y = (bits(t).index_select(dim, index) for t in (x, y))
        assert torch.equal(x, y), name


@pytest.fixture(params=[False, True], ids=["halves", "interleaved"])
def interleaved(request):
    return request.param


def _check_blocks(inputs, scales=None, interleaved=False) -> None:
    out = quantize_blocks(*inputs, scales, interleaved)
    expected = quantize_blocks_ref(*inputs, scales, interleaved)
    _assert_same(out, expected, inputs[3], inputs[0].shape[0])


@pytest.mark.parametrize("case", params(CASES, extended=LARGE))
def test_blocks_of_every_case(case):
    _check_blocks(make_inputs(case, 1, 80, 80))


@pytest.mark.parametrize("scales", [None, (0.01, 0.5, 3e-3)], ids=["block", "given"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    values(
        [(72, 72), (80, 40), (128, 64), (56, None)],
        extended=[(64, 64), (80, 80), (96, 96), (128, 128), (32, 32), (40, 40)]
        + [(88, 88), (104, 8), (112, None), (120, 120)],
    ),
)
def test_blocks_of_every_head_dim(head_dim, rotary_dim, scales, interleaved):
    inputs = make_inputs(RAGGED, 2, head_dim, rotary_dim, kv_heads=1)
    scales = None if scales is None else make_scales(*scales)
    _check_blocks(inputs, scales, interleaved)


@pytest.mark.parametrize("tables", [DTYPE, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", values([64, 72], extended=[80, 128]))
def test_blocks_are_turned_as_rope_does(head_dim, tables, interleaved):
    q, k, v, cu_seqlens, cos, sin = make_inputs(FEW, 1, head_dim, head_dim)
    turns = cos.to(tables), sin.to(tables)
    out = quantize_blocks(q, k, v, cu_seqlens, *turns, None, interleaved)
    turned = rope(q, k, *turns, interleaved)
    _assert_same(out, quantize_blocks(*turned, v, cu_seqlens), cu_seqlens, len(q))


@pytest.mark.parametrize("kv_heads", [5, 10])
def test_blocks_of_many_heads(kv_heads):
    _check_blocks(make_inputs(Case("70", (70,)), 10, 72, 72, kv_heads=kv_heads))


@pytest.mark.parametrize(
    "dtype", dict.fromkeys((torch.float32, torch.float16, DTYPE)), ids=str
)
def test_blocks_of_every_dtype(dtype, interleaved):
    inputs = make_inputs(RAGGED, 2, 72, 72, dtype=dtype)
    _check_blocks(inputs, interleaved=interleaved)


def test_blocks_of_other_layouts(interleaved):
    q, k, v, cu_seqlens, cos, sin = make_inputs(Case("two", (90, 161)), 2, 72, 72)
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    # Rows of 2 * 72 + 1 elements: nothing is aligned to more than one element.
    odd = torch.zeros(251, 2 * 72 + 1, dtype=q.dtype, device=DEVICE)
    odd = odd[:, 1:].unflatten(1, (2, 72)).copy_(v)
    both = torch.cat([cos, sin], dim=1)
    tables = [both[:, :36], sin.T.contiguous().T]
    inputs = heads_first, k.contiguous(), odd, cu_seqlens, *tables
    _check_blocks(inputs, interleaved=interleaved)
    inputs = odd, odd, odd, cu_seqlens, cos[:1].expand(251, -1), sin
    _check_blocks(inputs, interleaved=interleaved)


@pytest.mark.parametrize("rotary_dim", values([40], extended=[72]))
def test_blocks_of_tables_in_fp32(rotary_dim, interleaved):
    q, k, v, cu_seqlens, cos, sin = make_inputs(FEW, 1, 72, rotary_dim)
    for tables in ((cos.float(), sin.float()), (cos, sin.float())):
        _check_blocks((q, k, v, cu_seqlens, *tables), interleaved=interleaved)


def test_blocks_of_offsets_beyond_the_last_row():
    q, k, v, _, cos, sin = make_inputs(Case("140", (140,)), 1, 64, 64)
    for offsets in ([0, 10, 7, 20], [0, 130, 900, 20], [0, 0, 140, 0]):
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
        _check_blocks((q, k, v, cu_seqlens, cos, sin))


@pytest.mark.gpu
def test_blocks_of_many_sequences():
    # A program for each sequence: the interpreter would take minutes.
    _check_blocks(make_inputs(MANY, 1, 32))


def test_order_of_keys():
    order = key_order(64)
    assert order[:16].tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert torch.equal(order[16:32], order[:16] + 16)
    assert torch.equal(order[32:], order[:32] + 32)


def test_order_of_columns():
    assert column_order(8, 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert column_order(8, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert column_order(8, 0).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_interleaved_pairs_lie_as_they_did():
    """What is stored is the head in its own order: a tower's complex product."""
    case = Case("two", (200, 60))
    q, k, v, cu_seqlens, cos, sin = make_inputs(case, 2, 72, 72, dtype=torch.float32)
    blocks = quantize_blocks(q, k, v, cu_seqlens, cos, sin, None, True)
    outs = dequantize_ref(blocks, cu_seqlens, case.rows, 72)
    turn = torch.complex(cos, sin)[:, None]
    for out, x in zip(outs[:2], (q, k), strict=True):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * turn).flatten(2)
        assert relative_error(out, turned) < 0.03


def test_blocks_stand_for_the_inputs():
    """What is stored means the input: independent of how the reference stores it."""
    case = Case("two", (200, 60))
    q, k, v, cu_seqlens, cos, sin = make_inputs(case, 2, 72, 72)
    outs = dequantize_ref(
        quantize_blocks(q, k, v, cu_seqlens, cos, sin), cu_seqlens, case.rows, 72
    )
    order = column_order(72, 72)
    q, k = (x[..., order] for x in rope_ref(q, k, cos, sin))
    for out, x in zip(outs, (q, k, v), strict=True):
        # Half a unit of three bits of mantissa.
        assert ((out - x.float()).abs() <= x.float().abs() / 16 + 2e-4).all()
        assert relative_error(out, x) < 0.03


def test_scales_are_of_the_block_alone():
    case = Case("two", (256, 128), pad_rows=40)
    q, k, v, cu_seqlens, _, _ = make_inputs(case, 2, 64, pad_value=1e4)
    for x in (q, k, v):
        x[: case.tokens] = 1.0
        x[128:256, 1] = -4.0
    out = quantize_blocks(q, k, v, cu_seqlens)
    for scale, largest in zip(out[3:], (28, 28, 448), strict=True):
        # The second sequence starts at block 256 // 128 + 1.
        expected = torch.tensor([[1.0, 1.0, 1.0], [1.0, 4.0, 1.0]], device=DEVICE)
        assert torch.equal(scale[:, [0, 1, 3]], expected / largest)


def test_torchs_default_dtype_changes_no_reference():
    """vLLM loads models, and warms layers up, with theirs as the default."""
    inputs = make_inputs(RAGGED, 2, 72)
    found = []
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            blocks = quantize_blocks_ref(*inputs)
            rows = dequantize_ref(blocks, inputs[3], RAGGED.rows, 72)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append((*blocks, *rows))
    for expected, out in zip(*found, strict=True):
        assert out.dtype == expected.dtype and torch.equal(bits(out), bits(expected))


def test_scales_know_no_row_of_the_next_block():
    # The half of D=88 is 11 runs: a tile of 128 rows is padded beyond them.
    case = Case("two", (256,))
    q, k, v, cu_seqlens, cos, sin = make_inputs(case, 1, 88, 88)
    for x in (q, k, v):
        x[128:] = 1e3
    _check_blocks((q, k, v, cu_seqlens, cos, sin))


def test_zeros_and_the_smallest_numbers():
    case = Case("three", (8, 8, 8))
    q, k, v, cu_seqlens, _, _ = make_inputs(case, 1, 64, dtype=torch.float32)
    for x in (q, k, v):
        x[:8] = 0.0
        x[8:16] *= 1e-42
    out = quantize_blocks(q, k, v, cu_seqlens)
    assert out.q_scale[0, 0] == 1 and (out.q[0, :8].float() == 0).all()
    assert out.q_scale[0, 1] == 2.0**-126 and out.q[:, 128:].float().isfinite().all()


def test_bad_values_stay_in_their_sequence():
    case = Case("three", (130, 130, 130))
    inputs = make_inputs(case, 1, 72, 72)
    good = quantize_blocks(*inputs)
    for x in inputs[:3]:
        x[130:260:4] = float("nan")
        x[131:260:4] = float("-inf")
    out = quantize_blocks(*inputs)
    _assert_same(out, quantize_blocks_ref(*inputs), inputs[3], case.rows)
    assert out.q_scale[:, [2, 3]].isfinite().all()
    for x, y in zip(out[:2] + out[3:], good[:2] + good[3:], strict=True):
        step = 1 if x.dim() == 2 else BLOCK
        x, y = bits(x), bits(y)
        assert torch.equal(x[:, : 2 * step], y[:, : 2 * step])
        # The last sequence starts at block 260 // 128 + 2.
        assert torch.equal(x[:, 4 * step : 6 * step], y[:, 4 * step : 6 * step])


def test_quantize_rejects_what_it_cannot_read():
    q, k, v, cu_seqlens, cos, sin = make_inputs(Case("8", (8,)), 2, 64, 64)
    with pytest.raises(ValueError, match="together"):
        quantize_blocks(q, k, v, cu_seqlens, cos)
    with pytest.raises(ValueError, match="R / 2"):
        quantize_blocks(q, k, v, cu_seqlens, cos[:7], sin[:7])
    with pytest.raises(ValueError, match="float64"):
        quantize_blocks(q, k, v, cu_seqlens, scales=make_scales(1, 1, 1).double())
    with pytest.raises(ValueError, match="one dtype"):
        quantize_blocks(q, k.float(), v, cu_seqlens)


@pytest.mark.gpu
@pytest.mark.parametrize("tables", [DTYPE, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
@pytest.mark.parametrize("case", params(GPU_CASES))
def test_blocks_as_the_engine_runs_them(case, head_dim, tables, interleaved):
    *qkv, cos, sin = make_inputs(case, 16, head_dim, head_dim)
    inputs = *qkv, cos.to(tables), sin.to(tables)
    for scales in (None, make_scales(0.01, 0.02, 0.01)):
        _check_blocks(inputs, scales, interleaved)
    args = *inputs, None, interleaved
    first, second = quantize_blocks(*args), quantize_blocks(*args)
    _assert_same(first, second, inputs[3], case.rows)


@pytest.mark.gpu
def test_quantize_in_a_graph(interleaved):
    lengths = [(300, 20, 0), (1, 319), (128, 128, 64)]
    inputs = make_inputs(Case("320", (320,), repeats=2), 4, 72, 72)
    q, k, v, cu_seqlens, cos, sin = inputs
    scales = make_scales(0.01, 0.02, 0.01)
    rows = q, k, v, cu_seqlens, scales, 128, cos, sin, interleaved
    blocks = *inputs, None, interleaved
    quantize_blocks(*blocks), quantize_rows(*rows)  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quantize_blocks(*blocks)
        out_rows = quantize_rows(*rows)
    for seed, replayed in enumerate(lengths, start=1):
        case = Case("replay", replayed, repeats=3 - len(replayed))
        for x, new in zip(
            (q, k, v), make_inputs(case, 4, 72, seed=seed)[:3], strict=True
        ):
            x.copy_(new)
        cu_seqlens.copy_(case.cu_seqlens())
        graph.replay()
        _assert_same(out, quantize_blocks(*blocks), cu_seqlens, 320)
        for x, y in zip(out_rows, quantize_rows(*rows), strict=True):
            assert torch.equal(bits(x), bits(y))


@pytest.mark.gpu
@pytest.mark.slow
def test_quantize_of_more_than_int32_elements():
    tokens = 600_000
    qkv = torch.randn(tokens, 3 * 16, 80, dtype=torch.bfloat16, device="cuda")
    assert qkv.numel() > 2**31
    q, k, v = qkv.split(16, dim=1)
    cos, sin = make_cos_sin(Case("600k", (tokens,)), 80, device="cuda")
    start = tokens - 300
    cu_seqlens = torch.tensor([0, start, tokens], dtype=torch.int32, device="cuda")
    out = quantize_blocks(q, k, v, cu_seqlens, cos, sin)
    part = slice(start, tokens)
    alone = torch.tensor([0, 300], dtype=torch.int32, device="cuda")
    expected = quantize_blocks_ref(
        q[part], k[part], v[part], alone, cos[part], sin[part]
    )
    block = start // BLOCK + 1
    rows = slice(block * BLOCK, (block + 3) * BLOCK)
    assert torch.equal(bits(out.q[:, rows]), bits(expected.q))
    assert torch.equal(bits(out.k[:, rows]), bits(expected.k))
    assert torch.equal(bits(out.v[..., rows]), bits(expected.v))
    assert torch.equal(out.v_scale[:, block : block + 3], expected.v_scale)
    scales = torch.tensor([0.01, 0.01, 0.01], device="cuda")
    for x, y in zip(
        quantize_rows(q, k, v, cu_seqlens, scales, 96, cos, sin),
        quantize_rows_ref(
            q[part], k[part], v[part], alone, scales, 96, cos[part], sin[part]
        ),
        strict=True,
    ):
        assert torch.equal(bits(x[part]), bits(y))

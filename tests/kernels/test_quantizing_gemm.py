# SPDX-License-Identifier: Apache-2.0
"""The QKV projection that writes e4m3: which it can be, and what it computes."""

import pytest
import torch
from _quantized import bits
from _quantizing_gemm import TOWERS, block_lengths, used
from _turning_gemm import BF16, FP8, HAS_RUNTIME, make_layer

from cases import Case, make_cos_sin, make_qkv
from vllm_flashinfer_vit.gemms import epilogue_gemm, quantizing_gemm
from vllm_flashinfer_vit.gemms.epilogue_gemm import Layer
from vllm_flashinfer_vit.gemms.quantizing_gemm import (
    build,
    column_order,
    compiled,
    fits,
    quantized,
    tile_of,
)
from vllm_flashinfer_vit.gemms.turning_gemm import Heads
from vllm_flashinfer_vit.kernels import quantize_ref
from vllm_flashinfer_vit.kernels.flash_fp8_ref import attention_fp8_ref
from vllm_flashinfer_vit.kernels.formats import BLOCK, check_blocks

RAGGED = Case("ragged", (130, 1, 128, 0, 257), zeros=1, pad_rows=3)


@pytest.mark.parametrize(
    ("heads", "columns"),
    [
        ((80, 16, 16), 160),
        ((80, 12, 4), 160),
        ((80, 3, 1), 80),
        ((72, 16, 16), 144),
        ((72, 16, 1), 0),
        ((64, 24, 3), 192),
        ((64, 16, 16), 128),
        ((112, 16, 16), 112),
        ((128, 12, 2), 128),
    ],
)
def test_a_tile_is_whole_heads_of_one_kind(heads, columns):
    tile = tile_of(Heads(*heads, False))
    assert (tile is None) == (columns == 0)
    if tile is not None:
        tiles = (heads[1] + 2 * heads[2]) * heads[0] // columns
        assert tile == (BLOCK, columns, (1, 1 if tiles % 2 else 2))


H80 = Heads(80, 16, 16, False)


@pytest.mark.parametrize(
    ("outputs", "heads", "expected"),
    [
        (3840, H80, True),
        (3840, H80._replace(is_interleaved=True), True),
        # Ranks may have other columns beside them.
        (3920, H80, False),
        (256 * 48, Heads(256, 16, 16, False), False),
        (24 * 48, Heads(24, 16, 16, False), False),
    ],
)
def test_which_projections_fit(outputs, heads, expected):
    weight = torch.empty(outputs, 1280, dtype=BF16)
    bias = torch.empty(outputs, dtype=BF16)
    assert fits(Layer(weight, bias), heads, torch.float32, BF16) is expected
    scaled = Layer(weight.to(FP8), None, torch.ones(1), torch.ones(outputs))
    assert fits(scaled, heads, torch.float32, BF16) is expected
    assert not fits(Layer(weight.float(), None), heads, torch.float32, BF16)


@pytest.mark.parametrize("head_dim", [64, 72, 80, 88, 96, 112, 128])
def test_each_column_is_stored_once(head_dim):
    order = column_order(head_dim)
    assert torch.equal(order.sort().values, torch.arange(-(-head_dim // 32) * 32))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("heads", [(72, 2, 2), (80, 4, 2), (64, 2, 1), (128, 1, 1)])
@pytest.mark.parametrize("case", [RAGGED, Case("whole", (256, 128))], ids=str)
def test_it_is_what_the_quantiser_makes(case, heads, is_interleaved):
    """But for the order of the columns of q and k, which both share."""
    heads = Heads(*heads, is_interleaved)
    dim, cu_seqlens, lengths = heads.head_dim, case.cu_seqlens(), block_lengths(case)
    q, k, v = make_qkv(case, heads.queries, dim, torch.float32, kv_heads=heads.keys)
    cos, sin = make_cos_sin(case, dim, torch.float32)
    rows = torch.cat([q, k, v], dim=1).flatten(1)
    found = quantized(rows, cos, sin, cu_seqlens, heads)
    expected = quantize_ref.quantize_blocks_ref(
        q, k, v, cu_seqlens, cos, sin, interleaved=is_interleaved
    )
    check_blocks(found.q, found.v, case.rows, len(cu_seqlens) - 1, dim, 1.0)
    assert all(map(torch.equal, found[3:], expected[3:]))
    order = column_order(dim).argsort()[:dim]
    theirs = quantize_ref.column_order(dim, 0 if is_interleaved else dim)
    if is_interleaved:
        theirs = torch.arange(dim)
    for one, right in zip(found[:2], expected[:2], strict=True):
        ours = one[..., order][..., theirs]
        same = used(bits(ours), lengths, 1) == used(bits(right[..., :dim]), lengths, 1)
        assert same.all()
    assert torch.equal(bits(found.v), bits(expected.v))
    given = cu_seqlens, case.rows, case.max_seqlen, dim**-0.5, dim, torch.float32
    both = attention_fp8_ref(found, *given), attention_fp8_ref(expected, *given)
    assert torch.allclose(*both, atol=1e-5)


def stored(tile, kind, head_dim):
    """What the kernel's threads write of a head of q or v: bytes in their places.

    It is `quantizing_kernel` by hand: `tile` is `[128, D]`.
    """
    groups = head_dim // 8
    if kind == "q":
        words = -(-head_dim // 32) * 8
        out = torch.full((BLOCK * words * 4,), -1)
    else:
        pairs = -(-groups // 2)
        words = BLOCK // 4
        out = torch.full((16 * pairs * words * 4,), -1)
    for thread in range(128):
        lane, warp = thread % 32, thread // 32
        row, col = 16 * warp + lane // 4, 2 * (lane % 4)

        def value(e, r, g, m, row=row, col=col):
            at = 64 * m + row + 8 * r, 8 * g + col + e
            return tile[at] if g < groups else 0

        for m in range(2):
            if kind == "q":
                for r in range(2):
                    base = 4 * (row * words + col + (64 * m + 8 * r) * words)
                    for byte in range(words):
                        s, i, j = byte // 8, byte // 4 % 2, byte % 4
                        place = base + 32 * s + 4 * i + j
                        out[place] = value(j % 2, r, 4 * s + 2 * i + j // 2, m)
                continue
            is_even = row % 2 == 0
            place = row // 16 * 4 + row % 8 // 2 + 16 * m
            own = 0 if is_even else 1
            for p in range(pairs):
                for half in range(2):
                    g = 2 * p + half
                    column = 8 * g + col + row % 2
                    step = 1 if is_even else -1
                    kept = [value(own, r, g, m) for r in range(2)]
                    taken = [value(own, r, g, m, row + step) for r in range(2)]
                    first, second = (kept, taken) if is_even else (taken, kept)
                    at = 4 * (column * words + place)
                    four = first[0], second[0], first[1], second[1]
                    out[at : at + 4] = torch.tensor([int(x) for x in four])
    return out


@pytest.mark.parametrize("head_dim", [64, 72, 80, 112])
def test_where_threads_store(head_dim):
    tile = 1 + torch.arange(BLOCK * head_dim).view(BLOCK, head_dim)
    columns = column_order(head_dim)
    padded = torch.nn.functional.pad(tile, (0, len(columns) - head_dim))
    assert torch.equal(stored(tile, "q", head_dim), padded[:, columns].flatten())
    padded = torch.nn.functional.pad(tile, (0, -head_dim % 16)).t()
    expected = padded[:, quantize_ref.key_order(BLOCK)].flatten()
    assert torch.equal(stored(tile, "v", head_dim), expected)


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("kind", ["plain", "rows"])
@pytest.mark.parametrize(("heads", "inputs"), TOWERS[:2], ids=str)
def test_results_are_compared(heads, inputs, kind, is_wrong, monkeypatch):
    """A kernel that computes what PyTorch does passes the trial, another does not."""
    outputs = (heads.queries + 2 * heads.keys) * heads.head_dim
    weight = torch.randn(outputs, inputs).div(inputs**0.5).to(BF16)
    layer = make_layer(kind, weight, torch.randn(outputs).to(BF16), 3)

    def prepare(kernel, x, cos, sin, cu_seqlens, out):
        def call(layer):
            sums = epilogue_gemm.project(x, layer)
            right = quantized(sums, cos, sin, cu_seqlens, heads)
            for held, found in zip(out, right, strict=True):
                held.view(torch.uint8).copy_(found.view(torch.uint8))
            if is_wrong:
                out.k_scale.mul_(1.5)

        return call

    monkeypatch.setattr(quantizing_gemm, "compiled", lambda *args: None)
    monkeypatch.setattr(quantizing_gemm, "prepare", prepare)
    reason = build(layer, heads, torch.float32, BF16)
    assert reason == ("its results are wrong" if is_wrong else None)


@pytest.mark.parametrize(
    ("rows", "table", "columns", "first", "expected"),
    [
        (700, torch.float32, 40, 0, True),
        # Less than 100 to each of seven sequences.
        (699, torch.float32, 40, 0, False),
        (700, BF16, 40, 0, False),
        (700, torch.float32, 20, 0, False),
        # An offset that is not where 16 bytes begin.
        (700, torch.float32, 40, 1, False),
    ],
)
def test_which_batches_it_reads(rows, table, columns, first, expected, monkeypatch):
    monkeypatch.setattr(quantizing_gemm, "compiled", lambda *args: None)
    layer = Layer(torch.empty(3840, 1280, dtype=BF16), None)
    kernels = quantizing_gemm.Kernels(layer, H80, torch.float32, BF16, 100)
    tables = torch.empty(rows, columns, dtype=table)
    offsets = torch.zeros(8, dtype=torch.int32)[first:]
    assert kernels.reads(rows, tables, tables, offsets) is expected
    # Attention refuses these, and names the layer.
    wrong = offsets.long(), offsets.repeat(2)[::2], offsets[:1], offsets.to("meta")
    for one in (*wrong, offsets[0], offsets[None]):
        assert not kernels.reads(rows, tables, tables, one)


@pytest.mark.skipif(not HAS_RUNTIME, reason="needs QuACK 0.6")
def test_kernels_are_found_by_all_that_they_compute(kernel_keys):
    """QuACK's folder is shared by all that a kernel's sources and constants make."""
    weight = torch.empty(3840, 1280, dtype=BF16)
    bias = torch.empty(3840, dtype=BF16)
    variants = [
        (Layer(weight, bias), H80, torch.float32),
        (Layer(weight, None), H80, torch.float32),
        (Layer(weight, bias), H80, BF16),
        (Layer(weight, bias), H80._replace(is_interleaved=True), torch.float32),
        (Layer(weight, bias), Heads(80, 32, 8, False), torch.float32),
    ]
    for layer, heads, table in variants:
        with pytest.raises(RuntimeError, match="compiled"):
            compiled(layer, heads, table, BF16)
    assert len(set(kernel_keys)) == len(variants)

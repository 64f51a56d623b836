# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel in bf16; its registers need no GPU."""

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
    CASES,
    GPU_CASES,
    TOLERANCES,
    Case,
    make_qkv,
    params,
    relative_error,
    values,
)
from vllm_flashinfer_vit.kernels import hopper_bf16
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref

pytestmark = pytest.mark.usefixtures("nan_empty")

attention = once(hopper_bf16.prepare)


def _qkv(case, heads, head_dim, **kwargs):
    return make_qkv(case, heads, head_dim, torch.bfloat16, device="cuda", **kwargs)


def _expected(qkv, case, scale):
    cu_seqlens = case.cu_seqlens("cuda")
    return attention_ref(*(x.float() for x in qkv), cu_seqlens, case.max_seqlen, scale)


def _assert_right(out, qkv, case, scale):
    assert out.is_contiguous() and out.dtype == torch.bfloat16
    assert not out[case.tokens :].any()
    expected = _expected(qkv, case, scale)
    atol = TOLERANCES[torch.bfloat16] * 5  # |v| of N(0, 1) stays below 5 here
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("variant", ["hopper_bf16", "hopper_bf16 few"])
@pytest.mark.parametrize("head_dim", values([80], extended=[64, 72, 88, 96, 112, 128]))
def test_hopper_bf16_fits_its_registers(variant, head_dim):
    """Gluon changes between releases; no GPU is needed to see whether it still fits.

    Above head dim 96 scalars may spill, once a tile but for two of them.
    """
    script = Path(__file__).with_name("compile_hopper.py")
    env = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), variant, str(head_dim)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    spills = re.search(
        r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr
    )
    assert spills, done.stderr
    assert max(map(int, spills.groups())) <= (16 if head_dim <= 96 else 72)
    # The compiler's word for waiting after every product.
    assert "serialized" not in done.stderr


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float16, 64), (torch.bfloat16, 56)], ids=str
)
def test_hopper_bf16_rejects_what_it_cannot_do(dtype, head_dim):
    x = torch.zeros(8, 1, head_dim, dtype=dtype)
    with pytest.raises(ValueError, match="takes bf16 and head dims from 64"):
        attention(x, x, x, torch.tensor([0, 8], dtype=torch.int32), 8, 1.0)


@pytest.mark.parametrize(("head_dim", "groups"), [(80, [2, 4]), (128, [2, 3])], ids=str)
def test_hopper_bf16_compiles_what_mends_each_variant(monkeypatch, head_dim, groups):
    """Marks are of a variant's tiles, and a capture may choose another than now."""
    settled, mended = [], []

    def settle(groups, *args):
        settled.append(groups)
        return None, torch.zeros(hopper_bf16.MARKS, dtype=torch.int32)

    def mend(q, k, v, cu_seqlens, marks, out, groups, scale):
        mended.append(groups)

    monkeypatch.setattr(hopper_bf16, "_settle_groups", settle)
    monkeypatch.setattr(hopper_bf16.redo, "prepare", mend)
    hopper_bf16._compile.__wrapped__(2, 1, head_dim, torch.device("cpu"))
    assert settled == mended == groups


def test_hopper_bf16_has_a_plan_for_each_gpu(monkeypatch):
    """Launches are shared by layout, which does not say how many processors it has."""
    processors = {0: 78, 1: 132}
    monkeypatch.setattr(hopper_bf16, "_processors", lambda gpu: processors[gpu.index])
    x = torch.zeros(4096, 16, 80, dtype=torch.bfloat16)
    given = 4, x, x, x, torch.tensor([0, 4096], dtype=torch.int32), 1.0
    for index, count in processors.items():
        launch, _, _ = hopper_bf16._plan(*given, torch.device("cuda", index))
        assert launch._grid == (count, 1, 1)


@pytest.fixture
def host(monkeypatch):
    """What the host does for a GPU that launches nothing: all that it notes."""
    host = SimpleNamespace(is_capturing=False, compiled=[], settled=[], ran=[])

    def settle(launch, *arguments):
        host.settled.append((launch, arguments))
        return lambda: host.ran.append(launch)

    monkeypatch.setattr(hopper_bf16.Launch, "settle", settle)
    monkeypatch.setattr(hopper_bf16, "_compile", lambda *of: host.compiled.append(of))
    monkeypatch.setattr(hopper_bf16, "_processors", lambda gpu: 132)
    capturing = "is_current_stream_capturing"
    monkeypatch.setattr(torch.cuda, capturing, lambda: host.is_capturing)
    return host


def _zeros(rows, *kv_heads, heads=4, head_dim=80):
    return [
        torch.zeros(rows, n, head_dim, dtype=torch.bfloat16)
        for n in (heads, *kv_heads, *kv_heads)
    ]


def test_hopper_bf16_hands_its_launches_what_they_read(host):
    q, k, v = _zeros(1000, 1, head_dim=104)
    cu_seqlens = torch.tensor([0, 700, 1000], dtype=torch.int32)
    call = hopper_bf16.prepare(q, k, v, cu_seqlens, 700, 0.5)
    assert host.compiled == [(4, 1, 104, q.device)]
    (attend, given), (mend, mended) = host.settled
    *descs, offsets, out, marks = given
    assert [desc.base for desc in descs] == [q, q, k, k, v, v]
    assert [desc.shape for desc in descs] == [[n, 1000, 104] for n in (4, 4, *[1] * 4)]
    boxes = [[1, 64, 64]] * 2 + [[1, 128, 64]] * 4
    assert [desc.block_shape for desc in descs] == boxes
    assert offsets is cu_seqlens and marks.numel() % hopper_bf16.MARKS == 0
    assert attend._scalars == (2, 1000, marks.numel(), 0.5 * hopper_bf16.LOG2_E)
    assert (attend._constants["H"], attend._constants["H_RATIO"]) == (4, 4)
    expected = q, k, v, cu_seqlens, out, marks
    assert all(a is b for a, b in zip(mended, expected, strict=True))
    assert mend._constants["PARTS"] == attend._constants["GROUPS"] == 2
    assert call() is out and out.shape == q.shape and out.is_contiguous()
    assert host.ran == [attend, mend]


def test_hopper_bf16_compiles_nothing_in_a_capture(host):
    host.is_capturing = True
    qkv = _zeros(1000, 2)
    cu_seqlens = torch.tensor([0, 1000], dtype=torch.int32)
    hopper_bf16.prepare(*qkv, cu_seqlens, 1000, 0.5)
    assert not host.compiled and len(host.settled) == 2


def test_hopper_bf16_of_no_rows_launches_nothing(host):
    cu_seqlens = torch.tensor([0, 0], dtype=torch.int32)
    out = attention(*_zeros(0, 2, head_dim=64), cu_seqlens, 0, 0.5)
    assert out.shape == (0, 4, 64) and not host.settled


@pytest.mark.parametrize("odd", range(3))
def test_hopper_bf16_attends_to_aligned_copies(monkeypatch, odd):
    seen = []

    def settle(*given):
        seen.append(given)
        return lambda: given[0]

    monkeypatch.setattr(hopper_bf16, "_settle", settle)
    qkv = _zeros(8, 2)
    qkv[odd] = torch.zeros(8, qkv[odd][0].numel() + 1, dtype=torch.bfloat16)
    qkv[odd] = qkv[odd][:, 1:].unflatten(1, (-1, 80))
    cu_seqlens = torch.tensor([0, 8], dtype=torch.int32)
    call = hopper_bf16.prepare(*qkv, cu_seqlens, 8, 0.5)
    # What they hold by then.
    qkv[odd].fill_(3.0)
    call()
    (given,) = seen
    assert all(map(hopper_bf16.is_aligned, given[:3]))
    assert all(map(torch.equal, given[:3], qkv))


@pytest.mark.parametrize("groups", [2, 3, 4])
@pytest.mark.parametrize("rest", [-1, 0, 1])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_hopper_bf16_has_a_mark_for_each_group_of_every_tile(host, groups, rest, count):
    tile = 64 * groups
    case = Case("equal", (tile + rest,) * count, pad_rows=17)
    q, k, v = _zeros(case.rows, 2)
    launch, _, num_marks = hopper_bf16._plan(
        groups, q, k, v, case.cu_seqlens("cpu"), 0.5, q.device
    )
    tiles = 4 * sum(-(-length // tile) for length in case.lengths)
    marks = hopper_bf16.MARKS
    assert num_marks % marks == 0
    assert max(1, tiles) * groups <= num_marks <= (tiles + 4 * count) * groups + marks
    # A program at least clears the rows of no sequence.
    assert 1 <= launch._grid[0] <= 132


def test_hopper_bf16_spreads_few_rows_over_all_multiprocessors():
    assert hopper_bf16._groups(80, 16, 1024, 128) == 2
    assert hopper_bf16._groups(80, 16, 1025, 128) == 4
    assert [hopper_bf16._groups(d, 16, 4096, 132) for d in (96, 104)] == [4, 3]
    # By any groups a row has the same blocks of keys, so its sums have one order.
    for head_dim in (80, 104):
        forms = hopper_bf16._form(head_dim, 2), hopper_bf16._form(head_dim, 4)
        assert len({constants["BLOCK_N"] for constants, _ in forms}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", params(CASES))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(2, 1, 72), (1, 1, 80), (4, 2, 128)], ids=str
)
def test_hopper_bf16_of_every_case(case, heads, kv_heads, head_dim):
    qkv = _qkv(case, heads, head_dim, kv_heads=kv_heads)
    scale = head_dim**-0.5
    out = attention(*qkv, case.cu_seqlens("cuda"), case.max_seqlen, scale)
    _assert_right(out, qkv, case, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("case", params(GPU_CASES))
def test_hopper_bf16_of_large_batches(case):
    qkv = _qkv(case, 16, 80)
    args = case.cu_seqlens("cuda"), case.max_seqlen, 80**-0.5
    out = attention(*qkv, *args)
    assert torch.equal(out, attention(*qkv, *args))
    _assert_right(out, qkv, case, 80**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", range(64, 136, 8))
def test_hopper_bf16_of_every_head_dim(head_dim):
    case = Case("ragged", (700, 1, 64, 0, 257), pad_rows=3)
    qkv = _qkv(case, 3, head_dim)
    out = attention(*qkv, case.cu_seqlens("cuda"), 700, 0.1)
    _assert_right(out, qkv, case, 0.1)


@pytest.mark.gpu
def test_hopper_bf16_of_more_sequences_than_it_looks_at_together():
    lengths = [1 + 37 * i % 300 for i in range(300)]
    lengths[50:180] = [0] * 130
    case = Case("many", tuple(lengths))
    qkv = _qkv(case, 2, 80)
    out = attention(*qkv, case.cu_seqlens("cuda"), case.max_seqlen, 0.1)
    _assert_right(out, qkv, case, 0.1)


@pytest.mark.gpu
def test_hopper_bf16_of_other_layouts():
    case = Case("two", (900, 110))
    q, k, v = _qkv(case, 2, 72)
    args = case.cu_seqlens("cuda"), case.max_seqlen, 72**-0.5
    packed = attention(q, k, v, *args)
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    # Rows of 2 * 72 + 1 elements: nothing is aligned to more than one element.
    odd = torch.zeros(case.rows, 2 * 72 + 1, dtype=torch.bfloat16, device="cuda")
    odd = odd[:, 1:].unflatten(1, (2, 72)).copy_(v)
    out = attention(heads_first, k.contiguous(), odd, *args)
    assert torch.equal(out, packed)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [80, 128])
def test_hopper_bf16_of_a_sequence_is_the_same_in_a_batch(head_dim):
    batch = Case("batch", (70, 3000, 7, 1500))
    q, k, v = _qkv(batch, 2, head_dim)
    together = attention(q, k, v, batch.cu_seqlens("cuda"), 3000, 0.1)
    start = 0
    for length in batch.lengths:
        rows = slice(start, start + length)
        start += length
        cu_seqlens = Case("alone", (length,)).cu_seqlens("cuda")
        out = attention(q[rows], k[rows], v[rows], cu_seqlens, length, 0.1)
        assert torch.equal(out, together[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_hopper_bf16_of_a_sequence_is_the_same_by_any_groups(head_dim):
    """Where graphs have room for more rows, more groups share a tile."""
    case = Case("one", (900,))
    q, k, v = _qkv(case, 2, head_dim)
    few = attention(q, k, v, case.cu_seqlens("cuda"), 900, 0.1)
    many = [torch.cat([x, x.new_zeros(16000, 2, head_dim)]) for x in (q, k, v)]
    out = attention(*many, case.cu_seqlens("cuda"), 900, 0.1)
    assert torch.equal(out[:900], few) and not out[900:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("size", [60.0, 100.0, 1000.0])
@pytest.mark.parametrize("at", [5, 2990])
def test_hopper_bf16_of_a_score_far_above_the_others(head_dim, size, at):
    """In the first block, or beyond what its weights may be after it."""
    case = Case("two", (3000, 500))
    q, k, v = _qkv(case, 2, head_dim)
    q = q / 8
    q[:, :, 0] = 0.0
    q[:1000, :, 0] = 1.0
    k[:, :, 0] = 0.0
    k[at, :, 0] = size
    out = attention(q, k, v, case.cu_seqlens("cuda"), 3000, 1.0)
    assert relative_error(out, _expected((q, k, v), case, 1.0)) < 5e-3


@pytest.mark.gpu
def test_hopper_bf16_of_weights_and_values_whose_products_are_infinite():
    case = Case("one", (700,))
    q, k, v = _qkv(case, 2, 80)
    q[:, :, 0], k[:, :, 0], k[5, :, 0] = 1.0, 0.0, 60.0
    out = attention(q, k, v * 2.0**100, case.cu_seqlens("cuda"), 700, 1.0)
    expected = _expected((q, k, v), case, 1.0)
    assert relative_error(out.float() / 2.0**100, expected) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("tensor", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_hopper_bf16_keeps_bad_values_in_their_sequence(tensor, value):
    case = Case("three", (700, 700, 300), pad_rows=100)
    qkv = dict(zip("qkv", _qkv(case, 2, 72), strict=True))
    args = case.cu_seqlens("cuda"), case.max_seqlen, 0.125
    good = attention(*qkv.values(), *args)
    qkv[tensor][[*range(700, 1400), *range(case.tokens, case.rows)]] = value
    out = attention(*qkv.values(), *args)
    assert not out[700:1400].isfinite().any()
    for rows in (slice(700), slice(1400, case.tokens)):
        assert relative_error(out[rows], good[rows].float()) < 5e-3
    assert not out[case.tokens :].any()


@pytest.mark.gpu
def test_hopper_bf16_of_offsets_beyond_all_rows():
    case = Case("two", (700, 350))
    qkv = _qkv(case, 1, 72)
    cu_seqlens = case.cu_seqlens("cuda")
    expected = attention(*qkv, cu_seqlens, 700, 0.1)
    cu_seqlens[-1] = 2**31 - 1
    assert torch.equal(attention(*qkv, cu_seqlens, 700, 0.1), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tail", ["zeros", "repeats"])
@pytest.mark.parametrize("head_dim", [72, 128])
def test_hopper_bf16_passes_over_empty_sequences(tail, head_dim):
    outs = []
    for count in (0, 1500):
        case = Case("tail", (300, 0, 2500, 17), pad_rows=200, **{tail: count})
        qkv = _qkv(case, 16, head_dim)
        outs.append(attention(*qkv, case.cu_seqlens("cuda"), 2500, 0.1))
    assert torch.equal(*outs)
    assert not outs[0][2817:].any()


@pytest.mark.gpu
def test_hopper_bf16_in_a_graph_attends_to_what_its_buffers_hold():
    """Marks of one replay are not those of the next."""
    case = Case("two", (900, 600), zeros=6, pad_rows=500)
    q, k, v = (x.clone() for x in _qkv(case, 2, 80))
    cu_seqlens = case.cu_seqlens("cuda")
    attention(q, k, v, cu_seqlens, 900, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, cu_seqlens, 900, 0.1)
    for lengths, size in [((900, 600), 1.0), ((100, 1200, 3), 100.0), ((1500,), 1.0)]:
        pad = {"zeros": 8 - len(lengths), "pad_rows": case.rows - sum(lengths)}
        other = Case("other", lengths, **pad)
        for x, fresh in zip((q, k, v), _qkv(other, 2, 80), strict=True):
            x.copy_(fresh)
        k[:50] *= size
        cu_seqlens.copy_(other.cu_seqlens("cuda"))
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out, _expected((q, k, v), other, 0.1)) < 5e-3
        assert not out[other.tokens :].any()


@pytest.mark.gpu
def test_hopper_bf16_of_more_elements_than_int32_counts():
    length = 4096
    count = 2**31 // (3 * 16 * 80 * length) + 2
    case = Case("many", (length,) * count)
    qkv = torch.randn(case.rows, 3, 16, 80, dtype=torch.bfloat16, device="cuda").unbind(
        1
    )
    out = attention(*qkv, case.cu_seqlens("cuda"), length, 0.1)
    last = [x[-length:] for x in qkv]
    alone = Case("alone", (length,)).cu_seqlens("cuda")
    assert torch.equal(out[-length:], attention(*last, alone, length, 0.1))

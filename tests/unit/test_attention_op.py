# SPDX-License-Identifier: Apache-2.0
"""Attention that is settled once: what each call reads, copies, turns and observes."""

from collections.abc import Callable

import pytest
import torch

from cases import Case, make_cos_sin, make_qkv
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.kernels.formats import DeviceScales
from vllm_flashinfer_vit.kernels.quantize_ref import quantize_blocks_ref
from vllm_flashinfer_vit.kernels.rope_ref import halves, rope_ref
from vllm_flashinfer_vit.ops import attention as ops
from vllm_flashinfer_vit.ops.attention import Fp8, prepare
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.ops.plan import Plan

SCALE = 0.1
CASE = Case("two", (10, 6))
REFERENCE = Plan.of("reference")
REFERENCE_FP8 = Plan.of("reference_fp8")


def make_batch(turned: int = 0, **kwargs: int) -> Batch:
    """A batch on the CPU, where plain PyTorch attends; `turned` of 16 columns turn."""
    qkv = make_qkv(CASE, 2, 16, torch.float32, **kwargs)
    angles = make_cos_sin(CASE, turned) if turned else (None, None)
    return Batch(*qkv, *angles, CASE.cu_seqlens(), torch.tensor(10))


def expected(batch: Batch) -> torch.Tensor:
    q, k, v, cos, sin, cu_seqlens, *_ = batch
    if cos is not None and sin is not None:
        q, k = rope_ref(q, k, cos, sin)
    assert cu_seqlens is not None
    return attention_ref(q, k, v, cu_seqlens, 10, SCALE)


def change(batch: Batch) -> None:
    for x in (batch.q, batch.k, batch.v):
        x.mul_(0.5).add_(0.25)


@pytest.mark.parametrize("turned", [0, 16, 8])
def test_each_call_reads_what_is_there_by_then(turned) -> None:
    batch = make_batch(turned, kv_heads=1)
    call = prepare(batch, SCALE, REFERENCE)
    for _ in range(2):
        change(batch)
        assert torch.equal(call(), expected(batch))
    assert batch.cu_seqlens is not None
    batch.cu_seqlens.copy_(torch.tensor([0, 7, 16]))
    assert torch.equal(call(), expected(batch))


def test_equal_sequences_need_no_offsets() -> None:
    batch = make_batch()._replace(cu_seqlens=None, max_seqlen=None, seq_len=8)
    call = prepare(batch, SCALE, REFERENCE)
    halves = torch.tensor([0, 8, 16], dtype=torch.int32)
    for _ in range(2):
        change(batch)
        assert torch.equal(call(), expected(batch._replace(cu_seqlens=halves)))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_another_d_stride_is_copied_by_every_call(name, monkeypatch) -> None:
    plain = make_batch()
    wide = torch.zeros(16, 2, 32)[..., ::2]
    batch = plain._replace(**{name: wide})
    seen = []

    def kernel(q: torch.Tensor, *args: object) -> Callable[[], torch.Tensor]:
        seen.append((q, *args)[:3])
        return lambda: attention_ref(q, *args)

    monkeypatch.setattr(ops, "_prepare_kernel", lambda name: kernel)
    call = prepare(batch, SCALE, REFERENCE)
    assert not seen
    for _ in range(2):
        change(plain)
        wide.copy_(getattr(plain, name))
        assert torch.equal(call(), expected(plain))
    for tensors in seen:
        assert all(x.stride(2) == 1 for x in tensors)
    assert len(seen) == 2


def test_what_a_projection_quantized_is_read_in_place_of_odd_strides() -> None:
    batch = make_batch()
    q, k, v, _, _, cu_seqlens, *_ = batch
    assert cu_seqlens is not None
    quantized = quantize_blocks_ref(q, k, v, cu_seqlens)
    fp8 = Fp8("block")
    want = prepare(batch, SCALE, REFERENCE_FP8, fp8)()
    unread = torch.full((*q.shape, 2), float("nan"))[..., 0]
    odd = batch._replace(q=unread, k=unread, v=unread)
    found = prepare(odd, SCALE, REFERENCE_FP8, fp8, quantized=quantized)()
    assert torch.equal(found, want)


@pytest.mark.parametrize("fp8", [None, Fp8("block")])
def test_without_a_token_nothing_is_loaded(fp8, monkeypatch) -> None:
    monkeypatch.setattr(ops, "_prepare_kernel", pytest.fail)
    # Heads first in memory.
    q = torch.zeros(2, 0, 16).transpose(0, 1)
    offsets = torch.zeros(1, dtype=torch.int32)
    call = prepare(Batch(q, q, q, cu_seqlens=offsets), SCALE, REFERENCE, fp8)
    out = call()
    assert out.shape == (0, 2, 16) and out.is_contiguous()
    assert call() is out


def test_the_plan_is_asked_once(monkeypatch) -> None:
    asked = []
    load = ops._prepare_kernel.__wrapped__
    monkeypatch.setattr(
        ops, "_prepare_kernel", lambda name: asked.append(name) or load(name)
    )
    call = prepare(make_batch(), SCALE, Plan.decode("9:triton,10:reference,*:cudnn"))
    call()
    call()
    assert asked == ["reference"]


@pytest.mark.parametrize("turned", [16, 8])
@pytest.mark.parametrize(
    ("plan", "fp8"),
    [(REFERENCE, None), (REFERENCE_FP8, Fp8("block"))],
    ids=["fp32", "fp8"],
)
def test_interleaved_pairs_are_turned(plan, fp8, turned) -> None:
    batch = make_batch(turned)
    # The columns of q and k in the other order: halves.
    q, k = (halves(x, turned) for x in (batch.q, batch.k))
    right = prepare(batch._replace(q=q, k=k), SCALE, plan, fp8)()
    found = prepare(batch._replace(interleaved=True), SCALE, plan, fp8)()
    assert torch.equal(found, right)
    assert not torch.allclose(found, prepare(batch, SCALE, plan, fp8)(), atol=0.05)


def test_interleaved_pairs_are_observed() -> None:
    batch, state = make_batch(16)._replace(interleaved=True), make_state()
    prepare(batch, SCALE, REFERENCE, Fp8("static", True, state))(state)
    turned = rope_ref(batch.q, batch.k, batch.cos, batch.sin, True)
    largest = [x.abs().max() for x in (*turned, batch.v)]
    assert torch.equal(state.history[0], torch.stack(largest))


@pytest.mark.parametrize(("turned", "passes"), [(16, 0), (8, 1)])
def test_a_kernel_that_rotates_gets_the_pairs(turned, passes, monkeypatch) -> None:
    """What turns a whole head turns its interleaved pairs, too: no pass in front."""
    batch = make_batch(turned)._replace(interleaved=True)
    seen, rotated = [], []
    kernel = KERNELS["triton_window"].name
    monkeypatch.setattr(
        ops, "_prepare_kernel", lambda name: lambda *args: lambda: seen.append(args)
    )
    monkeypatch.setattr(ops, "rotate", lambda *args: rotated.append(args) or args[:2])
    prepare(batch, SCALE, Plan.of(kernel))()
    assert len(rotated) == passes
    assert all(args[4] is True for args in rotated)
    rest = seen[0][6:]
    assert rest == (() if passes else (batch.cos, batch.sin, True))


def make_state() -> DeviceScales:
    return DeviceScales.on("cpu")


@pytest.mark.parametrize("plan", [REFERENCE_FP8, REFERENCE], ids=lambda p: p.text)
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("method", ["static", "dynamic", "block"])
def test_passes_are_observed_by_every_call(method, save, plan) -> None:
    batch, state = make_batch(turned=16), make_state()
    call = prepare(batch, SCALE, plan, Fp8(method, save, state))
    # Nothing is observed before.
    assert state.position.item() == 0
    for _ in range(3):
        change(batch)
        call(state)
    is_dynamic = method == "dynamic" and plan is REFERENCE_FP8
    assert state.position.item() == (3 if save or is_dynamic else 0)


def test_a_dynamic_scale_is_renewed_before_it_is_used() -> None:
    batch, state = make_batch(), make_state()
    call = prepare(batch, SCALE, REFERENCE_FP8, Fp8("dynamic", False, state))
    for factor in (1.0, 50.0):
        batch.v.mul_(factor)
        found = call(state)
        assert state.amax.tolist() == [0, 0, 0]
        # With the scales of before, values 50 times as large would saturate.
        fresh = Fp8("static", False, state)
        assert torch.equal(found, prepare(batch, SCALE, REFERENCE_FP8, fresh)(state))
        largest = batch.v.abs().max()
        assert state.scales[2].item() >= largest.item() / 448
    torch.testing.assert_close(found, expected(batch), rtol=0.1, atol=0.1 * largest)


def test_static_scales_are_read_by_every_call() -> None:
    batch, state = make_batch(), make_state()
    call = prepare(batch, SCALE, REFERENCE_FP8, Fp8("static", False, state))
    state.scales.fill_(0.01)
    fine = call(state).clone()
    # Beyond 448 units all values saturate.
    state.scales.fill_(1e-4)
    assert not torch.equal(call(state), fine)
    assert call(state).abs().max() <= 0.05


LAYOUTS = {
    "views": lambda batch: batch,
    "copied": lambda batch: batch._replace(q=batch.q.transpose(1, 2).contiguous().mT),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", [REFERENCE_FP8, REFERENCE], ids=lambda p: p.text)
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("method", ["static", "dynamic", "block"])
def test_one_call_serves_layers_of_other_scales(method, save, plan, layout) -> None:
    """Each reads, observes and counts its own; the one it was prepared with stays."""
    batch, like = LAYOUTS[layout](make_batch(turned=16)), make_state()
    call = prepare(batch, SCALE, plan, Fp8(method, save, like))
    shared, alone = ([make_state() for _ in range(2)] for _ in range(2))
    for states in (shared, alone):
        for state, scale in zip(states, (0.01, 1e-4), strict=True):
            state.scales.fill_(scale)
            state.history.fill_(448 * scale)
    outs = []
    for _ in range(2):
        for state, own in zip(shared, alone, strict=True):
            change(batch)
            outs.append(call(state).clone())
            fp8 = Fp8(method, save, own)
            assert torch.equal(outs[-1], ops.attention(batch, SCALE, plan, fp8))
            assert all(map(torch.equal, state, own))
    assert all(map(torch.equal, like, make_state()))
    assert not torch.equal(*outs[:2])
    if method == "static" and plan is REFERENCE_FP8 and not save:
        assert shared[0].clip_counts[1].sum() < shared[1].clip_counts[1].sum()


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_without_a_token_a_state_stays_as_it_is(method, monkeypatch) -> None:
    monkeypatch.setattr(ops, "_prepare_kernel", pytest.fail)
    q, state = torch.zeros(0, 2, 16), make_state()
    batch = Batch(q, q, q, cu_seqlens=torch.zeros(1, dtype=torch.int32))
    fp8 = Fp8(method, True, state)
    assert ops.attention(batch, SCALE, REFERENCE_FP8, fp8).shape == (0, 2, 16)
    assert all(map(torch.equal, state, make_state()))


@pytest.mark.parametrize("method", ["static", "dynamic", "block"])
@pytest.mark.parametrize("quantized", ["blocks", "rows"])
def test_only_static_scales_count_what_they_cut_off(
    quantized, method, monkeypatch
) -> None:
    if quantized == "rows":
        if method == "block":
            pytest.skip("rows have one scale for each tensor")
        monkeypatch.setattr(
            type(KERNELS["cudnn_fp8"]), "padded_head_dim", lambda *_: 32
        )
        monkeypatch.setattr(
            ops, "_prepare_kernel", lambda name: lambda *args: args[0].cpu
        )
    plan = REFERENCE_FP8 if quantized == "blocks" else Plan.of("cudnn_fp8")
    qkv = make_qkv(CASE, 2, 32, torch.float32, kv_heads=1)
    batch = Batch(*qkv, None, None, CASE.cu_seqlens(), torch.tensor(10))
    state = make_state()
    batch.k[12, 0, 3] = 500.0
    call = prepare(batch, SCALE, plan, Fp8(method, False, state))
    assert not state.clip_counts.any()
    for _ in range(2):
        call(state)
    # A block for each sequence, or one for all rows.
    blocks = 2 if quantized == "blocks" else 1
    counts = [[4 * blocks, 2 * blocks, 2 * blocks], [0, 2, 0]]
    assert state.clip_counts.tolist() == (
        counts if method == "static" else [[0] * 3, [0] * 3]
    )


def test_the_op_is_what_is_prepared() -> None:
    batch = make_batch(turned=16)
    call = prepare(batch, SCALE, REFERENCE)
    assert torch.equal(ops.attention(batch, SCALE, REFERENCE), call())
    text = REFERENCE.text
    assert torch.equal(
        torch.ops.vllm_flashinfer_vit.attention(*batch, SCALE, text), call()
    )

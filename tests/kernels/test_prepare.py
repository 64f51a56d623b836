# SPDX-License-Identifier: Apache-2.0
"""Kernels that are settled once: each call reads what their inputs hold by then.

The measure is the bits of a call that is settled anew.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from _quantized import make_inputs

from cases import Case
from vllm_flashinfer_vit.kernels import (
    add_norm,
    cudnn,
    flash,
    flash_fp8,
    hopper_fp8,
    quantize,
    rope,
    window,
)
from vllm_flashinfer_vit.kernels._launch import returning

pytestmark = pytest.mark.usefixtures("nan_empty", "exact_fp8")

HEAD_DIM = 72
SCALE = HEAD_DIM**-0.5
# As many rows and offsets in other sequences; the last one's padding is longer.
# Triton's interpreter takes seconds for more.
BATCHES = (
    [
        Case("first", (100, 1, 64, 0, 5), zeros=1, pad_rows=3),
        Case("second", (60, 33, 70, 7, 0), zeros=1, pad_rows=3),
        Case("third", (2, 90, 0, 8, 0), zeros=1, pad_rows=73),
    ]
    if torch.cuda.is_available()
    else [
        Case("first", (19, 0, 5), zeros=1, pad_rows=3),
        Case("second", (6, 17, 1), zeros=1, pad_rows=3),
        Case("third", (2, 0, 16), zeros=1, pad_rows=9),
    ]
)
ROWS = BATCHES[0].rows
LONGEST = max(case.max_seqlen for case in BATCHES)

Call = Callable[[], tuple[torch.Tensor, ...]]


class Made(NamedTuple):
    """A kernel and its inputs.

    Attributes:
        stage: Makes another batch, and returns what copies it to the inputs.
        plain: The kernel on the inputs, settled anew.
        settle: Returns the settled call. It returns the same tensors every time.
    """

    stage: Callable[[int], Callable[[], None]]
    plain: Call
    settle: Callable[[], Call]


def _stage(*held: torch.Tensor | None) -> Callable[[int], Callable[[], None]]:
    """Stage q, k, v, offsets and angles as `make_inputs` returns them."""
    return lambda number: functools.partial(_copy, held, _inputs(number))


def _copy(held: Sequence[torch.Tensor | None], new: Sequence[torch.Tensor]) -> None:
    for x, y in zip(held, new, strict=True):
        if x is not None:
            x.copy_(y)


def _inputs(number: int) -> tuple[torch.Tensor, ...]:
    return make_inputs(BATCHES[number], 2, HEAD_DIM, HEAD_DIM, kv_heads=1, seed=number)


def _one(call: Callable[[], torch.Tensor]) -> Call:
    return lambda: (call(),)


def _flash() -> Made:
    q, k, v, cu_seqlens, *angles = _inputs(0)
    args = q, k, v, cu_seqlens, LONGEST, SCALE
    return Made(
        _stage(q, k, v, cu_seqlens, *angles),
        lambda: (flash.prepare(*args)(),),
        lambda: _one(flash.prepare(*args)),
    )


def _cudnn(hand_over: Callable[..., tuple[torch.Tensor, ...]]) -> Made:
    q, k, v, cu_seqlens, *_ = _inputs(0)
    q, k, v = hand_over(q, k, v)
    args = q, k, v, cu_seqlens, LONGEST, SCALE
    # Outside of a graph, rows of no sequence hold anything.
    tokens = min(case.tokens for case in BATCHES)

    def settle() -> Call:
        call = cudnn.prepare(*args)
        rows = call()[:tokens]
        return _one(returning(call, rows))

    return Made(
        _stage(q, k, v, cu_seqlens, None, None),
        lambda: (cudnn.prepare(*args)()[:tokens],),
        settle,
    )


def _packed(*qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.contiguous() for x in qkv)


def _unaligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
    """Return what is copied by each call."""
    wide = torch.nn.functional.pad(v, (0, 1))
    return q, k, wide[..., : v.shape[2]]


def _window(interleaved: bool) -> Made:
    q, k, v, cu_seqlens, *angles = _inputs(0)
    args = q, k, v, cu_seqlens, LONGEST, SCALE, *angles, interleaved
    return Made(
        _stage(q, k, v, cu_seqlens, *angles),
        lambda: (window.prepare(*args)(),),
        lambda: _one(window.prepare(*args)),
    )


def _window_as_it_is() -> Made:
    q, k, v, cu_seqlens, *angles = _inputs(0)
    args = q, k, v, cu_seqlens, LONGEST, SCALE
    return Made(
        _stage(q, k, v, cu_seqlens, *angles),
        lambda: (window.prepare(*args)(),),
        lambda: _one(window.prepare(*args)),
    )


def _rope(interleaved: bool) -> Made:
    q, k, v, cu_seqlens, *angles = _inputs(0)
    args = q, k, *angles, interleaved

    def settle() -> Call:
        launch, turned = rope.prepare(*args)
        return returning(launch, turned)

    return Made(_stage(q, k, v, cu_seqlens, *angles), lambda: rope.rope(*args), settle)


def _quantize(interleaved: bool) -> Made:
    inputs = _inputs(0)
    args = *inputs, None, interleaved

    def settle() -> Call:
        launch, quantized = quantize.prepare(*args)
        return returning(launch, quantized)

    return Made(_stage(*inputs), lambda: quantize.quantize_blocks(*args), settle)


def _quantize_by_scales() -> Made:
    inputs = _inputs(0)
    scales = torch.ones(3, device=inputs[0].device)

    def stage(number: int) -> Callable[[], None]:
        # A layer's scales change on the device, too.
        new = torch.full_like(scales, 0.01 * (1 + number))
        return functools.partial(_copy, (*inputs, scales), (*_inputs(number), new))

    def settle() -> Call:
        # Scales are each call's own: these are never read.
        launch, quantized = quantize.prepare(*inputs, torch.full_like(scales, 7.0))
        return returning(functools.partial(launch, scales), quantized)

    return Made(stage, lambda: quantize.quantize_blocks(*inputs, scales), settle)


def _fp8(kernel: object) -> Callable[[], Made]:
    def make() -> Made:
        inputs = _inputs(0)
        quantized = quantize.quantize_blocks(*inputs)
        sizes = ROWS, LONGEST, SCALE, HEAD_DIM, inputs[0].dtype

        def stage(number: int) -> Callable[[], None]:
            new = _inputs(number)
            blocks = quantize.quantize_blocks(*new)
            held = *quantized, inputs[3]
            return functools.partial(_copy, held, (*blocks, new[3]))

        return Made(
            stage,
            lambda: (kernel.prepare(quantized, inputs[3], *sizes)(),),
            lambda: _one(kernel.prepare(quantized, inputs[3], *sizes)),
        )

    return make


def _sum_norm() -> Made:
    generator = torch.Generator().manual_seed(0)
    like = _inputs(0)[0]
    terms = [
        torch.empty(ROWS, 1152, dtype=like.dtype).to(like.device) for _ in range(3)
    ]
    weight, bias = (torch.randn(1152, generator=generator).to(like) for _ in range(2))

    def stage(number: int) -> Callable[[], None]:
        generator = torch.Generator().manual_seed(number)
        new = [torch.randn(x.shape, generator=generator).to(x) for x in terms]
        return functools.partial(_copy, terms, new)

    def settle() -> Call:
        normed, total = torch.empty_like(terms[0]), torch.empty_like(terms[0])
        x, *branches = terms
        call = add_norm.prepare(x, tuple(branches), weight, bias, 1e-6, normed)
        return returning(lambda: call(*terms, weight, bias, total), (total, normed))

    stage(0)()
    return Made(
        stage, lambda: add_norm.sum_norm(terms, weight, bias, 1e-6, True), settle
    )


KERNELS = {
    "flash": _flash,
    "cudnn": functools.partial(_cudnn, lambda *qkv: qkv),
    "cudnn packed": functools.partial(_cudnn, _packed),
    "cudnn copied": functools.partial(_cudnn, _unaligned),
    "window": functools.partial(_window, False),
    "window interleaved": functools.partial(_window, True),
    "window without rope": _window_as_it_is,
    "rope": functools.partial(_rope, False),
    "rope interleaved": functools.partial(_rope, True),
    "quantize": functools.partial(_quantize, False),
    "quantize interleaved": functools.partial(_quantize, True),
    "quantize by scales": _quantize_by_scales,
    "flash_fp8": _fp8(flash_fp8),
    "hopper_fp8": _fp8(hopper_fp8),
    "sum_norm": _sum_norm,
}
ON_A_GPU = ("cudnn", "hopper_fp8")


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.gpu] * name.startswith(ON_A_GPU))
        for name in KERNELS
    ]
)
def make(request: pytest.FixtureRequest) -> Callable[[], Made]:
    if request.param == "hopper_fp8" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return KERNELS[request.param]


def _poison(tensors: tuple[torch.Tensor, ...]) -> None:
    for x in tensors:
        x.fill_(float("nan"))


def _assert_same(found: tuple[torch.Tensor, ...], made: Made) -> None:
    """Compare every byte: neither writes blocks of no sequence, which hold poison."""
    for x, y in zip(found, made.plain(), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.is_contiguous()
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_a_call_reads_what_is_there_by_then(make):
    made = make()
    call, other = made.settle(), made.settle()
    outs = []
    for number in (1, 2):
        made.stage(number)()
        if outs:
            _poison(outs[-1])
        outs.append(call())
        _assert_same(outs[-1], made)
    assert all(x is y for x, y in zip(*outs, strict=True))
    # Another one writes to tensors of its own.
    kept = [x.clone() for x in outs[0]]
    made.stage(1)()
    for x, y, old in zip(other(), outs[0], kept, strict=True):
        assert x.data_ptr() != y.data_ptr()
        assert torch.equal(y.view(torch.uint8), old.view(torch.uint8))


def _without_tokens() -> Iterator[tuple[str, Callable[[], object]]]:
    q, k, v, cu_seqlens, cos, sin = make_inputs(Case("none", ()), 2, 72, 72, kv_heads=1)
    yield "flash", flash.prepare(q, k, v, cu_seqlens, 0, SCALE)
    yield "window", window.prepare(q, k, v, cu_seqlens, 0, SCALE, cos, sin)
    launch, turned = rope.prepare(q, k, cos, sin)
    yield "rope", returning(launch, turned[0])
    launch, quantized = quantize.prepare(q, k, v, cu_seqlens)
    yield "quantize", returning(launch, quantized.q.view(torch.uint8))
    sizes = cu_seqlens, 0, 0, SCALE, 72, q.dtype
    yield "flash_fp8", flash_fp8.prepare(quantized, *sizes)


def test_calls_without_a_token():
    for name, call in _without_tokens():
        out = call()
        assert call() is out, name
        assert out.numel() == 0, name


def test_flash_copies_what_is_not_aligned_at_every_call():
    q, k, v, cu_seqlens, *_ = _inputs(0)
    # Rows of 72 + 1 elements: nothing is aligned to more than one element.
    odd = torch.zeros(ROWS, 73, dtype=v.dtype, device=v.device)
    odd = odd[:, 1:].unflatten(1, (1, 72)).copy_(v)
    args = cu_seqlens, LONGEST, SCALE
    aligned, copying = (flash.prepare(q, k, x, *args) for x in (v, odd))
    for factor in (1, 2):
        v.mul_(factor)
        odd.copy_(v)
        assert torch.equal(copying(), aligned())


@pytest.mark.parametrize("kernel", ["rope", "window"])
def test_angles_that_need_a_copy_are_copied_when_it_is_settled(kernel):
    q, k, v, cu_seqlens, cos, sin = _inputs(0)
    args = (v, cu_seqlens, LONGEST, SCALE)
    odd_cos, odd_sin = cos.T.contiguous().T, sin.T.contiguous().T
    if kernel == "rope":
        settled = [rope.prepare(q, k, *x) for x in ((cos, sin), (odd_cos, odd_sin))]
        calls = [returning(launch, turned[0]) for launch, turned in settled]
    else:
        calls = [
            window.prepare(q, k, *args, *x) for x in ((cos, sin), (odd_cos, odd_sin))
        ]
    odd_cos.zero_()
    odd_sin.zero_()
    plain, copied = (call() for call in calls)
    tokens = BATCHES[0].tokens
    assert torch.equal(plain[:tokens], copied[:tokens])


@pytest.mark.parametrize("prepare", [flash.prepare, window.prepare])
def test_what_is_refused_is_refused_when_it_is_settled(prepare):
    q, k, v, cu_seqlens, *_ = _inputs(0)
    with pytest.raises(ValueError, match="int64"):
        prepare(q, k, v, cu_seqlens.long(), LONGEST, SCALE)


@pytest.mark.gpu
def test_settled_in_a_capture(make):
    made = make()
    made.stage(0)()
    # Compiles outside of the capture.
    made.settle()()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call = made.settle()
        first = [x.clone() for x in call()]
        second = call()
    for number in range(len(BATCHES)):
        made.stage(number)()
        _poison((*first, *second))
        graph.replay()
        _assert_same(tuple(first), made)
        _assert_same(second, made)


@pytest.mark.gpu
def test_settled_on_a_side_stream(make):
    made = make()
    made.stage(0)()
    made.settle()()
    side = torch.cuda.Stream()
    copy = made.stage(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        call = made.settle()
        # A launch on another stream would not wait for the new contents.
        torch.cuda._sleep(100_000_000)
        copy()
        found = tuple(x.clone() for x in call())
    side.synchronize()
    _assert_same(found, made)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_settled_on_a_second_device(make, request):
    if request.node.callspec.params["make"].startswith("cudnn"):
        pytest.skip("cuDNN's plans and workspace are of one device")
    for device in (0, 1, 0):
        with torch.cuda.device(device):
            made = make()
            call = made.settle()
            for number in (1, 0):
                made.stage(number)()
                out = call()
                assert out[0].device.index == device
                _assert_same(out, made)
                # The next batch has other blocks of no sequence.
                _poison(out)

# SPDX-License-Identifier: Apache-2.0
"""Maxima, history and scales, exactly, against the plain PyTorch reference."""

import pytest
import torch

from cases import (
    CASES,
    GPU_CASES,
    LARGE,
    Case,
    make_cos_sin,
    make_qkv,
    params,
)
from vllm_flashinfer_vit.kernels.absmax import prepare, update
from vllm_flashinfer_vit.kernels.absmax_ref import absmax_ref, update_ref
from vllm_flashinfer_vit.kernels.formats import HISTORY, DeviceScales

pytestmark = pytest.mark.usefixtures("nan_empty")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter truncates when it converts to bf16.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def _inputs(case, heads, head_dim, rotary_dim=None, **kwargs):
    qkv = make_qkv(case, heads, head_dim, DTYPE, device=DEVICE, **kwargs)
    angles = (None, None)
    if rotary_dim is not None:
        angles = make_cos_sin(case, rotary_dim, DTYPE, device=DEVICE)
    return *qkv, case.cu_seqlens(DEVICE), angles


def absmax(q, k, v, cu_seqlens, amax, *turns) -> None:
    prepare(q, k, v, cu_seqlens, amax, *turns)(amax)


def _absmax(inputs, function=absmax, interleaved=False) -> torch.Tensor:
    *tensors, angles = inputs
    amax = torch.zeros(3, device=DEVICE)
    function(*tensors, amax, *angles, interleaved)
    return amax


@pytest.mark.parametrize("case", params(CASES + GPU_CASES * (DEVICE == "cuda"), LARGE))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [(2, 1, 72, 72), (1, 1, 80, None), (1, 1, 88, 40)],
)
def test_absmax_is_the_references(case, heads, kv_heads, head_dim, rotary_dim):
    inputs = _inputs(case, heads, head_dim, rotary_dim, kv_heads=kv_heads)
    for interleaved in (False, True):
        expected = _absmax(inputs, absmax_ref, interleaved)
        assert torch.equal(_absmax(inputs, absmax, interleaved), expected)


def test_absmax_of_negative_values():
    q, k, v, cu_seqlens, angles = _inputs(Case("40", (40,)), 1, 64)
    for i, x in enumerate((q, k, v)):
        x.clamp_(max=-1)
        x[7, 0, 5] = -64 * 2**i
    assert _absmax((q, k, v, cu_seqlens, angles)).tolist() == [64, 128, 256]


def test_absmax_ignores_what_is_not_finite():
    case = Case("two", (140, 30))
    inputs = _inputs(case, 2, 72, 72)
    for x in inputs[:3]:
        x[3] = float("nan")
        x[4] = float("inf")
        x[139] = float("-inf")
    amax = _absmax(inputs)
    assert amax.isfinite().all() and (amax > 1).all()
    assert torch.equal(amax, _absmax(inputs, absmax_ref))


@pytest.mark.parametrize("tail", ["zeros", "repeats"])
def test_absmax_reads_no_padding(tail):
    """NaN would be ignored anywhere; a large number is not."""
    case = Case("two", (140, 20), pad_rows=100, **{tail: 2})
    inputs = _inputs(case, 2, 72, 72, pad_value=1e4)
    amax = _absmax(inputs)
    assert (amax < 100).all()
    assert torch.equal(amax, _absmax(inputs, absmax_ref))


def test_absmax_ends_at_the_last_row():
    whole = make_qkv(Case("200", (200,)), 1, 64, DTYPE, device=DEVICE)
    for x in whole:
        x[140:] = 1e4
    cu_seqlens = torch.tensor([0, 130, 900], dtype=torch.int32, device=DEVICE)
    inputs = *(x[:140] for x in whole), cu_seqlens, (None, None)
    assert torch.equal(_absmax(inputs), _absmax(inputs, absmax_ref))


def test_absmax_of_many_sequences():
    # The last of them end after the offsets that are searched at once.
    case = Case("many", tuple(i % 3 for i in range(1100)), zeros=4, pad_rows=200)
    inputs = _inputs(case, 1, 32, pad_value=1e4)
    inputs[1][case.tokens - 1] = 50.0
    amax = _absmax(inputs)
    assert amax[1] == 50 and amax.max() == 50
    assert torch.equal(amax, _absmax(inputs, absmax_ref))


@pytest.mark.gpu
def test_absmax_of_more_than_int32_elements():
    tokens = 600_000
    qkv = torch.ones(tokens, 3 * 16, 80, dtype=DTYPE, device="cuda")
    assert qkv.numel() > 2**31
    qkv[-1, 16:32] = 50.0
    case = Case("600k", (tokens,))
    inputs = *qkv.split(16, dim=1), case.cu_seqlens("cuda"), (None, None)
    assert _absmax(inputs).tolist() == [1, 50, 1]


def test_absmax_raises_what_it_finds():
    inputs = _inputs(Case("9", (9,)), 1, 64)
    amax = torch.tensor([0.0, 1e6, 0.0], device=DEVICE)
    absmax(*inputs[:4], amax)
    assert amax[1] == 1e6
    assert torch.equal(amax[::2], _absmax(inputs)[::2])


@pytest.mark.parametrize("rotary_dim", [None, 72])
def test_a_prepared_call_raises_what_it_is_given(rotary_dim):
    """Layers share it, each with maxima of its own."""
    *tensors, angles = _inputs(Case("9", (9,)), 2, 72, rotary_dim, kv_heads=1)
    like = torch.zeros(3, device=DEVICE)
    call = prepare(*tensors, like, *angles)
    found = torch.zeros(2, 3, device=DEVICE)
    for amax in found:
        tensors[0].mul_(2)
        call(amax)
        assert torch.equal(amax, _absmax((*tensors, angles)))
    assert found[0, 0] < found[1, 0] and not like.any()


def test_a_prepared_call_without_a_row():
    *tensors, angles = _inputs(Case("none", ()), 2, 72)
    amax = torch.ones(3, device=DEVICE)
    prepare(*tensors, amax, *angles)(amax)
    assert (amax == 1).all()


def test_scales_of_many_passes():
    state, expected = DeviceScales.on(DEVICE), DeviceScales.on(DEVICE)
    # The largest pass leaves the history after 16 more.
    seen = [2.0, 900.0, *range(HISTORY + 2)]
    for i, value in enumerate(seen):
        amax = torch.tensor([value, 2 * value, 0.0], device=DEVICE)
        state.amax.copy_(amax)
        expected.amax.copy_(amax)
        update(state)
        update_ref(expected)
        for x, y in zip(state, expected, strict=True):
            assert torch.equal(x, y)
        window = seen[max(0, i + 1 - HISTORY) : i + 1]
        assert state.scales[0].item() == pytest.approx(max(window) / 448)
        assert state.scales[2] == 1
        assert (state.amax == 0).all()


def test_absmax_rejects_what_it_cannot_read():
    inputs = _inputs(Case("8", (8,)), 2, 64)
    with pytest.raises(ValueError, match="float64"):
        absmax(*inputs[:4], torch.zeros(3, dtype=torch.float64))


@pytest.mark.gpu
def test_a_captured_pass_moves_on_as_an_eager_one():
    q, k, v, cu_seqlens, angles = _inputs(Case("300", (300,), repeats=1), 4, 72, 72)
    captured, eager = DeviceScales.on("cuda"), DeviceScales.on("cuda")

    def run(state: DeviceScales) -> None:
        absmax(q, k, v, cu_seqlens, state.amax, *angles)
        update(state)

    run(DeviceScales.on("cuda"))  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(captured)
    for i in range(HISTORY + 3):
        case = Case("replay", (300 - i,), repeats=1, pad_rows=i)
        new = _inputs(case, 4, 72, seed=i)
        for x, y in zip((q, k, v, cu_seqlens), new, strict=False):
            x.copy_(y)
        graph.replay()
        run(eager)
        for x, y in zip(captured, eager, strict=True):
            assert torch.equal(x, y)

# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels on a stand-in for Gluon's language: no GPU is needed.

It runs each warp group as it is written, so that a group which waits for ever, a tile
that nobody computes and a wrong sum show. How the hardware computes, it does not know.
"""

from types import SimpleNamespace

import _gluon
import pytest
import torch

from cases import (
    CASES,
    LARGE,
    TOLERANCES,
    Case,
    make_qkv,
    params,
    relative_error,
    values,
)
from vllm_flashinfer_vit.kernels import _hopper, hopper_bf16, hopper_fp8
from vllm_flashinfer_vit.kernels._launch import Launch
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.kernels.flash_fp8_ref import attention_fp8_ref
from vllm_flashinfer_vit.kernels.quantize import quantize_blocks

pytestmark = pytest.mark.usefixtures("nan_empty", "exact_fp8")


def _exp2(x):
    weights = torch.exp2(x)
    return torch.where(weights < torch.finfo(torch.float32).tiny, 0.0, weights)


def _codes(scores, best, factor, offset):
    """What `hopper_fp8._weigh_asm` computes, rounded where it rounds."""
    x = (scores - best).float() * factor.float() + offset.float()
    x = x.clamp(0, 1).nan_to_num(0.0).half().float()
    codes = (x * hopper_fp8._LARGEST + 1024).half().view(torch.int16)
    return codes.to(torch.uint8).to(torch.float8_e4m3fn, bitcast=True)


KERNELS = {"_hopper_bf16_kernel": hopper_bf16, "_hopper_fp8_kernel": hopper_fp8}
ASSEMBLY = {
    hopper_bf16._EXP2.value: _exp2,
    hopper_fp8._MAX.value: torch.maximum,
    hopper_fp8._WEIGH.value: _codes,
}
SIZES = values([(2, 1, 80)], extended=[(1, 1, 64), (4, 2, 128)])
RAGGED = Case("ragged", (70, 1, 530), zeros=2)
# So few that programs take turns, more than the tiles, and between these.
PROCESSORS = 1, 5, 40


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a few multiprocessors."""
    gpu = SimpleNamespace(multi_processor_count=5, marks=None)
    through_triton = Launch.settle

    def settle(launch, *tensors):
        module = KERNELS.get(launch._kernel.fn.__name__)
        if module is None:
            return through_triton(launch, *tensors)
        given = *tensors, *launch._scalars
        names = launch._kernel.arg_names[len(given) :]
        constants = {name: launch._constants[name] for name in names}
        name, programs = launch._kernel.fn.__name__, launch._grid[0]
        return lambda: _gluon.run(
            (module, _hopper), name, programs, given, constants, ASSEMBLY
        )

    mend = hopper_bf16.redo.prepare

    def mend_in_fp32(q, k, v, cu_seqlens, marks, out, parts, scale):
        # Triton's interpreter multiplies bf16 wrongly.
        gpu.marks, wide = marks, out.float()
        qkv = (x.float() for x in (q, k, v))
        redo = mend(*qkv, cu_seqlens, marks, wide, parts, scale)

        def call():
            wide.copy_(out)
            redo()
            out.copy_(wide)

        return call

    monkeypatch.setattr(Launch, "settle", settle)
    for module in KERNELS.values():
        # Kept launches are of another number of multiprocessors.
        monkeypatch.setattr(module, "_plan", module._plan.__wrapped__)
    monkeypatch.setattr(hopper_bf16, "_compile", lambda *of: None)
    monkeypatch.setattr(
        hopper_bf16, "_choose_groups", hopper_bf16._choose_groups.__wrapped__
    )
    monkeypatch.setattr(hopper_bf16.redo, "prepare", mend_in_fp32)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return gpu


def _bf16(qkv, case, scale):
    return hopper_bf16.prepare(*qkv, case.cu_seqlens(), case.max_seqlen, scale)()


def _assert_right(out, qkv, case, scale):
    assert not out[case.tokens :].any()
    wide = (x.float() for x in qkv)
    expected = attention_ref(*wide, case.cu_seqlens(), case.max_seqlen, scale)
    atol = TOLERANCES[torch.bfloat16] * 5  # |v| of N(0, 1) stays below 5 here
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("case", params(CASES))
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SIZES)
def test_hopper_bf16_of_every_case(gpu, case, heads, kv_heads, head_dim):
    qkv = make_qkv(case, heads, head_dim, torch.bfloat16, kv_heads=kv_heads)
    scale = head_dim**-0.5
    _assert_right(_bf16(qkv, case, scale), qkv, case, scale)


@pytest.mark.parametrize("head_dim", values([72], extended=[128]))
def test_bits_of_hopper_bf16_do_not_depend_on_the_gpu(gpu, head_dim):
    qkv = make_qkv(RAGGED, 2, head_dim, torch.bfloat16)
    found = []
    for gpu.multi_processor_count in PROCESSORS:
        found.append(_bf16(qkv, RAGGED, 0.1))
        assert not gpu.marks.any()
    assert all(torch.equal(out, found[0]) for out in found[1:])


@pytest.mark.parametrize("processors", PROCESSORS)
def test_hopper_bf16_marks_rows_that_are_wrong(gpu, processors):
    """A score far above those of the last block of keys, which it looks at first."""
    gpu.multi_processor_count = processors
    case = Case("two", (100, 500))
    q, k, v = make_qkv(case, 2, 80, torch.bfloat16)
    q[:, :, 0] = 0.0
    q[300, 1, 0] = 1000.0
    k[:, :, 0] = 0.0
    k[105, :, 0] = 1000.0
    _assert_right(_bf16((q, k, v), case, 1.0), (q, k, v), case, 1.0)
    assert gpu.marks.sum() == 1


@pytest.mark.parametrize("case", params(CASES, extended=LARGE))
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SIZES)
def test_hopper_fp8_of_every_case(gpu, case, heads, kv_heads, head_dim):
    q, k, v = make_qkv(case, heads, head_dim, torch.float32, kv_heads=kv_heads)
    cu_seqlens = case.cu_seqlens()
    quantized = quantize_blocks(q, k, v, cu_seqlens)
    args = quantized, cu_seqlens, case.rows, case.max_seqlen, head_dim**-0.5, head_dim
    out = hopper_fp8.prepare(*args, torch.bfloat16)()
    assert not out[case.tokens :].any()
    if case.tokens:
        expected = attention_fp8_ref(*args, torch.float32)
        assert relative_error(out, expected) < 0.04


def test_bits_of_hopper_fp8_do_not_depend_on_the_gpu(gpu):
    qkv = make_qkv(RAGGED, 2, 72, torch.float32)
    quantized = quantize_blocks(*qkv, RAGGED.cu_seqlens())
    args = quantized, RAGGED.cu_seqlens(), RAGGED.rows, RAGGED.max_seqlen, 0.1, 72
    found = []
    for gpu.multi_processor_count in PROCESSORS:
        found.append(hopper_fp8.prepare(*args, torch.bfloat16)())
    assert all(torch.equal(out, found[0]) for out in found[1:])


def test_a_group_that_waits_for_ever_is_noticed(gpu, monkeypatch):
    monkeypatch.setattr(_gluon, "_PATIENCE_S", 0.2)
    case = Case("one", (300,))
    qkv = make_qkv(case, 1, 80, torch.bfloat16)
    monkeypatch.setattr(_gluon._Barrier, "receive", lambda barrier, count: None)
    with pytest.raises(AssertionError, match="waits for ever"):
        _bf16(qkv, case, 0.1)

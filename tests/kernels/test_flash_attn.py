# SPDX-License-Identifier: Apache-2.0
"""What reaches vLLM's FlashAttention, without a GPU; `test_attention.py` runs it."""

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases import CASES, Case, make_qkv, params
from vllm_flashinfer_vit.kernels import flash_attn as kernel
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref

CAN_RUN = torch.cuda.is_available()
pytestmark = [
    pytest.mark.usefixtures("nan_empty"),
    pytest.mark.skipif(CAN_RUN, reason="replaces the real FlashAttention"),
]


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments of each call; the reference computes the output."""
    seen = []

    def varlen(q, k, v, **kwargs):
        seen.append({**kwargs, "v": v})
        cu_seqlens = kwargs["cu_seqlens_q"]
        longest = kwargs["max_seqlen_q"]
        rows = cu_seqlens.max()
        out = attention_ref(q, k, v, cu_seqlens, longest, kwargs["softmax_scale"])
        kwargs["out"][:rows] = out[:rows]

    monkeypatch.setattr(kernel, "_varlen_func", lambda: varlen)
    monkeypatch.setattr(kernel, "_forward_4", lambda: varlen)
    monkeypatch.setattr(kernel, "fa_version", lambda head_dim: 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


@pytest.fixture(params=[kernel.attention, kernel.attention_4])
def attention(request):
    return request.param


@pytest.mark.parametrize("is_capturing", [False, True])
@pytest.mark.parametrize("case", params(CASES))
def test_cases(attention, calls, monkeypatch, case, is_capturing):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    q, k, v = make_qkv(case, 4, 80, torch.float16, kv_heads=2)
    cu_seqlens = case.cu_seqlens()
    out = attention(q, k, v, cu_seqlens, case.max_seqlen, 0.1)
    expected = attention_ref(q, k, v, cu_seqlens, case.max_seqlen, 0.1)
    assert out.is_contiguous()
    assert torch.equal(out[: case.tokens], expected[: case.tokens])
    if is_capturing:
        assert (out[case.tokens :] == 0).all()
    if case.rows == 0:
        assert not calls


def test_only_a_capture_derives_cu_seqlens(attention, calls, monkeypatch):
    case = Case("zero-tail", (10, 20), zeros=2, pad_rows=4)
    q, k, v = make_qkv(case, 2, 64, torch.float16)
    cu_seqlens = case.cu_seqlens()
    attention(q, k, v, cu_seqlens, 20, 0.1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attention(q, k, v, cu_seqlens, 20, 0.1)
    eager, captured = calls
    assert eager["cu_seqlens_q"] is eager["cu_seqlens_k"] is cu_seqlens
    assert captured["cu_seqlens_q"] is captured["cu_seqlens_k"]
    assert captured["cu_seqlens_q"].tolist() == [0, 10, 30, 30, 30]
    assert torch.equal(captured["v"][:30], v[:30])
    assert (captured["v"][30:] == 0).all()
    assert captured["max_seqlen_q"] == captured["max_seqlen_k"] == 20
    assert captured["causal"] is False
    if attention is kernel.attention:
        assert captured["fa_version"] == 3


def test_no_version_for_the_gpu_is_an_error(monkeypatch):
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size: None)
    kernel.fa_version.cache_clear()
    with pytest.raises(RuntimeError, match="head dim 80.*VLLM_FLASHINFER_VIT_KERNEL"):
        kernel.fa_version(80)


def test_version_4_has_the_tile_that_was_measured(calls):
    for head_dim in (64, 72, 80, 96):
        q, k, v = make_qkv(Case("one", (4,)), 2, head_dim, torch.float16)
        cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
        kernel.attention_4(q, k, v, cu_seqlens, 4, 0.1)
    tiles = [call.get("tile_mn") for call in calls]
    assert tiles == [None, (192, 112), (192, 112), None]


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_version_4_gets_rows_that_it_can_load(calls, offset):
    """Eight values of 16 bits at a time, from where 16 bytes begin."""
    shape = (6, 2, 64)
    memory = torch.randn(6 * 2 * 64 + 16).half()
    memory = memory[(-memory.data_ptr() // 2) % 8 :]
    v = memory[offset:].as_strided(shape, (128, 64, 1))
    odd = memory.as_strided(shape, (65, 64, 1))
    cu_seqlens = torch.tensor([0, 6], dtype=torch.int32)
    for given in (v, odd):
        out = kernel.attention_4(v, v, given, cu_seqlens, 6, 0.1)
        torch.testing.assert_close(out, attention_ref(v, v, given, cu_seqlens, 6, 0.1))
    assert (calls[0]["v"] is v) is (offset != 1)
    assert calls[1]["v"].is_contiguous()


def test_vllm_takes_the_arguments(attention, calls):
    """Its modules need a GPU to load, so the sources are read."""
    vllm = importlib.util.find_spec("vllm")
    folder = Path(vllm.origin).parent / "vllm_flash_attn"
    path, name = folder / "flash_attn_interface.py", "flash_attn_varlen_func"
    if attention is kernel.attention_4:
        path, name = folder / "cute" / "interface.py", "_flash_attn_fwd"
    functions = {
        node.name: {arg.arg for arg in node.args.args + node.args.kwonlyargs}
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    q, k, v = make_qkv(Case("one", (4,)), 2, 80, torch.float16)
    attention(q, k, v, torch.tensor([0, 4], dtype=torch.int32), 4, 0.1)
    assert set(calls[0]) <= functions[name]

    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    assert "head_size" in inspect.signature(get_flash_attn_version).parameters


@pytest.mark.extended
def test_version_4_compiles_for_hopper():
    """No GPU is needed to see whether this vLLM's does."""
    script = Path(__file__).with_name("compile_flash_attn_4.py")
    env = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "3"

# SPDX-License-Identifier: Apache-2.0
"""What reaches vLLM's FlashAttention, without a GPU; `test_attention.py` runs it."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from cases import CASES, Case, make_qkv, params
from vllm_flashinfer_vit.kernels import flash_attn as kernel
from vllm_flashinfer_vit.reference.attention import attention_ref

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
    monkeypatch.setattr(kernel, "fa_version", lambda head_dim: 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


@pytest.mark.parametrize("is_capturing", [False, True])
@pytest.mark.parametrize("case", params(CASES))
def test_cases(calls, monkeypatch, case, is_capturing):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    q, k, v = make_qkv(case, 4, 80, torch.float16, kv_heads=2)
    cu_seqlens = case.cu_seqlens()
    out = kernel.attention(q, k, v, cu_seqlens, case.max_seqlen, 0.1)
    expected = attention_ref(q, k, v, cu_seqlens, case.max_seqlen, 0.1)
    assert out.is_contiguous()
    assert torch.equal(out[: case.tokens], expected[: case.tokens])
    if is_capturing:
        assert (out[case.tokens :] == 0).all()
    if case.rows == 0:
        assert not calls


def test_only_a_capture_derives_cu_seqlens(calls, monkeypatch):
    case = Case("zero-tail", (10, 20), zeros=2, pad_rows=4)
    q, k, v = make_qkv(case, 2, 64, torch.float16)
    cu_seqlens = case.cu_seqlens()
    kernel.attention(q, k, v, cu_seqlens, 20, 0.1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel.attention(q, k, v, cu_seqlens, 20, 0.1)
    eager, captured = calls
    assert eager["cu_seqlens_q"] is eager["cu_seqlens_k"] is cu_seqlens
    assert captured["cu_seqlens_q"] is captured["cu_seqlens_k"]
    assert captured["cu_seqlens_q"].tolist() == [0, 10, 30, 30, 30]
    assert torch.equal(captured["v"][:30], v[:30])
    assert (captured["v"][30:] == 0).all()
    assert captured["max_seqlen_q"] == captured["max_seqlen_k"] == 20
    assert captured["causal"] is False
    assert captured["fa_version"] == 3


def test_no_version_for_the_gpu_is_an_error(monkeypatch):
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size: None)
    kernel.fa_version.cache_clear()
    with pytest.raises(RuntimeError, match="head dim 80.*VLLM_FLASHINFER_VIT_KERNEL"):
        kernel.fa_version(80)


def test_vllm_takes_the_arguments(calls):
    """Its module needs a GPU to load, so the source is read."""
    vllm = importlib.util.find_spec("vllm")
    source = Path(vllm.origin).parent / "vllm_flash_attn" / "flash_attn_interface.py"
    functions = {
        node.name: {arg.arg for arg in node.args.args + node.args.kwonlyargs}
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    q, k, v = make_qkv(Case("one", (4,)), 2, 64, torch.float16)
    kernel.attention(q, k, v, torch.tensor([0, 4], dtype=torch.int32), 4, 0.1)
    assert set(calls[0]) <= functions["flash_attn_varlen_func"]

    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    assert "head_size" in inspect.signature(get_flash_attn_version).parameters

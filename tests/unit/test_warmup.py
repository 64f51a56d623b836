# SPDX-License-Identifier: Apache-2.0
"""What a warm-up runs, and what is counted; on a GPU, that requests build nothing."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_flashinfer_vit.choices.lookup import bounds, encode, select
from vllm_flashinfer_vit.engine import warmup
from vllm_flashinfer_vit.kernels.buckets import bucket_max_len, bucket_num_seqs


def test_lengths_meet_every_class() -> None:
    assert warmup.lengths((100, 2048)) == [
        16, 32, 64, 100, 101, 128, 256, 512, 1024, 2048, 2049, 4096,
    ]  # fmt: skip
    assert warmup.lengths(())[-1] == 4096


@given(
    st.integers(1, 9000), st.lists(st.integers(1, 4000) | st.integers(1, 2), min_size=1)
)
def test_plan_shapes_hold_every_batch(longest: int, parts: list[int]) -> None:
    lens = [n for n in parts if n <= longest]
    while sum(lens) > longest:
        lens.pop()
    if not lens:
        return
    buckets = {(n, bucket_max_len(m)) for n, m in warmup.plan_shapes(longest)}
    assert (bucket_num_seqs(len(lens)), bucket_max_len(max(lens))) in buckets


def test_plan_shapes_end() -> None:
    assert warmup.plan_shapes(64) == [(8, 64), (16, 64), (32, 64), (64, 64)]
    shapes = warmup.plan_shapes(65536, 2049)
    assert min(m for _, m in shapes) == 4096
    assert max(m for _, m in shapes) == 65536
    assert len(shapes) == len(set(shapes)) == 50


def test_triton_kernels_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    from triton import knobs

    events = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **event: events.append(event)
    warmup._triton_count.cache_clear()
    try:
        start = warmup.counters().triton_kernels
        with caplog.at_level(logging.DEBUG, "vllm.plugins.flashinfer_vit"):
            knobs.runtime.jit_post_compile_hook(repr="kernel[x]")
        assert warmup.counters().triton_kernels == start + 1
        assert events == [{"repr": "kernel[x]"}]
    finally:
        knobs.runtime.jit_post_compile_hook = before
        warmup._triton_count.cache_clear()


def test_counters_are_one_line_of_json() -> None:
    text = warmup.Counters(1, 2, 3).to_json()
    assert json.loads(text) == {
        "schema": warmup.SCHEMA,
        "triton_kernels": 1,
        "cudnn_plans": 2,
        "workspace_bytes": 3,
    }


def test_equal_layers_warm_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(warmup, "_run", lambda *args: runs.append(args[1:3]))
    monkeypatch.setattr(warmup, "_warm", set())
    monkeypatch.setattr(warmup, "_max_patches", lambda: 8192)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    layer = SimpleNamespace(
        signature=("a",), bounds=(128,), kernel_for=lambda *_: "flash_attn"
    )
    with warmup.without_warm_up():
        warmup.warm_up(layer)
    assert not runs
    warmup.warm_up(layer)
    assert runs == [(1, length) for length in warmup.lengths((128,))]
    warmup.warm_up(layer)
    assert len(runs) == len(warmup.lengths((128,)))
    layer.signature, layer.kernel_for = ("b",), lambda *_: "cudnn"
    warmup.warm_up(layer)
    assert runs[-1] == (bucket_num_seqs(1024), 8192)


def test_the_kernel_for_many_sequences_warms_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = "600:triton,*:flash_attn_4/flash_attn"
    ran = []

    def run(layer: Any, num_seqs: int, length: int, rotate: bool) -> None:
        ran.append((length, select(plan, length, length / num_seqs)))

    monkeypatch.setattr(warmup, "_run", run)
    monkeypatch.setattr(warmup, "_warm", set())
    monkeypatch.setattr(warmup, "_max_patches", lambda: 8192)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    layer = SimpleNamespace(
        signature=(plan,),
        bounds=bounds(plan),
        kernel_for=lambda *lengths: select(plan, *lengths),
    )
    warmup.warm_up(layer)
    assert len(ran) == len(set(ran))
    for kernel in ("flash_attn_4", "flash_attn"):
        lengths = [length for length, name in ran if name == kernel]
        assert lengths == [601, 1024, 2048, 4096]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 80])
@pytest.mark.parametrize("rotate", [True, False])
def test_no_call_compiles_after_it(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, rotate: bool
) -> None:
    from vllm_flashinfer_vit.engine.selection import served
    from vllm_flashinfer_vit.ops import attention as ops

    choices = served(head_dim, torch.bfloat16)
    assert choices is not None
    plan = encode(choices)

    def attend(q, k, v, cos, sin, cu_seqlens, max_seqlen):
        scale = head_dim**-0.5
        return ops.attention(q, k, v, cos, sin, cu_seqlens, max_seqlen, 0, scale, plan)

    layer = SimpleNamespace(
        signature=(plan, rotate),
        bounds=bounds(plan),
        kernel_for=lambda *lengths: select(plan, *lengths),
        num_heads=16,
        num_kv_heads=16,
        head_size=head_dim,
        dtype=torch.bfloat16,
        attend=attend,
    )
    monkeypatch.setattr(warmup, "_warm", set())
    monkeypatch.setattr(warmup, "_max_patches", lambda: 32768)
    patch = SimpleNamespace(applied=rotate)
    monkeypatch.setattr(warmup.qwen_vl, "PATCHES", (patch,))
    warmup.warm_up(layer)
    before = warmup.counters()
    for count, length in ((1, 1), (3, 7), (40, 64), (9, 100), (20, 400), (2, 9000)):
        tokens = count * length
        qkv = torch.randn(tokens, 48, head_dim, dtype=torch.bfloat16, device="cuda")
        q, k, v = qkv.split(16, dim=1)
        on = {"dtype": qkv.dtype, "device": qkv.device}
        cos = sin = torch.randn(tokens, head_dim // 2, **on) if rotate else None
        cu = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
        attend(q, k, v, cos, sin, cu, torch.tensor(length))
    torch.cuda.synchronize()
    assert warmup.counters() == before

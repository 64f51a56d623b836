# SPDX-License-Identifier: Apache-2.0
"""What a warm-up runs, and what is counted; on a GPU, that requests build nothing."""

import gc
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_flashinfer_vit.engine import warmup
from vllm_flashinfer_vit.engine.warmup import WarmUp
from vllm_flashinfer_vit.kernels.buckets import bucket_max_len, bucket_num_seqs
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.ops.plan import Plan
from vllm_flashinfer_vit.settings import Settings


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


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """What warm-ups run instead: counts of sequences, lengths, and whether q turns."""
    seen: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(
        warmup,
        "_run",
        lambda layer, *shape: seen.append(
            (*shape, (layer.rotary_dtype, layer.is_interleaved))
        ),
    )
    monkeypatch.setattr(warmup, "_max_patches", lambda: 8192)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return seen


def an_engine() -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace())


# What a layer's q and k are turned by: the dtype, and whether pairs are interleaved.
Turned = tuple[torch.dtype | None, bool]


def a_layer(plan: str, turned: Turned = (None, False)) -> Any:
    decoded = Plan.decode(plan)
    return SimpleNamespace(
        signature=(plan,),
        bounds=decoded.bounds,
        kernel_for=decoded.kernel_for,
        rotary_dtype=turned[0],
        is_interleaved=turned[1],
    )


WINDOWS = "128:triton_window,*:flash_attn"


def test_equal_layers_warm_up_once(
    runs: list[tuple[int, int, Turned]],
) -> None:
    engine = WarmUp(an_engine())
    engine.run(a_layer(WINDOWS))
    assert runs == [(1, length, (None, False)) for length in warmup.lengths((128,))]
    engine.run(a_layer(WINDOWS))
    assert len(runs) == len(warmup.lengths((128,)))
    engine.run(a_layer("*:cudnn"))
    assert runs[-1][:2] == (bucket_num_seqs(1024), 8192)


def test_layers_that_turn_q_are_not_equal_to_those_that_do_not(
    runs: list[tuple[int, int, Turned]],
) -> None:
    engine = WarmUp(an_engine())
    kinds = [(dtype, False) for dtype in (torch.float32, torch.bfloat16, None)]
    kinds.append((torch.float32, True))
    for kind in kinds:
        engine.run(a_layer(WINDOWS, kind))
    for kind in kinds:
        assert [(n, length) for n, length, turned in runs if turned == kind] == [
            (1, length) for length in warmup.lengths((128,))
        ]


def test_an_engine_warms_up_by_itself(
    runs: list[tuple[int, int, Turned]],
) -> None:
    first, second = an_engine(), an_engine()
    one, other = WarmUp.of(first), WarmUp.of(second)
    # vLLM derives configurations for parts of a model.
    assert WarmUp.of(SimpleNamespace(**vars(first))) is one is not other
    one.is_wanted = False
    one.run(a_layer(WINDOWS))
    assert not runs
    other.run(a_layer(WINDOWS))
    assert runs
    del one, other
    gc.collect()
    assert WarmUp.of(first).is_wanted


def test_the_kernel_for_many_sequences_warms_up() -> None:
    layer = a_layer("600:triton,*:flash_attn_4/flash_attn")
    shapes = warmup.shapes_of(layer, 8192)
    ran = [(length, layer.kernel_for(length, length / n)) for n, length in shapes]
    assert len(ran) == len(set(ran))
    for kernel in ("flash_attn_4", "flash_attn"):
        lengths = [length for length, name in ran if name == kernel]
        assert lengths == [601, 1024, 2048, 4096]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 80])
@pytest.mark.parametrize(
    ("rotary_dtype", "interleaved"),
    [(torch.bfloat16, False), (torch.float32, True), (None, False)],
    ids=["halves", "interleaved", "none"],
)
def test_no_call_compiles_after_it(
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    rotary_dtype: torch.dtype | None,
    interleaved: bool,
) -> None:
    from vllm_flashinfer_vit.choices.lookup import plan_of
    from vllm_flashinfer_vit.engine.selection import served
    from vllm_flashinfer_vit.ops.attention import attention

    choices = served(head_dim, torch.bfloat16, Settings())
    assert choices is not None
    plan = plan_of(choices)

    def attend(batch: Batch) -> torch.Tensor:
        return attention(batch, head_dim**-0.5, plan)

    layer: Any = SimpleNamespace(
        signature=(plan.text,),
        bounds=plan.bounds,
        kernel_for=plan.kernel_for,
        rotary_dtype=rotary_dtype,
        is_interleaved=interleaved,
        num_heads=16,
        num_kv_heads=16,
        head_size=head_dim,
        dtype=torch.bfloat16,
        attend=attend,
    )
    monkeypatch.setattr(warmup, "_max_patches", lambda: 32768)
    WarmUp(an_engine()).run(layer)
    before = warmup.counters()
    for count, length in ((1, 1), (3, 7), (40, 64), (9, 100), (20, 400), (2, 9000)):
        tokens = count * length
        qkv = torch.randn(tokens, 48, head_dim, dtype=torch.bfloat16, device="cuda")
        q, k, v = qkv.split(16, dim=1)
        cos = sin = None
        if rotary_dtype is not None:
            cos = sin = torch.randn(tokens, head_dim // 2, device="cuda")
            cos = sin = cos.to(rotary_dtype)
        cu = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
        longest = torch.tensor(length)
        attend(Batch(q, k, v, cos, sin, cu, longest, interleaved=interleaved))
    torch.cuda.synchronize()
    assert warmup.counters() == before

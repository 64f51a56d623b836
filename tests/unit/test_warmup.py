# SPDX-License-Identifier: Apache-2.0
"""What a warm-up runs, and what is counted; on a GPU, that requests build nothing."""

import gc
import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_flashinfer_vit.engine import warmup
from vllm_flashinfer_vit.engine.warmup import WarmUp
from vllm_flashinfer_vit.kernels.buckets import bucket_max_len, bucket_num_seqs
from vllm_flashinfer_vit.ops.batch import LAYOUTS, Batch, Layout, Turning
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
        start, (own, _) = warmup.counters().triton_kernels, warmup.built()
        with caplog.at_level(logging.DEBUG, "vllm.plugins.flashinfer_vit"):
            knobs.runtime.jit_post_compile_hook(repr="kernel[x]")
        assert warmup.counters().triton_kernels == start + 1
        assert events == [{"repr": "kernel[x]"}]
        assert warmup.built()[0] == own
        for module in ("vllm.ops", "vllm_flashinfer_vit.kernels.flash"):
            knobs.runtime.jit_post_compile_hook(fn=SimpleNamespace(module=module))
        # Of other packages nothing is said to have been built in a request.
        assert warmup.built()[0] == own + 1
        assert warmup.counters().triton_kernels == start + 3
    finally:
        knobs.runtime.jit_post_compile_hook = before
        warmup._triton_count.cache_clear()


# A count of sequences, the longest length, how q, k and v lie, and what turns q and k.
Run = tuple[int, int, Layout, Turning | None]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """What warm-ups run instead."""
    seen: list[Run] = []
    monkeypatch.setattr(
        warmup,
        "_run",
        lambda layer, *shape: seen.append((*shape, layer.turning)),
    )
    monkeypatch.setattr(warmup, "_max_patches", lambda: 8192)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return seen


def an_engine() -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace())


def a_layer(
    plan: str,
    turning: Turning | None = None,
    layouts: tuple[Layout, ...] = ("views",),
) -> Any:
    decoded = Plan.decode(plan)
    return SimpleNamespace(
        signature=(plan,),
        bounds=decoded.bounds,
        kernel_for=decoded.kernel_for,
        turning=turning,
        gets_turned=False,
        layouts=layouts,
    )


WINDOWS = "128:triton_window,*:flash_attn"


def test_equal_layers_warm_up_once(
    runs: list[Run],
) -> None:
    engine = WarmUp(an_engine())
    engine.run(a_layer(WINDOWS))
    assert runs == [(1, length, "views", None) for length in warmup.lengths((128,))]
    engine.run(a_layer(WINDOWS))
    assert len(runs) == len(warmup.lengths((128,)))
    engine.run(a_layer("*:cudnn"))
    assert runs[-1][:2] == (bucket_num_seqs(1024), 8192)


def test_layers_that_turn_q_are_not_equal_to_those_that_do_not(
    runs: list[Run],
) -> None:
    engine = WarmUp(an_engine())
    kinds = [
        None,
        Turning(torch.float32, 80),
        Turning(torch.bfloat16, 80),
        Turning(torch.float32, 78),
        Turning(torch.float32, 80, interleaved=True),
    ]
    for kind in kinds:
        engine.run(a_layer(WINDOWS, kind))
    for kind in kinds:
        assert [(n, length) for n, length, _, turned in runs if turned == kind] == [
            (1, length) for length in warmup.lengths((128,))
        ]


def test_layers_that_get_q_turned_are_not_equal_to_those_that_do_not(
    runs: list[Run],
) -> None:
    """Blocks of one tower may have projections that turn it, and others."""
    engine, layer = WarmUp(an_engine()), a_layer(WINDOWS)
    for layer.gets_turned in (False, True, True):
        engine.run(layer)
    assert len(runs) == 2 * len(warmup.lengths((128,)))


def test_plans_are_built_for_each_layout(runs: list[Run]) -> None:
    """Others run what is compiled for any strides, in one."""
    engine = WarmUp(an_engine())
    engine.run(a_layer("128:triton_window,*:cudnn", layouts=LAYOUTS))
    shapes = warmup.plan_shapes(8192, 129)
    for layout in LAYOUTS:
        found = [run[:2] for run in runs if run[2] == layout]
        assert found[-len(shapes) :] == shapes
        others = [] if layout != LAYOUTS[0] else warmup.lengths((128,))
        assert len(found) == len(shapes) + len(others)
    runs.clear()
    # A layer that gets them in another way only is not equal to those.
    engine.run(a_layer("128:triton_window,*:cudnn", layouts=("packed",)))
    assert {layout for _, _, layout, _ in runs} == {"packed"}
    runs.clear()
    engine.run(a_layer("*:cudnn_fp8", layouts=LAYOUTS))
    assert {layout for _, _, layout, _ in runs} == {"views"}


def test_no_plans_for_lengths_that_no_call_reaches(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    for most in (0, 128):
        monkeypatch.setattr(warmup, "_max_patches", lambda most=most: most)
        WarmUp(an_engine()).run(a_layer("128:triton_window,*:cudnn"))
    assert [run[:2] for run in runs] == [(1, n) for n in warmup.lengths((128,))] * 2


def a_layer_that_notes(batches: list[Batch], **more: Any) -> Any:
    named = {"turning": None, "gets_turned": False, **more}
    return SimpleNamespace(
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        dtype=torch.float16,
        attend=batches.append,
        **named,
    )


def test_one_token_is_real_whatever_is_declared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its work grows with the square of that, and no plan or variant reads it."""
    batches: list[Batch] = []
    layer = a_layer_that_notes(batches)
    monkeypatch.setattr(warmup, "_DEVICE", "cpu")
    for num_seqs in (1, 8):
        warmup._run(layer, num_seqs, 300, "views")
        batch = batches.pop()
        assert batch.cu_seqlens.tolist() == [0] + [1] * num_seqs
        assert batch.max_seqlen == len(batch.q) == len(batch.k) == len(batch.v) == 300


@pytest.mark.parametrize(
    ("layout", "packed"),
    [
        ("views", (False, False, False)),
        ("turned", (True, True, False)),
        ("packed", (True, True, True)),
    ],
)
def test_tensors_lie_and_turn_as_the_layers_do(
    layout: Layout, packed: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Batch] = []
    monkeypatch.setattr(warmup, "_DEVICE", "cpu")
    for turning in (
        None,
        Turning(torch.float32, 12),
        Turning(torch.bfloat16, 16, interleaved=True),
    ):
        warmup._run(a_layer_that_notes(batches, turning=turning), 1, 300, layout)
        batch = batches.pop()
        qkv = batch.q, batch.k, batch.v
        assert tuple(x.is_contiguous() for x in qkv) == packed
        assert [x.shape[1] for x in qkv] == [4, 2, 2]
        if turning is None:
            assert batch.cos is batch.sin is None
            continue
        assert batch.interleaved is turning.interleaved
        for table in (batch.cos, batch.sin):
            assert table is not None and table.dtype == turning.dtype
            assert table.shape == (300, turning[1] // 2)


@pytest.mark.parametrize("taken", [None, "turned", "quantized"])
@pytest.mark.parametrize("gets_turned", [False, True])
def test_kernels_also_run_on_what_their_projection_turns(
    gets_turned: bool, taken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that turn q and k themselves never get it."""
    batches: list[Batch] = []
    layer = a_layer_that_notes(
        batches,
        turning=Turning(torch.float32, 16),
        gets_turned=gets_turned,
        taken=lambda batch: taken,
    )
    monkeypatch.setattr(warmup, "_DEVICE", "cpu")
    warmup._run(layer, 1, 300, "views")
    found = [batch.cos is None for batch in batches]
    reads_turned = gets_turned and taken == "turned"
    assert found == ([False, True] if reads_turned else [False])


def test_calls_are_as_large_as_the_encoder_budget_of_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long requests may be."""
    from vllm import config
    from vllm.multimodal import MULTIMODAL_REGISTRY, encoder_budget

    engine = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=262144),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
    )
    resets: list[None] = []

    class Budget(encoder_budget.MultiModalBudget):
        def __init__(self, *args: Any) -> None:
            inspect.signature(encoder_budget.MultiModalBudget).bind(*args)
            assert args == (engine, MULTIMODAL_REGISTRY)
            assert torch.get_default_dtype() == torch.float32
            assert torch.empty(1).is_cpu
            self.encoder_compute_budget = self.encoder_cache_size = 16384

        def reset_cache(self) -> None:
            resets.append(None)

    monkeypatch.setattr(config, "get_current_vllm_config", lambda: engine)
    with monkeypatch.context() as context:
        context.setattr(encoder_budget, "MultiModalBudget", Budget)
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            assert warmup._max_patches() == 4 * 16384
    assert resets == [None]


def test_an_engine_warms_up_by_itself(
    runs: list[Run],
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
    shapes = warmup.shapes_of(layer)
    ran = [(length, layer.kernel_for(length, length / n)) for n, length, _ in shapes]
    assert len(ran) == len(set(ran))
    for kernel in ("flash_attn_4", "flash_attn"):
        lengths = [length for length, name in ran if name == kernel]
        assert lengths == [601, 1024, 2048, 4096]


def a_whole_layer(
    plan: Plan,
    heads: int,
    head_dim: int,
    turning: Turning | None,
    layouts: tuple[Layout, ...] = ("views",),
) -> Any:
    """All that a warm-up asks of a layer, which attends."""
    from vllm_flashinfer_vit.ops.attention import attention

    return SimpleNamespace(
        signature=(plan.text,),
        bounds=plan.bounds,
        kernel_for=plan.kernel_for,
        turning=turning,
        gets_turned=False,
        layouts=layouts,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=head_dim,
        dtype=torch.bfloat16,
        attend=lambda batch: attention(batch, head_dim**-0.5, plan),
    )


@pytest.mark.parametrize("turning", [None, Turning(torch.float32, 16)])
def test_a_whole_layer_warms_up_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, turning: Turning | None
) -> None:
    """The tests that need a GPU ask for no more of it."""
    monkeypatch.setattr(warmup, "_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    layer = a_whole_layer(Plan.of("reference"), 2, 16, turning)
    attended: list[int] = []
    attend = layer.attend
    layer.attend = lambda batch: attended.append(len(attend(batch)))
    WarmUp(an_engine()).run(layer)
    assert attended == warmup.lengths(())


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 80])
@pytest.mark.parametrize(
    "turned",
    [None, (torch.bfloat16, False), (torch.float32, True)],
    ids=["none", "halves", "interleaved"],
)
def test_no_call_compiles_after_it(
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    turned: tuple[torch.dtype, bool] | None,
) -> None:
    from vllm_flashinfer_vit.choices.lookup import plan_of
    from vllm_flashinfer_vit.engine.selection import served

    turning = None if turned is None else Turning(turned[0], head_dim, turned[1])
    choices = served(head_dim, torch.bfloat16, Settings())
    assert choices is not None
    plan = plan_of(choices)
    layer = a_whole_layer(plan, 16, head_dim, turning)
    monkeypatch.setattr(warmup, "_max_patches", lambda: 32768)
    WarmUp(an_engine()).run(layer)
    before = warmup.counters()
    for count, length in ((1, 1), (3, 7), (40, 64), (9, 100), (20, 400), (2, 9000)):
        tokens = count * length
        qkv = torch.randn(tokens, 48, head_dim, dtype=torch.bfloat16, device="cuda")
        q, k, v = qkv.split(16, dim=1)
        cos = sin = None
        if turning is not None:
            cos = sin = torch.randn(tokens, head_dim // 2, device="cuda")
            cos = sin = cos.to(turning.dtype)
        cu = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
        longest = torch.tensor(length)
        interleaved = turning is not None and turning.interleaved
        layer.attend(Batch(q, k, v, cos, sin, cu, longest, interleaved=interleaved))
    torch.cuda.synchronize()
    assert warmup.counters() == before


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8,
    reason="cuDNN attention needs capability 8.0",
)
@pytest.mark.parametrize(
    "turning", [None, Turning(torch.float32, 72)], ids=["own", "program"]
)
def test_no_call_builds_a_plan_after_it(
    monkeypatch: pytest.MonkeyPatch, turning: Turning | None
) -> None:
    """Of layers that turn q and k themselves, or have a program do it."""
    heads, head_dim = 4, 72
    layouts: tuple[Layout, ...] = ("views",) if turning else LAYOUTS
    layer = a_whole_layer(Plan.of("cudnn"), heads, head_dim, turning, layouts)
    monkeypatch.setattr(warmup, "_max_patches", lambda: 512)
    WarmUp(an_engine()).run(layer)
    before = warmup.counters()
    for lengths in ((100, 28), (300,), (1,) * 40, (500, 0, 12)):
        on: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        tokens = sum(lengths)
        q, k, v = torch.randn(tokens, 3 * heads, head_dim, **on).split(heads, dim=1)
        cos = sin = None
        if turning is not None:
            on["dtype"] = turning.dtype
            cos = sin = torch.randn(tokens, head_dim // 2, **on)
        cu = torch.tensor((0, *lengths), device="cuda").cumsum(0).int()
        for layout in layouts:
            if layout != "views":
                q, k = q.contiguous(), k.contiguous()
            if layout == "packed":
                v = v.contiguous()
            layer.attend(Batch(q, k, v, cos, sin, cu, torch.tensor(max(lengths))))
    torch.cuda.synchronize()
    assert warmup.counters() == before

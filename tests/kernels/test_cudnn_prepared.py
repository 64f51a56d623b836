# SPDX-License-Identifier: Apache-2.0
"""Which plans a warm-up builds, and what is left to a prepared call, without a GPU."""

from types import SimpleNamespace

import pytest
import torch
from _cudnn_graph import IMAGES, assert_close

from cases import Case, make_qkv
from vllm_flashinfer_vit.engine import warmup
from vllm_flashinfer_vit.kernels import cudnn as kernel
from vllm_flashinfer_vit.kernels import seqlens
from vllm_flashinfer_vit.ops.attention import prepare
from vllm_flashinfer_vit.ops.batch import LAYOUTS, Batch, Turning
from vllm_flashinfer_vit.ops.plan import Plan

pytestmark = [
    pytest.mark.usefixtures("nan_empty"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces the real cuDNN"),
]


def _gathered(v, ranks=2):
    """Return v as Qwen2-VL's ranks have it: a view of what they gather of all heads."""
    tokens, heads, head_dim = v.shape
    qkv = torch.zeros(tokens, 3 * ranks * heads, head_dim, dtype=v.dtype)
    qkv[:, -heads:] = v
    return qkv[:, -heads:]


# What towers hand over, from what they project. `make_qkv` returns views of it.
HANDED = {
    # No rotary, or a program that turns q and k where they lie.
    "views": lambda q, k, v: (q, k, v),
    # Kimi-VL, Keye, and others that turn q and k themselves.
    "turned": lambda q, k, v: (q.contiguous(), k.contiguous(), v),
    # Layers of their own project q, k and v, as in Intern-S1.
    "apart": lambda q, k, v: tuple(x.contiguous() for x in (q, k, v)),
    # Qwen2-VL without its program, under tensor parallelism.
    "gathered": lambda q, k, v: (q.contiguous(), k.contiguous(), _gathered(v)),
}


def _layer(**attributes):
    def attend(batch):
        return prepare(batch, 0.1, Plan.of("cudnn"))()

    plan = Plan.of("cudnn")
    return SimpleNamespace(
        **{
            "signature": (),
            "bounds": (),
            "kernel_for": plan.kernel_for,
            "turning": None,
            "gets_turned": False,
            "taken": lambda batch: "turned",
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_size": 72,
            "dtype": torch.bfloat16,
            "attend": attend,
            **attributes,
        }
    )


@pytest.fixture
def warm_up(flashinfer, plans, monkeypatch):
    """Warms a layer up on the CPU, and returns the plans."""

    def run(layer):
        warmup.WarmUp(SimpleNamespace(compilation_config=None)).run(layer)
        assert plans.built
        return plans

    monkeypatch.setattr(warmup, "_DEVICE", "cpu")
    monkeypatch.setattr(warmup, "_max_patches", lambda: 128)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return run


@pytest.mark.parametrize("hand_over", HANDED.values(), ids=HANDED)
def test_warm_up_builds_the_plans_of_a_layer(warm_up, hand_over):
    layer = _layer(layouts=LAYOUTS)
    plans = warm_up(layer)
    built = plans.built
    for case in (IMAGES, Case("short", (3, 2)), Case("many", (2,) * 40)):
        q, k, v = make_qkv(case, 4, 72, torch.bfloat16, kv_heads=2)
        handed = hand_over(q, k, v)
        longest = torch.tensor(case.max_seqlen)
        batch = Batch(*handed, cu_seqlens=case.cu_seqlens(), max_seqlen=longest)
        assert_close(layer.attend(batch), (q, k, v), case, 0.1)
    assert plans.built == built


@pytest.mark.parametrize("ranks", [1, 2])
def test_warm_up_builds_the_plans_of_a_program(warm_up, ranks):
    """It turns q and k, and hands over views of what each rank projects or gathers."""
    layouts = ("views",) if ranks == 1 else ("packed",)
    layer = _layer(layouts=layouts, turning=Turning(torch.float32, 72))
    plans = warm_up(layer)
    built = plans.built
    q, k, v = make_qkv(IMAGES, 4, 72, torch.bfloat16, kv_heads=2)
    handed = (q, k, v) if ranks == 1 else map(_gathered, (q, k, v))
    cos, sin = torch.ones(IMAGES.tokens, 36), torch.zeros(IMAGES.tokens, 36)
    batch = Batch(*handed, cos, sin, IMAGES.cu_seqlens(), torch.tensor(100))
    assert_close(layer.attend(batch), (q, k, v), IMAGES, 0.1)
    assert plans.built == built


def test_warm_up_builds_the_plans_of_a_projection_that_turns(warm_up):
    """Of some batches q and k come turned, as views of one projection still."""
    turning = Turning(torch.float32, 72)
    layer = _layer(layouts=("views",), turning=turning, gets_turned=True)
    plans = warm_up(layer)
    built = plans.built
    q, k, v = make_qkv(IMAGES, 4, 72, torch.bfloat16, kv_heads=2)
    offsets = {"cu_seqlens": IMAGES.cu_seqlens(), "max_seqlen": torch.tensor(100)}
    for tables in ((), (torch.ones(IMAGES.tokens, 36), torch.zeros(IMAGES.tokens, 36))):
        batch = Batch(q, k, v, *tables, **offsets)
        assert_close(layer.attend(batch), (q, k, v), IMAGES, 0.1)
    assert plans.built == built


def test_warm_up_turns_as_much_of_a_head_as_a_program(warm_up):
    layer = _layer(layouts=("views",), turning=Turning(torch.float32, 64))
    attend, shapes = layer.attend, set()

    def noting(batch):
        shapes.update([batch.cos.shape[1], batch.sin.shape[1]])
        return attend(batch)

    layer.attend = noting
    warm_up(layer)
    assert shapes == {32}


@pytest.mark.parametrize("is_capturing", [False, True])
@pytest.mark.parametrize("hand_over", HANDED.values(), ids=HANDED)
def test_a_prepared_call_only_executes(
    flashinfer, plans, monkeypatch, hand_over, is_capturing
):
    case, again = (Case("any", n, pad_rows=9) for n in ((100, 28), (20, 108)))
    handed = hand_over(*make_qkv(case, 4, 72, torch.bfloat16, kv_heads=2))
    cu_seqlens = case.cu_seqlens()
    args = *handed, cu_seqlens, 108, 0.1
    kernel.prepare(*args)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    call = kernel.prepare(*args)
    for name in ("_check", "_are_read", "PlanKey", "_backend"):
        monkeypatch.setattr(kernel, name, None)
    monkeypatch.setattr(plans, "plan", None)
    outs = []
    for seed, now in enumerate((case, case) if is_capturing else (case, again)):
        new = make_qkv(now, 4, 72, torch.bfloat16, kv_heads=2, seed=seed)
        for to, x in zip(handed, new, strict=True):
            to.copy_(x)
        # In a capture it is read by what comes before the call.
        cu_seqlens.copy_(now.cu_seqlens())
        outs.append(call())
        assert_close(outs[-1], new, now, 0.1)
        assert not is_capturing or (outs[-1][now.tokens :] == 0).all()
    assert outs[0] is outs[1]


def test_a_graph_derives_once_for_all_layers(flashinfer, monkeypatch):
    derived = []

    def prepare_seqlens(*args):
        derive, found = seqlens_prepare(*args)
        return lambda: derived.append(derive()), found

    seqlens_prepare = seqlens.prepare
    monkeypatch.setattr(seqlens, "prepare", prepare_seqlens)
    qkv = make_qkv(IMAGES, 2, 80, torch.bfloat16)
    args = *qkv, IMAGES.cu_seqlens(), 100, 0.1
    kernel.prepare(*args)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = kernel.prepare(*args)
    for _ in range(3):
        call()
    assert len(derived) == 1


def test_a_prepared_call_keeps_its_stream(flashinfer, monkeypatch):
    """The handle is FlashInfer's, who may have used it on another one meanwhile."""
    streams = []
    backend = kernel._backend()

    def handle(stream):
        streams.append(stream)
        return "handle"

    monkeypatch.setattr(kernel, "_backend", lambda: backend._replace(handle=handle))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "its own")
    qkv = make_qkv(IMAGES, 2, 80, torch.bfloat16)
    call = kernel.prepare(*qkv, IMAGES.cu_seqlens(), 100, 0.1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "another")
    call()
    call()
    assert streams == ["its own"] * 2

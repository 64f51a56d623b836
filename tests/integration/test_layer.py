# SPDX-License-Identifier: Apache-2.0
"""The layer by itself: when it is built, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _layers import HEAD_DIM, HEADS, SCALE, build
from _models import engine, noise, offsets
from _towers import DEVICE, HAS_GPU, cpu_only

from cases import Case, attention_eager, make_qkv, relative_error
from vllm_flashinfer_vit import __version__, plugin
from vllm_flashinfer_vit.choices.lookup import Choice
from vllm_flashinfer_vit.choices.usable import NotServedError
from vllm_flashinfer_vit.engine import layer as layers
from vllm_flashinfer_vit.ops.plan import Plan
from vllm_flashinfer_vit.patches.fingerprints import left_out
from vllm_flashinfer_vit.settings import (
    ENV_DISABLE_PATCHES,
    ENV_KERNEL,
    ENV_STRICT,
    Settings,
)
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = pytest.mark.usefixtures("plain_kernel", "on_device")


def test_compiled_code_is_kept_apart_by_ops_patches_and_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(additional_config={})
    monkeypatch.setattr(layers, "get_current_vllm_config_or_none", lambda: config)
    layers._name_in_compile_cache(("a patch",), "a plan")
    # Of a second tower.
    layers._name_in_compile_cache(("a patch",), "b plan")
    names = config.additional_config["vllm_flashinfer_vit"]
    assert {"a patch", "a plan", "b plan", __version__} < set(names)
    ops = [name for name in names if "::" in name]
    # Code that calls an op with other arguments would fail.
    assert [re.findall(r"::(\w+)\(", op) for op in ops] == [
        ["attention"],
        ["fp8_attention"],
    ]
    assert all("bool interleaved" in op for op in ops)


LOADED = ("qwen2_vl-blocks", "qwen2_5_vl-blocks")
BLOCKS = [p for p in plugin.all_patches() if p.name in LOADED]


@pytest.fixture(scope="module")
def flashinfer(plain_kernel: None) -> Tower:
    return engine("FLASHINFER", device=DEVICE)


@pytest.fixture(autouse=True)
def patched(flashinfer: Tower) -> Iterator[None]:
    """Leave all patches applied, as the engine of the other tests does."""
    dtype = torch.get_default_dtype()
    yield
    # vLLM's context manager leaves it changed after an error.
    torch.set_default_dtype(dtype)
    plugin.apply_platform_patches()
    plugin.apply_model_patches(Settings())


@pytest.fixture(scope="module")
def sdpa() -> Tower:
    return engine("TORCH_SDPA", device=DEVICE)


# What a process is like before the package is there, and once it is, as long as no one
# asks for it.
PROCESS = """
import hashlib, json, sys, torch
sys.path[:0] = sys.argv[1:]
from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform
# Before any of vLLM's models is imported, also where there is a GPU.
use_cpu_platform(force=True)
from _models import CONTEXT, noise
from vllm_flashinfer_vit.towers.tower import build_tower
for with_plugin in (False, True):
    tower = build_tower(CONTEXT, backend="TORCH_SDPA", dtype=torch.float32,
                        device="cpu", plugin=with_plugin)
    out = tower.encode(noise(112, 1176), [[1, 8, 10], [2, 4, 4]])
    layer = next(iter(tower.attention_layers().values()))
    method = layer._forward_method
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.models.qwen2_vl import Qwen2VisionAttention
    print(json.dumps({
        "class": f"{type(layer).__module__}.{type(layer).__qualname__}",
        "method": f"{method.__func__.__module__}.{method.__func__.__qualname__}",
        "own": method.__self__ is layer,
        "attributes": sorted(vars(layer)),
        "bits": hashlib.sha256(out.numpy().tobytes()).hexdigest(),
        "model": Qwen2VisionAttention.forward.__code__.co_filename,
        "registered": "MMEncoderAttention" in op_registry_oot,
    }))
"""


def test_other_backends_run_as_without_the_package():
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, os.path.dirname(__file__)],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_PLUGINS": ""},
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    # An older vLLM logs to the same stream.
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    without, with_ = map(json.loads, lines)
    assert (with_.pop("registered"), without.pop("registered")) == (True, False)
    assert with_ == without
    assert without["class"].endswith("MMEncoderAttention")


def test_another_backend_gets_the_class_in_the_tree(sdpa: Tower) -> None:
    from vllm.model_executor.layers.attention import MMEncoderAttention

    # Why the constructor changes the class: vLLM makes an object of the registered one.
    made = MMEncoderAttention.__new__(MMEncoderAttention)
    assert type(made).__name__ == "FlashInferViTAttention"
    layer = build(sdpa)
    assert type(layer) is MMEncoderAttention
    stock = (
        MMEncoderAttention.forward_cuda if HAS_GPU else MMEncoderAttention.forward_cpu
    )
    assert layer._forward_method.__func__ is stock


def test_the_kernel_for_many_sequences_is_prepared_and_said(
    flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_flashinfer_vit.engine import layer as module
    from vllm_flashinfer_vit.kernels import flash_attn

    decided: list[int] = []
    said: list[str] = []
    choices = (Choice("flash_attn_4", None, "fast", "flash_attn"),)
    logger = SimpleNamespace(info_once=lambda text, *args: said.append(text % args))
    monkeypatch.setattr(module, "served", lambda *_: choices)
    monkeypatch.setattr(flash_attn, "fa_version", decided.append)
    monkeypatch.setattr(module, "logger", logger)
    layer = build(flashinfer)
    assert layer.kernel_for(4096, 16) == "flash_attn"
    assert decided == [HEAD_DIM]
    assert any("flash_attn_4, flash_attn below 512 rows" in line for line in said)

    def refuse(head_dim: int) -> int:
        raise RuntimeError("none here")

    monkeypatch.setattr(flash_attn, "fa_version", refuse)
    with pytest.raises(NotServedError, match=r"^layer 'a\.layer': none here$"):
        build(flashinfer)


@pytest.fixture
def unpatched_models() -> None:
    import vllm.model_executor.models.qwen2_5_vl
    import vllm.model_executor.models.qwen2_vl  # noqa: F401

    for patch in BLOCKS:
        patch.revert()


def applied() -> set[str]:
    return {patch.name for patch in BLOCKS if patch.applied}


@pytest.mark.usefixtures("unpatched_models")
class TestModelPatches:
    def test_wait_for_a_flashinfer_layer(self, flashinfer: Tower, sdpa: Tower) -> None:
        build(sdpa)
        assert applied() == set()
        build(flashinfer)
        assert applied() == {*LOADED}

    def test_one_is_left_out(
        self, flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(ENV_DISABLE_PATCHES, "qwen2_vl-blocks")
        build(flashinfer)
        assert applied() == {"qwen2_5_vl-blocks"}

    def test_unknown_name(
        self, flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(ENV_DISABLE_PATCHES, "qwen2_vl-blocks,other")
        with pytest.raises(ValueError, match=r"named other; .*qwen2_vl-blocks"):
            build(flashinfer)
        assert applied() == set()

    def test_revert_all_restores_every_object(self, flashinfer: Tower) -> None:
        plugin.revert_all()
        # This layer has no FP8 scales.
        loaded = [
            patch
            for patch in plugin.all_patches()
            if patch.loaded
            and not patch.name.startswith("fp8-")
            and patch.name not in left_out()
        ]

        def objects() -> list[object]:
            # One that a class inherits is not in it until it is patched.
            return [
                owner.__dict__.get(name) for owner, name in (p._owner() for p in loaded)
            ]

        before = objects()
        assert len(before) >= 3
        plugin.register()
        build(flashinfer)
        during = objects()
        assert not any(a is b for a, b in zip(before, during, strict=True))
        plugin.revert_all()
        assert all(a is b for a, b in zip(before, objects(), strict=True))


def qkv(tokens: int) -> tuple[torch.Tensor, ...]:
    """q, k, v `[1, T, H, D]`, strided views of one projection."""
    batch = Case("", (tokens,))
    return tuple(
        x[None] for x in make_qkv(batch, HEADS, HEAD_DIM, torch.float32, device=DEVICE)
    )


BAD_CALLS = {
    "int64-offsets": (
        lambda q, k, v: (q, k, v, torch.tensor([0, 4, 10])),
        r"'a.layer': cu_seqlens is torch.int64 .*must be contiguous int32",
    ),
    "offsets-in-a-matrix": (
        lambda q, k, v: (q, k, v, offsets([4, 6])[None]),
        r"'a.layer': cu_seqlens is torch.int32 of shape \(1, 3\)",
    ),
    # A kernel would read what lies between them, in a graph without an error.
    "offsets-apart": (
        lambda q, k, v: (q, k, v, torch.stack([offsets([4, 6])] * 2, dim=1)[:, 0]),
        r"'a.layer': cu_seqlens .* and stride \(2,\); it must be contiguous",
    ),
    "no-sequence": (
        lambda q, k, v: (q, k, v, offsets([])),
        r"'a.layer': cu_seqlens has 1 entries.*list of grids empty",
    ),
    "offsets-elsewhere": (
        lambda q, k, v: (q, k, v, offsets([4, 6]).to("meta")),
        r"'a.layer': cu_seqlens is on meta, the query on c(pu|uda)",
    ),
    "key-elsewhere": (
        lambda q, k, v: (q, k.to("meta"), v),
        r"'a.layer': .* are on (cpu|cuda:0), meta, (cpu|cuda:0)",
    ),
    "another-batch": (
        lambda q, k, v: (q, k.expand(2, -1, -1, -1), v),
        r"'a.layer': .* \(1, 10, 4, 16\), \(2, 10, 4, 16\), .* do not fit each other",
    ),
    "another-head-dim": (
        lambda q, k, v: (x[..., 1:] for x in (q, k, v)),
        r"'a.layer': .* of \(1, 10, 4, 15\), .* its heads: shape '\[10, 4, 16\]'",
    ),
    "mixed-dtypes": (
        lambda q, k, v: (q, k, v.half()),
        r"'a.layer': .* torch.float32, torch.float32, torch.float16",
    ),
    "another-dtype": (
        lambda q, k, v: (q.half(), k.half(), v.half()),
        r"'a.layer': built for torch.float32, called with torch.float16",
    ),
    "falling-offsets": (
        lambda q, k, v: (q, k, v, torch.tensor([0, 6, 4, 10], dtype=torch.int32)),
        r"cu_seqlens must not fall .* entry 2 is 4 after 6",
    ),
    "too-many-tokens": (
        lambda q, k, v: (q, k, v, offsets([4, 7])),
        r"cu_seqlens ends at 11, but q has 10 rows",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call(name: str, flashinfer: Tower) -> None:
    make, message = BAD_CALLS[name]
    layer = build(flashinfer)
    with pytest.raises(ValueError, match=message):
        layer(*make(*qkv(10)))


class TestConstruction:
    def test_unknown_kernel(
        self, flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(ENV_KERNEL, "fastest")
        with pytest.raises(ValueError, match=r"'fastest': use one of auto, cudnn"):
            build(flashinfer)

    @cpu_only
    @pytest.mark.parametrize("kernel", ["cudnn", "flash_attn"])
    def test_forced_kernel_that_cannot_run(
        self, kernel: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tower = engine("FLASHINFER", torch.bfloat16)
        monkeypatch.setenv(ENV_KERNEL, kernel)
        with pytest.raises(
            ValueError, match=rf"{kernel}.*needs an NVIDIA GPU"
        ) as error:
            build(tower)
        assert ENV_KERNEL in str(error.value)


def cross() -> tuple[torch.Tensor, ...]:
    return noise(3, 1, HEADS * HEAD_DIM), *(noise(3, 5, HEADS * HEAD_DIM),) * 2


class TestCrossShapes:
    def test_fall_back_is_said_once(
        self, flashinfer: Tower, sdpa: Tower, messages: list[str]
    ) -> None:
        layer = build(flashinfer, prefix="pooling.attn")
        out = layer(*cross())
        torch.testing.assert_close(out, build(sdpa)(*cross()))
        layer(*cross())
        said = [line for line in messages if "pooling.attn" in line]
        assert len(said) == 1
        assert "query and key lengths differ" in said[0]
        assert "TORCH_SDPA" in said[0]

    def test_strict_settings_refuse_them(
        self, flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(ENV_STRICT, "1")
        layer = build(flashinfer)
        with pytest.raises(
            ValueError, match=rf"'a.layer'.*lengths differ.*{ENV_STRICT}"
        ):
            layer(*cross())

    def test_with_offsets(self, flashinfer: Tower) -> None:
        layer = build(flashinfer)
        with pytest.raises(ValueError, match=r"'a.layer'.*cu_seqlens"):
            layer(*cross(), offsets([1, 2]))


BATCHES = [
    Case("one-token", (1,)),
    Case("single-tokens", (1, 1, 5, 1)),
    Case("empty-first-middle-last", (0, 17, 0, 33, 0)),
    Case("zero-tail", (10, 30), zeros=3),
    Case("zero-tail-and-padding", (10, 30), zeros=3, pad_rows=8),
    Case("repeated-tail", (10, 30), repeats=3, pad_rows=8),
    Case("nothing-but-padding", (), zeros=2, pad_rows=8),
]


@pytest.mark.parametrize("head_dim", [7, 72])
@pytest.mark.parametrize("kv_heads", [HEADS, 1])
@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
def test_sequences_attend_as_in_plain_pytorch(
    batch: Case, kv_heads: int, head_dim: int, flashinfer: Tower
) -> None:
    layer = build(flashinfer, head_size=head_dim, num_kv_heads=kv_heads)
    q, k, v = make_qkv(
        batch, HEADS, head_dim, torch.float32, kv_heads=kv_heads, device=DEVICE
    )
    longest = torch.tensor(batch.max_seqlen, dtype=torch.int32)
    out = layer(q[None], k[None], v[None], batch.cu_seqlens(DEVICE), longest)
    expected = attention_eager(q, k, v, batch, head_dim**-0.5)
    assert out.shape == (1, batch.rows, HEADS, head_dim)
    assert out.is_contiguous()
    assert relative_error(out[0], expected) < 1e-5


@pytest.mark.parametrize(
    "longest",
    [
        None,
        0,
        7,
        torch.tensor(0),
        torch.tensor(7, dtype=torch.int32),
        torch.tensor(9, dtype=torch.int64),
        torch.tensor([7]),
        torch.tensor(1 << 20),
    ],
    ids=str,
)
def test_any_form_of_the_longest_length(longest: Any, flashinfer: Tower) -> None:
    batch = Case("", (7, 3))
    q, k, v = qkv(10)
    out = build(flashinfer)(q, k, v, offsets([7, 3]), longest)
    expected = attention_eager(q[0], k[0], v[0], batch, SCALE)
    assert relative_error(out[0], expected) < 1e-5


def test_a_number_for_the_longest_length_is_taken_as_it_is(
    flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that is made of it lies on the default device, where none is read."""
    layer, asked = build(flashinfer), []
    q, k, v = qkv(10)
    cu_seqlens = offsets([7, 3])
    kernel_for = Plan.kernel_for
    monkeypatch.setattr(
        Plan,
        "kernel_for",
        lambda self, *args: asked.append(args[0]) or kernel_for(self, *args),
    )
    with torch.device("meta"):
        layer(q, k, v, cu_seqlens, 7)
    assert asked == [7]


class TestShapes:
    def test_flat_heads(self, flashinfer: Tower, sdpa: Tower) -> None:
        layer = build(flashinfer)
        q, k, v = noise(3, 2, 9, HEADS * HEAD_DIM)
        out = layer(q, k, v)
        assert out.shape == q.shape
        heads = (x.unflatten(2, (HEADS, HEAD_DIM)) for x in (q, k, v))
        torch.testing.assert_close(out, layer(*heads).flatten(2))
        torch.testing.assert_close(out, build(sdpa)(q, k, v))

    def test_offsets_run_over_the_whole_batch(self, flashinfer: Tower) -> None:
        layer = build(flashinfer)
        q, k, v = noise(3, 2, 9, HEADS * HEAD_DIM)
        packed = (x.reshape(1, 18, -1) for x in (q, k, v))
        out = layer(q, k, v, offsets([4, 8, 6]))
        torch.testing.assert_close(
            out.reshape(1, 18, -1), layer(*packed, offsets([4, 8, 6]))
        )

    @pytest.mark.parametrize("shape", [(0, 9), (2, 0)], ids=str)
    def test_no_tokens_give_none(
        self, shape: tuple[int, int], flashinfer: Tower
    ) -> None:
        x = torch.empty(*shape, HEADS, HEAD_DIM)
        assert build(flashinfer)(x, x, x).shape == x.shape

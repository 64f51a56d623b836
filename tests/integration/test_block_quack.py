# SPDX-License-Identifier: Apache-2.0
"""GEMMs of blocks that QuACK runs: who gets it, from how many rows on, with what check.

A plain stand-in computes here what QuACK's kernel computes on a Hopper GPU.
"""

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import _blocks
import pytest
import torch
from _blocks import (
    ACTIVATIONS,
    FUNCTIONS,
    GRIDS,
    SPECS,
    allow_lora,
    blocks,
    build,
    image,
    log_of,
    outputs,
    programs,
    quantized,
)
from _towers import cpu_only
from torch.nn.functional import linear

from cases import relative_error
from vllm_flashinfer_vit.blocks import layers, qkv
from vllm_flashinfer_vit.blocks import mlp as mlp_module
from vllm_flashinfer_vit.gemms import epilogue_gemm, quack
from vllm_flashinfer_vit.gemms.quack import SWIGLU, Views
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = cpu_only

# Two units of bf16 for one rounding less in each block.
TOLERANCE_BF16 = 2 * torch.finfo(torch.bfloat16).eps
ROWS = sum(t * h * w for t, h, w in GRIDS)
# Rows, the activation, the width of a tile.
Call = tuple[int, str | None, int]


@pytest.fixture
def calls(direct: None, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Pretend that this is an H200; collect what QuACK runs."""
    seen: list[Call] = []

    def prepare(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        activation: str | None,
        width: int,
    ) -> Callable[[Views], None]:
        def launch(layer: Views) -> None:
            seen.append((len(x), activation, width))
            added = None if layer.bias is None else layer.bias.flatten().float()
            sums = linear(x.float(), layer.weight.float(), added)
            out.copy_(FUNCTIONS[activation](sums))

        return launch

    def views(weight: torch.Tensor, bias: Any, activation: str | None) -> Views:
        # As QuACK's for SwiGLU, a copy.
        is_copied = bias is not None and activation == SWIGLU
        return Views(weight, bias.clone() if is_copied else bias)

    monkeypatch.setattr(quack, "has_quack", lambda: True)
    # Of that, other tests.
    monkeypatch.setattr(epilogue_gemm, "is_available", lambda: False)
    monkeypatch.setattr(quack, "prepare", prepare)
    monkeypatch.setattr(quack, "views", views)
    set_multiprocessors(monkeypatch, 132)
    return seen


def set_multiprocessors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    properties = SimpleNamespace(multi_processor_count=count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the batch of `outputs` be a large one."""
    monkeypatch.setattr(mlp_module, "MIN_QUACK_ROWS", ROWS)
    monkeypatch.setattr(qkv, "MIN_QUACK_ROWS", ROWS)


def build_bf16(family: str) -> Tower:
    """QuACK runs 16 bits only."""
    return build(family, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", SPECS)
class TestQuack:
    def test_large_batches_are_fused(
        self, family: str, calls: list[Call], large: None
    ) -> None:
        fused = build_bf16(family)
        activation = ACTIVATIONS[family]
        # Kernels are built while weights are loaded, once for all blocks.
        assert calls == [(16, None, 192), (16, None, 160)] + [
            (16, activation, 192),
            (16, activation, 160),
        ]
        calls.clear()
        found = outputs(fused)
        each = [(ROWS, None, 160), (ROWS, activation, 160)]
        assert calls == len(blocks(fused)) * each
        calls.clear()
        with _blocks.without("quack_mlp", "quack_qkv"):
            plain = build_bf16(family)
        expected = outputs(plain)
        assert not calls
        assert relative_error(found, expected) < TOLERANCE_BF16

    @pytest.mark.parametrize("name", ["quack_qkv", "quack_mlp"])
    def test_one_is_left_out(
        self, family: str, name: str, calls: list[Call], large: None
    ) -> None:
        with _blocks.without(name):
            served = build_bf16(family)
        outputs(served)
        left = ACTIVATIONS[family] if name == "quack_qkv" else None
        assert {activation for _, activation, _ in calls} == {left}

    def test_rows_decide(self, family: str, calls: list[Call]) -> None:
        served = build_bf16(family)
        qkv, hidden = None, ACTIVATIONS[family]
        for rows, expected in (
            (1020, []),
            (1024, [hidden]),
            (2044, [hidden]),
            (2048, [qkv, hidden]),
        ):
            calls.clear()
            image(served, rows)
            assert [(n, act) for n, act, _ in calls] == [
                (rows, act) for _ in blocks(served) for act in expected
            ]

    def test_small_batches_keep_their_bits(
        self, family: str, calls: list[Call]
    ) -> None:
        served = build_bf16(family)
        calls.clear()
        found = outputs(served)
        assert not calls
        with _blocks.without("quack_mlp", "quack_qkv"):
            plain = build_bf16(family)
        assert torch.equal(found, outputs(plain))

    def test_rows_choose_the_tile(
        self, family: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # One tile of 192 columns for q, k and v, or two of 160.
        set_multiprocessors(monkeypatch, 32)
        with _blocks.without("quack_mlp"):
            served = build_bf16(family)
        # It is read once.
        set_multiprocessors(monkeypatch, 1)
        calls.clear()
        for rows in (2048, 4096):
            image(served, rows)
        assert {width for rows, _, width in calls if rows == 2048} == {160}
        assert {width for rows, _, width in calls if rows == 4096} == {192}

    @pytest.mark.parametrize("place", ["qkv", "first"])
    def test_a_kernel_that_is_wrong(
        self,
        family: str,
        place: str,
        calls: list[Call],
        large: None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        said = log_of(layers, monkeypatch)
        right = quack.prepare
        wrong = None if place == "qkv" else ACTIVATIONS[family]

        def prepare(x: Any, weight: Any, bias: Any, out: Any, act: Any, width: int):
            launch = right(x, weight, bias, out, act, width)

            # Each kernel is checked.
            def negated(layer: Views) -> None:
                launch(layer)
                if act == wrong and width == 160:
                    out.neg_()

            return negated

        monkeypatch.setattr(quack, "prepare", prepare)
        served = build_bf16(family)
        spec = programs(served)[0].spec
        # The log drops what was said before.
        assert len(said) == len(blocks(served)) and len(set(said)) == 1
        path = spec.qkv if place == "qkv" else spec.first
        assert path in said[0]
        assert "its results with tiles of 160 columns are wrong" in said[0]
        assert "QuACK" not in programs(served)[0].steps[path]
        calls.clear()
        found = outputs(served)
        assert calls and wrong not in {act for _, act, _ in calls}
        with _blocks.without("quack_mlp", "quack_qkv"):
            expected = outputs(build_bf16(family))
        assert relative_error(found, expected) < TOLERANCE_BF16

    def test_a_kernel_that_cannot_be_built(
        self, family: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = log_of(layers, monkeypatch)

        def prepare(*args: Any) -> None:
            raise RuntimeError("no ptxas here")

        monkeypatch.setattr(quack, "prepare", prepare)
        served = build_bf16(family)
        assert len(set(said)) == 2
        assert all("RuntimeError: no ptxas here" in line for line in said)
        assert not outputs(served).isnan().any()

    def test_who_gets_it(
        self, family: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def taken(dtype: torch.dtype = torch.bfloat16, **vision: Any) -> list[bool]:
            one = programs(build(family, dtype=dtype, **vision))[0]
            return [one._attention.qkv.large is not None, one._mlp.large is not None]

        assert taken() == [True, True]
        assert taken(torch.float16) == [True, True]
        assert taken(torch.float32) == [False, False]
        with _blocks.without("aligned"):
            # Of 44 columns, or of 64.
            assert taken() == [True, family == "qwen2_vl"]
        with monkeypatch.context() as context:
            quantized(".mlp.", context)
            assert taken() == [True, False]
        with monkeypatch.context() as context:
            allow_lora(True, context)
            assert taken() == [False, False]
        monkeypatch.setattr(quack, "has_quack", lambda: False)
        assert taken() == [False, False]

    def test_new_weights(self, family: str, calls: list[Call], large: None) -> None:
        """The bias of SwiGLU has a copy, which must not outlive it."""
        changed, fresh = (
            build(family, dtype=torch.bfloat16, seed=seed) for seed in (0, 1)
        )
        assert relative_error(outputs(changed), outputs(fresh)) > 0.1
        weights = {name: p.data for name, p in fresh.visual.named_parameters()}
        for name, parameter in changed.visual.named_parameters():
            parameter.data.copy_(weights[name])
        calls.clear()
        assert torch.equal(outputs(changed), outputs(fresh))
        assert len(calls) == 4 * len(blocks(changed))


@pytest.mark.parametrize(
    ("is_cuda", "capability", "package", "has_quack"),
    [
        (True, 90, "quack", True),
        (False, 90, "quack", False),
        (True, 80, "quack", False),
        (True, 100, "quack", False),
        (True, 90, "", False),
    ],
)
def test_has_quack(
    is_cuda: bool,
    capability: int,
    package: str,
    has_quack: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import platforms

    platform = SimpleNamespace(
        is_cuda=lambda: is_cuda,
        is_device_capability=lambda wanted: wanted == capability,
    )
    monkeypatch.setattr(platforms, "current_platform", platform)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == package or None
    )
    assert quack.has_quack() is has_quack

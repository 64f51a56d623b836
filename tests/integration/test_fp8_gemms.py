# SPDX-License-Identifier: Apache-2.0
"""Layers in FP8 run the GEMM that a table names for their size, scales and rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _blocks import (
    SPECS,
    blocks,
    call,
    image,
    log_of,
    outputs,
    programs,
    stream,
    tables,
)
from _fp8_layers import Everywhere, in_16_bits, layers_of, served
from _towers import cpu_only

from cases import relative_error
from vllm_flashinfer_vit.blocks import fp8_linear, fp8_methods, layers
from vllm_flashinfer_vit.blocks.fp8_linear import Fp8Linear, Gemms
from vllm_flashinfer_vit.choices import resolve
from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.gemm_table import GemmClass, GemmLayer
from vllm_flashinfer_vit.gemms import scaled_mm
from vllm_flashinfer_vit.gemms.catalog import CUBLASLT, CUTLASS
from vllm_flashinfer_vit.gemms.cublaslt import Problems
from vllm_flashinfer_vit.gemms.scaled_mm import OpGemm
from vllm_flashinfer_vit.kernels.row_scales_ref import scaled_mm_ref
from vllm_flashinfer_vit.machine.probe import probe
from vllm_flashinfer_vit.machine.stack import Gpu
from vllm_flashinfer_vit.settings import ENV_KERNEL, ENV_TUNED_DIR

pytestmark = [cpu_only, pytest.mark.usefixtures("fp8")]

ALWAYS = (GemmClass(None, CUBLASLT),)
FEW = (GemmClass(24, CUBLASLT), GemmClass(None, CUTLASS))
TOLERANCE = {"tensor": 0.05, "channel": 0.05, "static": 0.08}
FEW_ROWS = 24


@pytest.fixture
def fp8(fp8: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a reference stand for cuBLASLt, too."""
    monkeypatch.setattr(scaled_mm, "CublasLt", lambda *_: OpGemm(scaled_mm_ref))


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a table have classes for every layer, or for those of some sizes."""

    def choose(classes: tuple[GemmClass, ...], *sizes: str) -> None:
        monkeypatch.setattr(layers, "gemms_here", lambda _: Everywhere(classes, *sizes))

    return choose


@pytest.fixture
def ran_gemms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The GEMMs that ran, with their numbers of rows, in order."""
    seen: list[tuple[str, int]] = []

    def scaled_gemm(name: str, *alike: Any) -> OpGemm:
        def noting(out: torch.Tensor, *read: Any) -> None:
            seen.append((name, len(out)))
            scaled_mm_ref(out, *read)

        return OpGemm(noting)

    monkeypatch.setattr(fp8_linear, "scaled_gemm", scaled_gemm)
    return seen


@pytest.mark.parametrize("scheme", TOLERANCE)
@pytest.mark.parametrize("family", SPECS)
def test_towers_are_as_exact_with_cublaslts(
    family: str,
    scheme: str,
    choose: Callable[..., None],
    ran_gemms: list[tuple[str, int]],
) -> None:
    by_cutlass = image(served(family, scheme), FEW_ROWS)
    choose(ALWAYS)
    tower = served(family, scheme)
    ran_gemms.clear()
    found = image(tower, FEW_ROWS)
    expected = image(in_16_bits(family, tower), FEW_ROWS)
    assert {gemm for gemm, _ in ran_gemms} == {CUBLASLT}
    assert relative_error(found, expected) < TOLERANCE[scheme]
    # Sums in another order may round a value to e4m3's next one.
    assert relative_error(found, by_cutlass) < TOLERANCE[scheme]
    assert torch.equal(image(tower, FEW_ROWS), found)
    image(tower, 8)
    assert torch.equal(image(tower, FEW_ROWS), found)


@pytest.mark.parametrize("scheme", TOLERANCE)
def test_rows_decide(
    scheme: str, choose: Callable[..., None], ran_gemms: list[tuple[str, int]]
) -> None:
    choose(FEW)
    tower = served("qwen2_vl", scheme)

    def ran(rows: int) -> set[tuple[str, int]]:
        ran_gemms.clear()
        call(tower, 0, stream(tower, rows), tables(tower, rows))
        assert len(ran_gemms) == 4
        return set(ran_gemms)

    # A pass of each size is kept, with what it chose.
    for _ in range(2):
        assert ran(23) == {(CUBLASLT, 23)}
        assert ran(24) == {(CUBLASLT, 24)}
        assert ran(25) == {(CUTLASS, 25)}


def test_a_pass_decides_once_for_all_layers_that_are_alike(
    choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(FEW)
    tower = served("qwen2_vl", "channel")
    asked: list[int] = []
    for_rows = Gemms.for_rows

    def noting(self: Gemms, rows: int) -> scaled_mm.ScaledGemm:
        asked.append(rows)
        return for_rows(self, rows)

    monkeypatch.setattr(Gemms, "for_rows", noting)
    outputs(tower)
    # Four layers a block, in two blocks.
    assert len(asked) == 4
    outputs(tower)
    assert len(asked) == 4


def test_a_pass_settles_each_gemm_for_each_output() -> None:
    """Blocks may differ in how they are quantised, and share the pass's buffers."""
    layer = blocks(served("qwen2_vl", "channel"))[0].attn.proj
    ran: list[tuple[str, torch.Tensor]] = []

    def linear(name: str) -> Fp8Linear:
        def noting(out: torch.Tensor, *read: Any) -> None:
            ran.append((name, out))

        return Fp8Linear(layer, Gemms(ALWAYS, {CUBLASLT: OpGemm(noting)}))

    layers_here = linear("first"), linear("second")
    outs = torch.empty(3, 64), torch.empty(3, 64)
    rows, scales = torch.ones(3, 64).to(torch.float8_e4m3fn), torch.ones(3, 1)
    now: Any = SimpleNamespace(settled={})
    for _ in range(2):
        for out in outs:
            for at, name in zip(layers_here, ("first", "second"), strict=True):
                assert at(now, rows, scales, out) is out
                assert ran[-1][0] == name and ran[-1][1] is out
    assert len(now.settled) == 4


def test_layers_of_other_sizes_have_vllms(
    choose: Callable[..., None], ran_gemms: list[tuple[str, int]]
) -> None:
    choose(ALWAYS, "64x192")
    tower = served("qwen2_vl", "channel")
    ran_gemms.clear()
    call(tower, 0, stream(tower), tables(tower))
    assert [gemm for gemm, _ in ran_gemms] == [CUBLASLT, CUTLASS, CUTLASS, CUTLASS]
    steps = programs(tower)[0].steps
    assert steps["attn.qkv"] == "FP8 by cuBLASLt; a scale for each token"
    assert steps["attn.proj"] == "FP8 by CUTLASS; a scale for each token"


def test_steps_say_which_gemm_serves_how_many_rows(
    choose: Callable[..., None],
) -> None:
    choose(FEW)
    steps = programs(served("qwen2_vl", "static"))[0].steps
    assert steps["mlp.fc1"] == (
        "FP8 by cuBLASLt up to 24 rows, CUTLASS; the layer's scale"
    )


def test_it_can_be_switched_off(
    choose: Callable[..., None], ran_gemms: list[tuple[str, int]]
) -> None:
    choose(ALWAYS)
    tower = served("qwen2_vl", "channel", off=("fp8_gemm",))
    outputs(tower)
    assert {gemm for gemm, _ in ran_gemms} == {CUTLASS}
    assert programs(tower)[0].steps["attn.qkv"].startswith("FP8 by CUTLASS;")


def fails(*args: Any) -> None:
    raise RuntimeError("no algorithm for this GPU")


def tried(layer: Any) -> str | None:
    return fp8_linear.trial(layer, CUBLASLT, Problems())


def forgets_the_bias(*args: Any) -> None:
    scaled_mm_ref(*args[:5], None)


def test_what_cannot_run_is_found_before_a_request(
    choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(FEW)
    lines = log_of(layers, monkeypatch)
    monkeypatch.setattr(scaled_mm, "CublasLt", lambda *_: OpGemm(fails))
    tower = served("qwen3_vl", "channel")
    assert programs(tower)[0].steps["attn.qkv"].startswith("FP8 by CUTLASS;")
    assert any(
        "attn.qkv" in line and "cuBLASLt cannot: RuntimeError: no algo" in line
        for line in lines
    )
    assert outputs(tower).isfinite().all()


@pytest.mark.parametrize("scheme", TOLERANCE)
def test_the_bias_is_tried_where_a_gemm_adds_it(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = blocks(served("qwen2_5_vl", scheme))[0]
    for layer in (block.attn.qkv, block.mlp.gate_up_proj):
        layer.bias.data.fill_(1e3)
    with monkeypatch.context() as broken:
        forgetful = OpGemm(forgets_the_bias)
        broken.setattr(scaled_mm, "CublasLt", lambda *_: forgetful)
        assert tried(block.attn.qkv) == "its results are wrong"
        # The activation adds it: outputs are padded, and the bias is not.
        assert tried(block.mlp.gate_up_proj) is None
    assert tried(block.attn.qkv) is None


def test_a_layer_is_tried_without_its_bias_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuBLASLt has other algorithms for that."""

    def needs_a_bias(*args: Any) -> None:
        if args[-1] is None:
            fails()
        scaled_mm_ref(*args)

    layer = blocks(served("qwen2_vl", "tensor"))[0].mlp.fc1
    monkeypatch.setattr(scaled_mm, "CublasLt", lambda *_: OpGemm(needs_a_bias))
    with pytest.raises(RuntimeError, match="no algorithm for this GPU"):
        tried(layer)


def test_layers_are_tried_together_only_if_they_are_alike() -> None:
    block = blocks(served("qwen2_vl", "channel"))[0]
    qkv, again = block.attn.qkv, blocks(served("qwen2_vl", "channel"))[1].attn.qkv
    assert fp8_linear.alike(qkv) == fp8_linear.alike(again)
    others = [block.attn.proj, block.mlp.fc1, block.mlp.fc2]
    others += [blocks(served("qwen2_vl", s))[0].attn.qkv for s in ("tensor", "static")]
    before = fp8_linear.alike(qkv)
    qkv.bias = None
    assert len({before, fp8_linear.alike(qkv), *map(fp8_linear.alike, others)}) == 7


@pytest.mark.parametrize("scheme", TOLERANCE)
def test_scales_loaded_anew_in_place_are_used(
    scheme: str, choose: Callable[..., None]
) -> None:
    choose(ALWAYS)
    tower = served("qwen3_vl", scheme)
    image(tower, FEW_ROWS)
    for _, layer in layers_of(tower):
        layer.weight_scale.data.mul_(-0.5)
    found = image(tower, FEW_ROWS)
    expected = image(in_16_bits("qwen3_vl", tower), FEW_ROWS)
    assert relative_error(found, expected) < TOLERANCE[scheme]


def test_what_layers_are_looked_up_by() -> None:
    tower = served("qwen2_5_vl", "channel")
    first = blocks(tower)[0].mlp.gate_up_proj
    second = blocks(tower)[0].mlp.down_proj
    assert fp8_methods.measured_as(first) == GemmLayer("float32", 64, 96, "rows")
    assert fp8_methods.measured_as(second) == GemmLayer("float32", 48, 64, "rows")
    static = blocks(served("qwen2_vl", "static"))[0].attn.qkv
    assert fp8_methods.measured_as(static) == GemmLayer("float32", 64, 192, "tensor")
    mixed = blocks(served("qwen2_vl", "tensor"))[0].attn.qkv
    assert fp8_methods.measured_as(mixed) == GemmLayer("float32", 64, 192, "tokens")


def test_the_users_table_is_read_for_the_gpu_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu("NVIDIA H200", (9, 0), 141 * 2**30)
    stack = probe(libraries=False)
    monkeypatch.setattr(resolve, "probe", lambda **_: replace(stack, gpus=(gpu,)))
    monkeypatch.setenv(ENV_TUNED_DIR, str(tmp_path))
    # Attention stays on this CPU.
    monkeypatch.setenv(ENV_KERNEL, "reference")
    key = GemmLayer("float32", 64, 192, "rows").key
    made_by = {"gpu": gpu.name, "vllm": "0.33.0", "torch": stack.torch}
    table = tuned.Table(made_by, {}, gemms={key: FEW})
    tuned.write(table, tmp_path / tuned.file_name(gpu.name))
    steps = programs(served("qwen2_vl", "channel"))[0].steps
    assert steps["attn.qkv"].startswith("FP8 by cuBLASLt up to 24 rows, ")
    assert steps["attn.proj"].startswith("FP8 by CUTLASS;")

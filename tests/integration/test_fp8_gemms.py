# SPDX-License-Identifier: Apache-2.0
"""Layers in FP8 run the GEMM that a table names for their size, scales and rows."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
from vllm_flashinfer_vit.blocks import fp8_linear, layers
from vllm_flashinfer_vit.blocks.fp8_linear import Gemms
from vllm_flashinfer_vit.choices import resolve
from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.gemm_table import GemmClass, GemmLayer
from vllm_flashinfer_vit.kernels import scaled_mm
from vllm_flashinfer_vit.kernels.gemms import CUTLASS, TORCH
from vllm_flashinfer_vit.kernels.row_scales_ref import scaled_mm_ref
from vllm_flashinfer_vit.machine.probe import probe
from vllm_flashinfer_vit.machine.stack import Gpu
from vllm_flashinfer_vit.settings import ENV_KERNEL, ENV_TUNED_DIR

pytestmark = [cpu_only, pytest.mark.usefixtures("fp8")]

ALWAYS = (GemmClass(None, TORCH),)
FEW = (GemmClass(24, TORCH), GemmClass(None, CUTLASS))
TOLERANCE = {"channel": 0.05, "static": 0.08}
# By one scale PyTorch's GEMM for CPUs takes a quarter of a second for 300.
FEW_ROWS = 24


@pytest.fixture
def fp8(monkeypatch: pytest.MonkeyPatch, direct: None) -> None:
    """Have FP8 layers run as on a GPU, by references and PyTorch's own GEMM."""
    monkeypatch.setattr(fp8_linear, "can_launch", lambda layer, kernel: True)
    if not takes_row_scales():
        monkeypatch.setattr(scaled_mm, "torch_scaled_mm", scaled_mm_ref)


@functools.cache
def takes_row_scales() -> bool:
    """Whether PyTorch's GEMM for CPUs does: from a release after 2.11 on."""
    rows = torch.ones(16, 16).to(torch.float8_e4m3fn)
    out = torch.empty(16, 16, dtype=torch.bfloat16)
    scales = torch.ones(16, 1)
    try:
        scaled_mm.torch_scaled_mm(out, rows, rows.t(), scales, scales.t(), None)
    except RuntimeError:
        return False
    return True


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

    def launch_of(gemm: str, *where: Any) -> Callable[..., None]:
        launch = scaled_mm.launch_of(gemm, *where)

        def noting(*operands: Any) -> None:
            seen.append((gemm, len(operands[0])))
            launch(*operands)

        return noting

    monkeypatch.setattr(fp8_linear, "launch_of", launch_of)
    return seen


@pytest.mark.parametrize("scheme", TOLERANCE)
@pytest.mark.parametrize("family", SPECS)
def test_towers_are_as_exact_with_pytorchs(
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
    assert {gemm for gemm, _ in ran_gemms} == {TORCH}
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
        assert ran(23) == {(TORCH, 23)}
        assert ran(24) == {(TORCH, 24)}
        assert ran(25) == {(CUTLASS, 25)}


def test_a_pass_decides_once_for_all_layers_that_are_alike(
    choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(FEW)
    tower = served("qwen2_vl", "channel")
    asked: list[int] = []
    launch_for = Gemms.launch_for

    def noting(self: Gemms, rows: int) -> Callable[..., None]:
        asked.append(rows)
        return launch_for(self, rows)

    monkeypatch.setattr(Gemms, "launch_for", noting)
    outputs(tower)
    # Four layers a block, in two blocks.
    assert len(asked) == 4
    outputs(tower)
    assert len(asked) == 4


def test_layers_of_other_sizes_have_vllms(
    choose: Callable[..., None], ran_gemms: list[tuple[str, int]]
) -> None:
    choose(ALWAYS, "64x192")
    tower = served("qwen2_vl", "channel")
    ran_gemms.clear()
    call(tower, 0, stream(tower), tables(tower))
    assert [gemm for gemm, _ in ran_gemms] == [TORCH, CUTLASS, CUTLASS, CUTLASS]
    steps = programs(tower)[0].steps
    assert steps["attn.qkv"] == "FP8 by torch._scaled_mm; a scale for each token"
    assert steps["attn.proj"] == "FP8 by CUTLASS; a scale for each token"


def test_steps_say_which_gemm_serves_how_many_rows(
    choose: Callable[..., None],
) -> None:
    choose(FEW)
    steps = programs(served("qwen2_vl", "static"))[0].steps
    assert steps["mlp.fc1"] == (
        "FP8 by torch._scaled_mm up to 24 rows, CUTLASS; the layer's scale"
    )


def test_mixed_scales_have_vllms(
    choose: Callable[..., None], ran_gemms: list[tuple[str, int]]
) -> None:
    """Tokens have scales of their own, and the weight has one."""
    choose(ALWAYS)
    outputs(served("qwen2_vl", "tensor"))
    assert {gemm for gemm, _ in ran_gemms} == {CUTLASS}


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


def forgets_the_bias(*args: Any) -> None:
    scaled_mm_ref(*args[:5], None)


def test_what_cannot_run_is_found_before_a_request(
    choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(FEW)
    lines = log_of(layers, monkeypatch)
    monkeypatch.setattr(scaled_mm, "torch_scaled_mm", fails)
    tower = served("qwen3_vl", "channel")
    assert programs(tower)[0].steps["attn.qkv"].startswith("FP8 by CUTLASS;")
    assert any(
        "attn.qkv" in line and "torch._scaled_mm cannot: RuntimeError: no algo" in line
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
        broken.setattr(scaled_mm, "torch_scaled_mm", forgets_the_bias)
        assert fp8_linear.trial(block.attn.qkv, TORCH) == "its results are wrong"
        # The activation adds it: outputs are padded, and the bias is not.
        assert fp8_linear.trial(block.mlp.gate_up_proj, TORCH) is None
    assert fp8_linear.trial(block.attn.qkv, TORCH) is None


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
    assert fp8_linear.measured_as(first) == GemmLayer("float32", 64, 96, "rows")
    assert fp8_linear.measured_as(second) == GemmLayer("float32", 48, 64, "rows")
    static = blocks(served("qwen2_vl", "static"))[0].attn.qkv
    assert fp8_linear.measured_as(static) == GemmLayer("float32", 64, 192, "tensor")
    mixed = blocks(served("qwen2_vl", "tensor"))[0].attn.qkv
    assert fp8_linear.measured_as(mixed) is None


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
    assert steps["attn.qkv"].startswith("FP8 by torch._scaled_mm up to 24 rows, ")
    assert steps["attn.proj"].startswith("FP8 by CUTLASS;")

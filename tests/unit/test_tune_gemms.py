# SPDX-License-Identifier: Apache-2.0
"""`tune` measures GEMMs of layers in FP8, beside attention or alone."""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _stacks import HOPPER
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("vllm")

import torch
from _tuning import (
    ToldClock,
    measure_fewer,
    measured_here,
    on_this_gpu,
    replace_kernels,
    use_two_kernels,
)

from vllm_flashinfer_vit.choices import gemms, measure_gemms
from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.derive import TuneError, derive_gemm_classes
from vllm_flashinfer_vit.choices.gemm_table import GemmClass
from vllm_flashinfer_vit.commands import tune as tuning
from vllm_flashinfer_vit.commands.cli import main
from vllm_flashinfer_vit.commands.tune import Options
from vllm_flashinfer_vit.commands.tune_text import render, to_json
from vllm_flashinfer_vit.gemms import scaled_mm
from vllm_flashinfer_vit.gemms.catalog import CUBLASLT, CUTLASS, GEMMS, SCALES
from vllm_flashinfer_vit.gemms.scaled_mm import OpGemm
from vllm_flashinfer_vit.kernels.row_scales_ref import scaled_mm_ref

GPU = HOPPER.name
FEW = (GemmClass(512, CUBLASLT), GemmClass(None, CUTLASS))
TIMES = {CUTLASS: lambda rows: 10.0, CUBLASLT: lambda rows: rows / 4.0}


def test_layers_are_those_of_three_towers_by_default() -> None:
    layers = Options().layers()
    assert len(layers) == len(set(layers)) == 2 * 10 * 3
    assert {dtype for dtype, _ in layers} == {torch.bfloat16, torch.float16}
    keys = {layer.key for _, layer in layers}
    assert {"bfloat16/1280x6848/rows", "float16/4352x1152/tensor"} <= keys
    # As vLLM pads them.
    assert not any(n % 16 for size in measure_gemms.SIZES for n in size)
    assert {layer.dtype for _, layer in Options(quick=True).layers()} == {"bfloat16"}
    assert Options(dtypes="fp8").layers() == []
    assert Options(only="attention").layers() == []
    assert Options(only="gemms").combinations() == []
    assert Options(only="attention").combinations() == Options().combinations()


def test_sizes_are_measured_once_each() -> None:
    layers = Options(dtypes="fp16,fp16", gemms="32x48, 32x48,048x32").layers()
    assert [layer.key for _, layer in layers] == [
        "float16/32x48/tensor",
        "float16/32x48/tokens",
        "float16/32x48/rows",
        "float16/48x32/tensor",
        "float16/48x32/tokens",
        "float16/48x32/rows",
    ]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (Options(gemms="1152"), "--gemms has '1152': use inputs x outputs"),
        (Options(gemms="1152x3456,x"), "--gemms has 'x'"),
        (Options(gemms=""), "--gemms has ''"),
        (Options(gemms="3420x1280"), "multiples of 16"),
        (Options(gemms="16x16x16"), "--gemms has '16x16x16'"),
        (Options(gemms="0x16"), "--gemms has '0x16'"),
        (Options(gemms="16x65552"), "--gemms has '16x65552'"),
        (Options(gemms="16x²"), "--gemms has"),
    ],
)
def test_bad_options_name_the_good_values(options: Options, what: str) -> None:
    with pytest.raises(TuneError, match=what):
        options.layers()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (Options(only="both"), "--only has 'both': use attention or gemms"),
        (Options(only="gemms", dtypes="fp8"), "--only gemms needs bf16 or fp16"),
        (Options(only="gemms", dtypes="bf16,fp8"), "fp8 is attention's"),
        (Options(only="gemms", head_dims="80"), "leave out --head-dims, or --only"),
        (Options(only="attention", gemms="32x48"), "leave out --gemms, or --only"),
        (Options(dtypes="fp8", gemms="32x48"), "--gemms needs bf16 or fp16"),
    ],
)
def test_what_could_not_act_is_refused(options: Options, what: str) -> None:
    for listed in (options.combinations, options.layers):
        with pytest.raises(TuneError, match=what):
            listed()


@pytest.mark.parametrize(
    "options", [Options(), Options(quick=True), Options(only="gemms")]
)
def test_the_noted_command_can_be_given(options: Options) -> None:
    words = options.command().split()
    dtypes = words[words.index("--dtypes") + 1]
    again = replace(options, dtypes=dtypes)
    assert again.combinations() == options.combinations()
    assert again.layers() == options.layers()
    assert again.command() == options.command()


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what runs the command on a CPU, with a clock that is told."""
    monkeypatch.setattr(scaled_mm, "CublasLt", lambda *_: OpGemm(scaled_mm_ref))
    replace_kernels(monkeypatch)
    use_two_kernels(monkeypatch)
    on_this_gpu(monkeypatch)
    measure_fewer(monkeypatch, lengths=(8, 64), counts=(1,), rows=(8, 64))
    monkeypatch.setattr(tuning, "gemm_candidates", lambda stack: tuple(GEMMS))
    times = {"flash_attn": lambda n: 10.0, "cudnn": lambda n: n / 4.0, **TIMES}
    monkeypatch.setattr(tuning, "GraphClock", lambda device: ToldClock(times))
    path = tmp_path / "h200.json"

    def tune(*args: str) -> Any:
        command = ["tune", "--dtypes", "bf16", "--output", str(path), *args]
        return CliRunner().invoke(main, command)

    return tune


def read(folder: Path) -> tuned.Table:
    table = tuned.read(folder, GPU)
    assert table is not None
    return table


class TestCommand:
    def test_it_measures_both(self, tune: Callable[..., Any], tmp_path: Path) -> None:
        result = tune("--head-dims", "80", "--gemms", "32x48")
        assert result.exit_code == 0, result.output
        table = read(tmp_path)
        assert list(table.classes) == ["bfloat16/80"]
        few = GemmClass(8, CUBLASLT), GemmClass(None, CUTLASS)
        assert dict(table.gemms) == {
            "bfloat16/32x48/tensor": few,
            "bfloat16/32x48/tokens": few,
            "bfloat16/32x48/rows": few,
        }
        assert [(m.layer, m.rows) for m in table.gemm_measurements] == [
            (layer, rows) for layer in table.gemms for rows in (8, 64)
        ]
        assert table.made_by["command"] == (
            "vllm-flashinfer-vit tune --dtypes bf16 --head-dims 80 --gemms 32x48"
        )
        assert "cuBLASLt up to 8 rows, CUTLASS" in result.stdout

    def test_gemms_alone(self, tune: Callable[..., Any], tmp_path: Path) -> None:
        result = tune("--only", "gemms", "--gemms", "32x48,48x32")
        assert result.exit_code == 0, result.output
        table = read(tmp_path)
        assert not table.classes and not table.measurements
        assert len(table.gemms) == 6
        assert table.made_by["command"] == (
            "vllm-flashinfer-vit tune --dtypes bf16 --only gemms --gemms 32x48,48x32"
        )
        assert "longest sequence" not in result.stdout

    def test_attention_alone(self, tune: Callable[..., Any], tmp_path: Path) -> None:
        result = tune("--only", "attention", "--head-dims", "80")
        assert result.exit_code == 0, result.output
        table = read(tmp_path)
        assert table.classes and not table.gemms
        assert "GEMM" not in result.stdout

    @pytest.mark.parametrize(
        ("first", "second", "lost"),
        [("attention", "gemms", "attention"), ("gemms", "attention", "GEMMs")],
    )
    def test_one_part_does_not_replace_the_other(
        self,
        tune: Callable[..., Any],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        first: str,
        second: str,
        lost: str,
    ) -> None:
        sizes = {"attention": ("--head-dims", "80"), "gemms": ("--gemms", "32x48")}
        for _ in range(2):
            # Its own part is replaced, as before.
            assert tune("--only", first, *sizes[first]).exit_code == 0
        before = (tmp_path / "h200.json").read_bytes()
        monkeypatch.setattr(tuning, "build_table", lambda *_: pytest.fail("measured"))
        result = tune("--only", second, *sizes[second])
        assert result.exit_code == 2
        assert f"has choices of {lost}" in result.stderr
        assert "give --add" in result.stderr
        assert (tmp_path / "h200.json").read_bytes() == before

    def test_a_file_that_no_engine_can_use_is_replaced(
        self, tune: Callable[..., Any], tmp_path: Path
    ) -> None:
        text = '{"schema": "vllm-flashinfer-vit/choices/1"}'
        (tmp_path / "h200.json").write_text(text)
        assert tune("--only", "gemms", "--gemms", "32x48").exit_code == 0
        assert read(tmp_path).gemms

    def test_added_gemms_leave_the_rest(
        self, tune: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tune("--head-dims", "80", "--gemms", "32x48,48x32")
        before = read(tmp_path)
        slow = {CUTLASS: lambda rows: 1.0, CUBLASLT: lambda rows: 9.0}
        monkeypatch.setattr(tuning, "GraphClock", lambda device: ToldClock(slow))
        assert tune("--add", "--only", "gemms", "--gemms", "48x32").exit_code == 0
        table = read(tmp_path)
        assert table.classes == before.classes
        assert table.measurements == before.measurements
        for scales in SCALES:
            kept = f"bfloat16/32x48/{scales}"
            assert table.gemms[kept] == before.gemms[kept]
            assert table.gemms[f"bfloat16/48x32/{scales}"] == gemms.STOCK
        assert len(table.gemm_measurements) == len(before.gemm_measurements) == 12
        for name, classes in table.gemms.items():
            rows = [m for m in table.gemm_measurements if m.layer == name]
            assert derive_gemm_classes(rows) == classes

    def test_added_attention_leaves_gemms(
        self, tune: Callable[..., Any], tmp_path: Path
    ) -> None:
        tune("--only", "gemms", "--gemms", "32x48")
        before = read(tmp_path)
        assert tune("--add", "--only", "attention", "--head-dims", "80").exit_code == 0
        table = read(tmp_path)
        assert table.gemms == before.gemms
        assert table.gemm_measurements == before.gemm_measurements
        assert list(table.classes) == ["bfloat16/80"]

    def test_the_time_limit_leaves_the_rest_out(
        self, tune: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seconds = iter(range(100))
        monkeypatch.setattr(tuning.time, "monotonic", lambda: next(seconds))
        # The limit is set at 0; the first layer's two numbers of rows take 1 and 2.
        sizes = ("--only", "gemms", "--gemms", "32x48")
        result = tune(*sizes, "--time-limit", "3")
        assert result.exit_code == 0, result.output
        table = read(tmp_path)
        assert list(table.gemms) == ["bfloat16/32x48/tensor"]
        assert len(table.gemm_measurements) == 2
        limit = "the time limit of 3 s passed"
        for scales, reason in zip(SCALES[1:], table.left_out, strict=True):
            assert reason.startswith(f"bfloat16/32x48/{scales}: {limit}")
        # What is measured later is no longer said to be left out.
        assert tune("--add", *sizes).exit_code == 0
        assert read(tmp_path).left_out == ()

    def test_without_vllms_own_there_is_nothing_to_choose(
        self, tune: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tuning, "gemm_candidates", lambda stack: ())
        nothing = "no GEMM of layers in FP8 runs on this GPU"
        for asked in (("--only", "gemms"), ("--gemms", "32x48")):
            result = tune(*asked)
            assert result.exit_code == 2
            assert nothing in result.stderr and "; leave out " in result.stderr
        result = tune("--head-dims", "80")
        assert result.exit_code == 0
        assert f"left out: {nothing}" in result.stdout
        assert not read(tmp_path).gemms
        (reason,) = read(tmp_path).left_out
        assert reason.startswith(nothing)
        # Another run says it again, and the file has it once.
        assert tune("--add", "--head-dims", "64").exit_code == 0
        assert read(tmp_path).left_out == (reason,)
        # Where no GEMM is a part of the run, there is nothing to say.
        assert tune("--only", "attention", "--head-dims", "80").exit_code == 0
        assert read(tmp_path).left_out == ()

    def test_bad_sizes_are_said_before_anything_is_measured(
        self, tune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tuning, "probe", lambda: pytest.fail("inspected"))
        result = tune("--gemms", "32x50")
        assert result.exit_code == 2
        assert "--gemms has '32x50'" in result.stderr

    def test_its_json_has_gemms(self, tune: Callable[..., Any]) -> None:
        result = tune("--only", "gemms", "--gemms", "32x48", "--json")
        assert json.loads(result.stdout)["gemms"]["bfloat16/32x48/rows"] == [
            {"max_rows": 8, "gemm": "cublaslt"},
            {"max_rows": None, "gemm": "cutlass"},
        ]


def test_what_many_lack_for_one_reason_is_one_line() -> None:
    reason = "the time limit of 5 s passed: raise it"
    left_out = (
        f"bfloat16/96: {reason}",
        "bfloat16/80: cudnn: out of memory",
        *(f"bfloat16/{n}x16/rows: {reason}" for n in (16, 32, 48)),
        "bfloat16/64x16/rows: CUBLASLT: out of memory",
        "no colon",
    )
    made_by = {"gpu": GPU, "vllm": "0.33.0"}
    report = tuning.Report(
        Path("x"), tuned.Table(made_by, {"bfloat16/80": ()}, left_out=left_out)
    )
    console = Console(file=io.StringIO(), width=200)
    render(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line for line in text.splitlines() if line.startswith("left out")] == [
        f"left out: bfloat16/96, 3 layers in FP8: {reason}",
        "left out: bfloat16/80: cudnn: out of memory",
        "left out: bfloat16/64x16/rows: CUBLASLT: out of memory",
        "left out: no colon",
    ]
    # Programs and the file get each.
    assert to_json(report)["left_out"] == list(left_out)


def test_layers_with_vllms_own_are_one_line() -> None:
    made_by = {"gpu": GPU, "vllm": "0.33.0"}
    entries = {"bfloat16/32x48/rows": FEW, "bfloat16/48x32/rows": gemms.STOCK}

    def text_of(entries: Mapping[str, tuple[GemmClass, ...]]) -> str:
        console = Console(file=io.StringIO(), width=200)
        report = tuning.Report(Path("x"), tuned.Table(made_by, {}, gemms=entries))
        render(report, console)
        assert to_json(report)["gemms"].keys() == entries.keys()
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    text = text_of({"bfloat16/48x32/rows": gemms.STOCK})
    assert "all " in text and "all others" not in text and "CUTLASS" in text
    text = text_of(entries)
    assert "cuBLASLt up to 512 rows, CUTLASS" in text
    assert "all others" in text and "48x32" not in text


@pytest.mark.gpu
def test_this_gpus_gemms_are_measured(tmp_path: Path) -> None:
    options = Options(only="gemms", gemms="1152x3456,3424x1280")
    table = measured_here(options, tmp_path)
    assert len(table.gemms) == 12
    assert len(table.gemm_measurements) == 12 * len(measure_gemms.ROWS)
    for row in table.gemm_measurements:
        assert set(row.us) == set(GEMMS)
        # A replay takes microseconds; a cold cache cannot make it milliseconds.
        assert all(0.5 < us < 2000 for us in row.us.values())

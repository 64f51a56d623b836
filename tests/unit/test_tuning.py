# SPDX-License-Identifier: Apache-2.0
"""How measurements become classes, and the measuring with a clock that is told."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _stacks import STACK
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("vllm")

import torch
from _tuning import (
    CLOCK,
    CPU,
    ToldClock,
    measure_fewer,
    on_this_gpu,
    replace_kernels,
    use_two_kernels,
)

from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.compare import GpuLostError
from vllm_flashinfer_vit.choices.derive import TuneError
from vllm_flashinfer_vit.choices.lookup import choices_for, plan_of
from vllm_flashinfer_vit.choices.measure import (
    COUNTS,
    LENGTHS,
    Cell,
    grid,
    measure,
)
from vllm_flashinfer_vit.commands import tune as tuning
from vllm_flashinfer_vit.commands import tune_options
from vllm_flashinfer_vit.commands.cli import main
from vllm_flashinfer_vit.commands.tune import Options, build_table
from vllm_flashinfer_vit.commands.tune_text import render, to_json
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS
from vllm_flashinfer_vit.kernels.flash_fp8_ref import attention_fp8_ref
from vllm_flashinfer_vit.ops import attention as ops
from vllm_flashinfer_vit.ops.plan import Class


def test_the_grid_covers_what_the_table_is_for() -> None:
    for head_dim in HEAD_DIMS:
        cells = grid(head_dim)
        assert {cell.longest for cell in cells} == set(LENGTHS)
        assert {cell.num_seqs for cell in cells} == set(COUNTS)
        assert Cell(65536, 1) in cells
        assert Cell(64, 1024) in cells
        assert Cell(65536, 4) not in cells
        assert cells == sorted(cells)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """GPU kernels by name, each replaced by plain PyTorch."""
    return replace_kernels(monkeypatch)


def test_measure_times_every_batch(kernels: dict[str, Callable[..., Any]]) -> None:
    clock = ToldClock(CLOCK)
    cells = [Cell(8, 1), Cell(8, 4), Cell(16, 1)]
    seen: list[str] = []
    found, left_out = measure(
        torch.bfloat16, 32, list(CLOCK), cells, clock, CPU, seen.append
    )
    assert left_out == []
    assert seen == ["1 x 8 tokens", "4 x 8 tokens", "1 x 16 tokens"]
    assert clock.cells == [(8, 16, 32), (32, 16, 32), (16, 16, 32)]
    assert [m[:4] for m in found] == [("bfloat16", 32, *cell) for cell in cells]
    assert found[1].us == {"flash_attn": 10.0, "cudnn": 8.0}


def test_a_wrong_kernel_is_left_out_with_all_its_times(
    kernels: dict[str, Callable[..., Any]],
) -> None:
    def wrong_for_several(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        whole = torch.tensor([0, q.shape[0]], dtype=torch.int32)
        return attention_ref(q, k, v, whole, q.shape[0], rest[1])

    kernels["cudnn"] = wrong_for_several
    found, left_out = measure(
        torch.bfloat16,
        32,
        list(CLOCK),
        [Cell(8, 1), Cell(8, 4), Cell(16, 1)],
        ToldClock(CLOCK),
        CPU,
    )
    assert [set(m.us) for m in found] == [{"flash_attn"}] * 3
    (reason,) = left_out
    assert reason.startswith("cudnn from 4 x 8 tokens on: WrongResultError: wrong")


def test_nan_is_a_wrong_result(kernels: dict[str, Callable[..., Any]]) -> None:
    kernels["cudnn"] = lambda q, *rest: torch.full_like(q, float("nan"))
    _, left_out = measure(
        torch.float16, 32, list(CLOCK), [Cell(8, 1)], ToldClock(CLOCK), CPU
    )
    assert "relative error nan" in left_out[0]


@pytest.mark.parametrize(
    ("message", "said"),
    [("no plan\nand a long story", "no plan"), ("", "no message")],
)
def test_a_kernel_that_stops_running_keeps_its_shorter_times(
    message: str, said: str, kernels: dict[str, Callable[..., Any]]
) -> None:
    def short_only(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        if q.shape[0] > 8:
            raise RuntimeError(message)
        return attention_ref(q, *rest)

    kernels["cudnn"] = short_only
    found, left_out = measure(
        torch.bfloat16,
        32,
        list(CLOCK),
        [Cell(8, 1), Cell(16, 1), Cell(32, 1)],
        ToldClock(CLOCK),
        CPU,
    )
    assert [len(m.us) for m in found] == [2, 1, 1]
    assert left_out == [f"cudnn from 1 x 16 tokens on: RuntimeError: {said}"]


def test_a_batch_that_memory_does_not_hold_is_skipped(
    kernels: dict[str, Callable[..., Any]],
) -> None:
    def small_only(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        if q.shape[0] == 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return attention_ref(q, *rest)

    kernels["cudnn"] = small_only
    cells = [Cell(8, 1), Cell(8, 4), Cell(16, 1)]
    found, left_out = measure(
        torch.bfloat16, 32, list(CLOCK), cells, ToldClock(CLOCK), CPU
    )
    assert left_out == ["4 x 8 tokens: out of memory"]
    assert [m[2:4] for m in found] == [(8, 1), (16, 1)]
    assert all(len(m.us) == 2 for m in found)


def test_a_kernel_is_not_tried_on_longer_sequences_than_it_takes(
    kernels: dict[str, Callable[..., Any]],
) -> None:
    # It rotates q and k by itself.
    def window(q, k, v, cu, longest, scale, *turn):
        return attention_ref(*ops.rotate(q, k, *turn), v, cu, longest, scale)

    kernels["triton_window"] = window
    times = {"triton_window": lambda n: 1.0, "flash_attn": lambda n: 2.0}
    found, left_out = measure(
        torch.bfloat16,
        32,
        list(times),
        [Cell(128, 1), Cell(192, 1)],
        ToldClock(times),
        CPU,
    )
    assert left_out == []
    assert [set(m.us) for m in found] == [set(times), {"flash_attn"}]


def build(options: Options, clock: ToldClock | None = None) -> tuned.Table:
    clock = clock or ToldClock({**CLOCK, "triton_window": lambda tokens: 99.0})
    with pytest.MonkeyPatch.context() as patched:
        measure_fewer(patched, lengths=(8, 16, 64, 256), counts=(1,))
        return build_table(options, STACK, clock, CPU, Console(file=io.StringIO()))


@pytest.fixture
def two_kernels(
    monkeypatch: pytest.MonkeyPatch, kernels: dict[str, Callable[..., Any]]
) -> None:
    use_two_kernels(monkeypatch)


@pytest.mark.usefixtures("two_kernels")
def test_a_built_table_is_what_the_look_up_reads(tmp_path: Path) -> None:
    options = Options(dtypes="bf16", head_dims="64, 80", time_limit_s=600)
    table = build(options)
    assert set(table.classes) == {"bfloat16/64", "bfloat16/80"}
    assert table.classes["bfloat16/80"] == (
        Class(16, "cudnn"),
        Class(None, "flash_attn"),
    )
    assert len(table.measurements) == 8
    assert table.made_by == {
        "command": "vllm-flashinfer-vit tune --dtypes bf16 --head-dims 64,80",
        "version": tuning.__version__,
        "gpu": "NVIDIA H200",
        "capability": "9.0",
        "driver": "580.65.06",
        "vllm": "0.25.1",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "flashinfer": "0.6.13",
        "cudnn": "9.19.0",
        "quack": "0.5.0",
    }
    tuned.write(table, tmp_path / tuned.file_name("NVIDIA H200"))
    choices = choices_for(STACK, torch.bfloat16, 80, tmp_path)
    assert plan_of(choices).text == "16:cudnn,*:flash_attn"


@pytest.mark.parametrize("in_a_test_run", [False, True])
def test_what_ends_the_measuring_is_said_in_a_line(
    in_a_test_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*args: Any) -> str:
        raise GpuLostError("cudnn: it was the last that ran on the GPU")

    on_this_gpu(monkeypatch)
    if in_a_test_run:
        monkeypatch.setattr(tuning, "attempt", lambda *_: "a test run fails")
        monkeypatch.setattr(tuning, "check_gpu", lost)
    else:
        monkeypatch.setattr(tuning, "measure", lost)
    path = tmp_path / "out.json"
    options = Options(dtypes="bf16", head_dims="80", only="attention", output=path)
    with pytest.raises(
        TuneError, match=f"last that ran.*; nothing was written to {path}"
    ):
        tuning.run(options, Console(file=io.StringIO()))
    assert not path.exists()


@pytest.mark.usefixtures("two_kernels")
def test_the_time_limit_leaves_the_rest_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr(tuning.time, "monotonic", lambda: next(seconds))
    # The limit is set at 0, the first head dim takes 1 to 4.
    options = Options(
        dtypes="bf16", head_dims="80,64", time_limit_s=5, only="attention"
    )
    table = build(options)
    assert list(table.classes) == ["bfloat16/80"]
    assert {m.head_dim for m in table.measurements} == {80}
    (reason,) = table.left_out
    assert reason.startswith("bfloat16/64: the time limit of 5 s passed")
    assert "nothing of it counts" in reason
    with pytest.raises(TuneError, match="no choice could be measured.*--time-limit"):
        build(Options(dtypes="bf16", head_dims="80", time_limit_s=2))


def test_no_kernel_has_a_test_run_after_the_time_limit(
    kernels: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compiles a kernel, and there are some for every dtype and head dim."""
    seconds = iter(range(100))
    monkeypatch.setattr(tuning.time, "monotonic", lambda: next(seconds))
    runs: list[tuple[str, int]] = []

    def attempt(kernel: str, head_dim: int, dtype: torch.dtype) -> str:
        runs.append((kernel, head_dim))
        return "not on a CPU"

    monkeypatch.setattr(tuning, "attempt", attempt)
    options = Options("bf16", "80,64,96", time_limit_s=1, only="attention")
    # The limit is set at 0, the test run is at 1.
    with pytest.raises(TuneError, match="no choice could be measured"):
        build(options)
    assert runs == [("flash_attn_4", 80)]


@pytest.mark.usefixtures("two_kernels")
def test_the_command_stops_at_the_time_limit_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_this_gpu(monkeypatch)
    measure_fewer(monkeypatch, "QUICK", lengths=(8, 16, 64, 256), counts=(1,))
    path = tmp_path / "h200.json"
    command = ["tune", "--quick", "--head-dims", "80,64", "--output", str(path)]

    def tune(limit: int) -> Any:
        # The limit is set at 0, the first head dim takes 1 to 4.
        seconds = iter(range(100))
        monkeypatch.setattr(tuning.time, "monotonic", lambda: next(seconds))
        return CliRunner().invoke(main, [*command, "--time-limit", str(limit)])

    assert tune(2).exit_code == 2
    assert not path.exists()
    result = tune(5)
    assert result.exit_code == 0, result.output
    assert "left out: bfloat16/64: the time limit of 5 s passed" in result.stdout
    assert "doctor` says what serves instead" in result.stdout
    table = tuned.read(tmp_path, "NVIDIA H200")
    assert table is not None
    assert list(table.classes) == ["bfloat16/80"]
    # Of the head dim that was not finished nothing is kept.
    assert {m.head_dim for m in table.measurements} == {80}
    # What was there stays, if a later run has nothing.
    assert tune(2).exit_code == 2
    assert tuned.read(tmp_path, "NVIDIA H200") == table


class TestQuick:
    def test_it_measures_bf16_at_fewer_lengths(self) -> None:
        quick, full = Options(quick=True).effort, Options().effort
        assert Options(quick=True).combinations() == [
            (torch.bfloat16, head_dim) for head_dim in HEAD_DIMS
        ]
        assert set(quick.lengths) < set(full.lengths)
        assert set(quick.counts) < set(full.counts)
        cells = [len(grid(80, e.lengths, e.counts)) for e in (quick, full)]
        assert 3 * cells[0] < cells[1]
        # Both classes of windows, and lengths after which FP8 may pay.
        assert {64, 128, 4096} <= set(quick.lengths)
        assert (quick.time_limit_s, full.time_limit_s) == (150, 660)

    def test_other_options_go_before_it(self) -> None:
        options = Options("fp8, bf16", "80", time_limit_s=30, quick=True)
        assert options.effort == tune_options.QUICK._replace(
            dtypes=("fp8", "bf16"), time_limit_s=30
        )
        assert options.command() == (
            "vllm-flashinfer-vit tune --quick --dtypes fp8,bf16 --head-dims 80"
        )

    @pytest.mark.usefixtures("two_kernels")
    def test_its_batches_are_what_is_measured(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measure_fewer(monkeypatch, "QUICK", lengths=(8, 16), counts=(1, 2))
        table = build_table(
            Options(head_dims="80", quick=True),
            STACK,
            ToldClock(CLOCK),
            CPU,
            Console(file=io.StringIO()),
        )
        cells = [(m.longest, m.num_seqs) for m in table.measurements]
        assert cells == [(8, 1), (8, 2), (16, 1), (16, 2)]
        assert set(table.classes) == {"bfloat16/80"}
        assert "--quick" in table.made_by["command"]


def test_fp8_layers_have_entries_of_their_own(
    monkeypatch: pytest.MonkeyPatch, kernels: dict[str, Callable[..., Any]]
) -> None:
    kernels["reference_fp8"] = attention_fp8_ref
    names = ["flash_attn", "reference_fp8"]
    monkeypatch.setattr(tuning, "candidates", lambda *_: (names, []))
    times = {"flash_attn": lambda n: n / 10, "reference_fp8": lambda n: 5 + n / 20}
    table = build(Options(dtypes="fp8", head_dims="80"), ToldClock(times))
    assert dict(table.classes) == {
        "float8_e4m3fn/80": (Class(64, "flash_attn"), Class(None, "reference_fp8"))
    }
    assert {m.dtype for m in table.measurements} == {"float8_e4m3fn"}
    assert table.left_out == ()


def test_fp8_kernels_are_judged_by_a_limit_of_their_own(
    kernels: dict[str, Callable[..., Any]],
) -> None:
    kernels["reference_fp8"] = attention_fp8_ref
    # As far off as FP8 is, which only an FP8 kernel may be.
    kernels["flash_attn"] = lambda *args: 1.05 * attention_ref(*args)
    times = {"flash_attn": lambda n: 1.0, "reference_fp8": lambda n: 1.0}
    found, left_out = measure(
        torch.float8_e4m3fn, 80, list(times), [Cell(64, 2)], ToldClock(times), CPU
    )
    assert [set(m.us) for m in found] == [{"reference_fp8"}]
    (reason,) = left_out
    assert reason.startswith("flash_attn") and "allowed 0.02" in reason
    kernels["reference_fp8"] = lambda *args: 1.2 * attention_fp8_ref(*args)
    _, left_out = measure(
        torch.float8_e4m3fn, 80, ["reference_fp8"], [Cell(64, 2)], ToldClock(times), CPU
    )
    assert "allowed 0.1" in left_out[0]


@pytest.mark.usefixtures("two_kernels")
def test_the_command_writes_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "h200.json"
    table = build(Options(dtypes="bf16", head_dims="80"))

    def fake(options: Options, console: Console) -> tuning.Report:
        assert options.output == path
        assert (options.dtypes, options.head_dims) == ("bf16", "80")
        assert options.time_limit_s == 30
        tuned.write(table, path)
        return tuning.Report(path, table)

    monkeypatch.setattr(tuning, "run", fake)
    command = ["tune", "--dtypes", "bf16", "--head-dims", "80", "--output", str(path)]
    command += ["--time-limit", "30"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "up to 16" in result.stdout
    assert str(path) in result.stdout
    document = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert document == json.loads(json.dumps(to_json(tuning.Report(path, table))))
    assert document["classes"] == json.loads(path.read_text())["classes"]


def test_both_kernels_of_a_class_are_printed(two_kernels: None) -> None:
    table = build(Options(dtypes="bf16", head_dims="80"))
    rows = (Class(2048, "flash_attn_4", "flash_attn"), Class(None, "cudnn"))
    console = Console(file=io.StringIO(), width=200)
    table = replace(table, classes={"bfloat16/80": rows})
    render(tuning.Report(Path("x.json"), table), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "up to 2048" in text
    assert "flash_attn_4, flash_attn below 512 rows to a sequence" in text


def test_what_was_left_out_is_printed(two_kernels: None) -> None:
    table = replace(
        build(Options(dtypes="bf16", head_dims="80")), left_out=("[cudnn]: no plan",)
    )
    console = Console(file=io.StringIO(), width=200)
    render(tuning.Report(Path("x.json"), table), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "left out: [cudnn]: no plan" in text
    assert "The choices for NVIDIA H200 are in x.json" in text

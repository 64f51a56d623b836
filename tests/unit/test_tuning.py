# SPDX-License-Identifier: Apache-2.0
"""How measurements become classes, and the measuring with a clock that is told."""

import functools
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from _stacks import STACK
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("vllm")

import torch

from vllm_flashinfer_vit.choices import clock as clocks
from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.clock import GraphClock, Run, order_of_turn
from vllm_flashinfer_vit.choices.derive import TuneError, derive_classes
from vllm_flashinfer_vit.choices.lookup import choices_for, plan_of
from vllm_flashinfer_vit.choices.measure import (
    COUNTS,
    LENGTHS,
    Cell,
    candidates,
    grid,
    measure,
)
from vllm_flashinfer_vit.choices.table import Measurement
from vllm_flashinfer_vit.commands import tune as tuning
from vllm_flashinfer_vit.commands.cli import main
from vllm_flashinfer_vit.commands.tune import Options, build_table, render, to_json
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.kernels.catalog import fp8_names
from vllm_flashinfer_vit.kernels.flash_fp8_ref import attention_fp8_ref
from vllm_flashinfer_vit.ops import attention as ops
from vllm_flashinfer_vit.ops.plan import Class
from vllm_flashinfer_vit.settings import ENV_TUNED_DIR

CPU = torch.device("cpu")


def rows(times: Mapping[int, Mapping[str, float]], count: int = 1) -> list[Measurement]:
    return [Measurement("bfloat16", 80, n, count, us) for n, us in times.items()]


def classes(times: Mapping[int, Mapping[str, float]]) -> list[tuple[int | None, str]]:
    found = derive_classes(rows(times))
    assert all(c.many is None for c in found)
    return [(c.max_len, c.kernel) for c in found]


def test_each_length_gets_its_fastest_kernel() -> None:
    assert classes(
        {
            64: {"triton_window": 5, "flash_attn": 9},
            128: {"triton_window": 6, "flash_attn": 9},
            256: {"cudnn": 8, "flash_attn": 10},
            512: {"cudnn": 15, "flash_attn": 10},
        }
    ) == [(128, "triton_window"), (256, "cudnn"), (None, "flash_attn")]


def test_lengths_may_come_in_any_order() -> None:
    times = {256: {"cudnn": 8, "flash_attn": 10}, 64: {"cudnn": 20, "flash_attn": 10}}
    assert classes(times) == [(64, "flash_attn"), (None, "cudnn")]


def test_a_near_tie_joins_the_class_below() -> None:
    assert classes(
        {
            64: {"reference": 10, "flash_attn": 20},
            128: {"reference": 10.1, "flash_attn": 10},
            256: {"reference": 20, "flash_attn": 10},
        }
    ) == [(128, "reference"), (None, "flash_attn")]


def test_a_near_tie_joins_the_class_above() -> None:
    assert classes(
        {
            64: {"reference": 10, "flash_attn": 10.1},
            128: {"reference": 20, "flash_attn": 10},
        }
    ) == [(None, "flash_attn")]


def test_beyond_a_tie_a_class_is_split() -> None:
    assert classes(
        {
            64: {"reference": 10, "flash_attn": 20},
            128: {"reference": 10.3, "flash_attn": 10},
            256: {"reference": 10, "flash_attn": 20},
        }
    ) == [(64, "reference"), (128, "flash_attn"), (None, "reference")]


def test_of_kernels_that_share_a_class_the_faster_one_wins() -> None:
    assert classes(
        {
            64: {"reference": 10, "flash_attn": 10.1},
            128: {"reference": 10.1, "flash_attn": 10},
            256: {"reference": 10.1, "flash_attn": 10},
        }
    ) == [(None, "flash_attn")]


@pytest.mark.parametrize(
    ("cudnn", "kernel"), [(9.6, "flash_attn"), (9.51, "cudnn"), (9.5, "cudnn")]
)
def test_cudnn_must_win_by_five_percent(cudnn: float, kernel: str) -> None:
    # 10 / 1.05 is 9.524.
    assert classes({64: {"cudnn": cudnn, "flash_attn": 10}}) == [(None, kernel)]


def test_a_tie_does_not_give_cudnn_more() -> None:
    assert classes(
        {
            64: {"cudnn": 5, "flash_attn": 10},
            128: {"cudnn": 9.6, "flash_attn": 10},
        }
    ) == [(64, "cudnn"), (None, "flash_attn")]


def test_counts_weigh_alike_by_their_ratios() -> None:
    few = rows({64: {"reference": 1, "flash_attn": 3}}, 1)
    many = rows({64: {"reference": 2000, "flash_attn": 1000}}, 1024)
    assert derive_classes(few + many) == (Class(None, "reference"),)


@pytest.mark.parametrize(
    ("alone", "kernel"), [(9, "hopper_fp8"), (10.1, "flash_attn"), (12, "flash_attn")]
)
def test_fp8_must_pay_for_every_count(alone: float, kernel: str) -> None:
    few = rows({64: {"hopper_fp8": alone, "flash_attn": 10, "triton": 11}}, 1)
    many = rows({64: {"hopper_fp8": 60, "flash_attn": 110, "triton": 100}}, 16)
    assert derive_classes(few + many) == (Class(None, kernel),)


def test_a_kernel_must_have_run_every_batch_of_a_length() -> None:
    few = rows({64: {"reference": 1, "flash_attn": 3}}, 1)
    many = rows({64: {"flash_attn": 3}}, 4)
    assert derive_classes(few + many) == (Class(None, "flash_attn"),)


def test_many_sequences_have_the_fastest_kernel_that_suits_them() -> None:
    times = {
        64: {"flash_attn_4": 9, "flash_attn": 10, "triton": 12, "triton_fp8": 9.5},
        128: {"flash_attn_4": 9, "flash_attn": 14, "triton": 11, "cudnn": 9.5},
        256: {"flash_attn_4": 20, "flash_attn": 10, "triton": 11},
    }
    # Over both lengths, and without cuDNN, which did not run at the first one.
    assert derive_classes(rows(times)) == (
        Class(128, "flash_attn_4", "triton"),
        Class(None, "flash_attn"),
    )
    assert derive_classes(rows({64: times[64]})) == (
        Class(None, "flash_attn_4", "flash_attn"),
    )
    alone = {64: {"flash_attn_4": 9, "triton_window": 10}}
    assert derive_classes(rows(alone)) == (Class(None, "flash_attn_4"),)


def test_the_last_class_has_a_kernel_for_any_length() -> None:
    window = {"triton_window": 5.0}
    both = {"triton_window": 5.0, "flash_attn": 9.0}
    assert classes({64: both}) == [(None, "flash_attn")]
    assert classes({64: both, 96: both, 128: window}) == [
        (64, "triton_window"),
        (None, "flash_attn"),
    ]
    with pytest.raises(TuneError, match="any length"):
        classes({64: window})
    with pytest.raises(TuneError, match="any length"):
        derive_classes([])


def test_the_grid_covers_what_the_table_is_for() -> None:
    for head_dim in tuning.HEAD_DIMS:
        cells = grid(head_dim)
        assert {cell.longest for cell in cells} == set(LENGTHS)
        assert {cell.num_seqs for cell in cells} == set(COUNTS)
        assert Cell(65536, 1) in cells
        assert Cell(64, 1024) in cells
        assert Cell(65536, 4) not in cells
        assert cells == sorted(cells)


class ToldClock:
    """Says the times that it is told by kernel and length."""

    def __init__(self, times: Mapping[str, Callable[[int], float]]) -> None:
        self.times = times
        self.cells: list[tuple[int, ...]] = []

    def prepare(self, run: Run) -> Run:
        return run

    def median_us(self, runs: Mapping[str, Run]) -> dict[str, float]:
        outputs = [run() for run in runs.values()]
        self.cells.append(tuple(outputs[0].shape))
        tokens = outputs[0].shape[0]
        return {kernel: self.times[kernel](tokens) for kernel in runs}


CLOCK = {"flash_attn": lambda tokens: 10.0, "cudnn": lambda tokens: tokens / 4.0}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """GPU kernels by name, each replaced by plain PyTorch."""
    replaced = dict.fromkeys(("flash_attn", "cudnn", "triton_window"), attention_ref)

    def prepare(name: str) -> Callable[..., Any]:
        return functools.partial(functools.partial, replaced[name])

    monkeypatch.setattr(ops, "_prepare_kernel", prepare)
    return replaced


def test_measure_times_every_batch(kernels: dict[str, Callable[..., Any]]) -> None:
    clock = ToldClock(CLOCK)
    cells = [Cell(8, 1), Cell(8, 4), Cell(16, 1)]
    seen: list[Cell] = []
    found, left_out = measure(
        torch.bfloat16, 32, list(CLOCK), cells, clock, CPU, seen.append
    )
    assert left_out == []
    assert seen == cells
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


def test_a_kernel_that_stops_running_keeps_its_shorter_times(
    kernels: dict[str, Callable[..., Any]],
) -> None:
    def short_only(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        if q.shape[0] > 8:
            raise RuntimeError("no plan\nand a long story")
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
    assert left_out == ["cudnn from 1 x 16 tokens on: RuntimeError: no plan"]


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
    kernels["triton_window"] = lambda q, k, v, cu, longest, scale, cos, sin: (
        attention_ref(*ops.rotate(q, k, cos, sin), v, cu, longest, scale)
    )
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
    return build_table(
        options,
        STACK,
        clock or ToldClock({**CLOCK, "triton_window": lambda tokens: 99.0}),
        CPU,
        Console(file=io.StringIO()),
        lengths=(8, 16, 64, 256),
        counts=(1,),
    )


@pytest.fixture
def two_kernels(
    monkeypatch: pytest.MonkeyPatch, kernels: dict[str, Callable[..., Any]]
) -> None:
    monkeypatch.setattr(tuning, "candidates", lambda *_: ["flash_attn", "cudnn"])


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
    choices = choices_for("NVIDIA H200", (9, 0), torch.bfloat16, 80, tmp_path)
    assert plan_of(choices).text == "16:cudnn,*:flash_attn"


@pytest.mark.usefixtures("two_kernels")
def test_the_time_limit_leaves_the_rest_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr(tuning.time, "monotonic", lambda: next(seconds))
    # The limit is set at 0, the first head dim takes 1 to 4.
    table = build(Options(dtypes="bf16", head_dims="80,64", time_limit_s=5))
    assert list(table.classes) == ["bfloat16/80"]
    assert {m.head_dim for m in table.measurements} == {80}
    (reason,) = table.left_out
    assert reason.startswith("bfloat16/64: the time limit of 5 s passed")
    assert "no classes of its own" in reason
    with pytest.raises(TuneError, match="no choice could be measured.*--time-limit"):
        build(Options(dtypes="bf16", head_dims="80", time_limit_s=2))


def on_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tune` run on a machine that has a GPU, on the CPU."""
    times = {**CLOCK, "triton_window": lambda tokens: 99.0}
    monkeypatch.setattr(tuning, "probe", lambda: STACK)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuning, "GraphClock", lambda device: ToldClock(times))
    monkeypatch.setattr(
        tuning,
        "build_table",
        lambda options, stack, clock, device, console: build_table(
            options, stack, clock, CPU, console
        ),
    )


@pytest.mark.usefixtures("two_kernels")
def test_the_command_stops_at_the_time_limit_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_this_gpu(monkeypatch)
    effort = tuning.QUICK._replace(lengths=(8, 16, 64, 256), counts=(1,))
    monkeypatch.setattr(tuning, "QUICK", effort)
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
            (torch.bfloat16, head_dim) for head_dim in tuning.HEAD_DIMS
        ]
        assert set(quick.lengths) < set(full.lengths)
        assert set(quick.counts) < set(full.counts)
        cells = [len(grid(80, e.lengths, e.counts)) for e in (quick, full)]
        assert 3 * cells[0] < cells[1]
        # Both classes of windows, and lengths after which FP8 may pay.
        assert {64, 128, 4096} <= set(quick.lengths)
        assert (quick.time_limit_s, full.time_limit_s) == (120, 600)

    def test_other_options_go_before_it(self) -> None:
        options = Options("fp8, bf16", "80", time_limit_s=30, quick=True)
        assert options.effort == tuning.QUICK._replace(
            dtypes=("fp8", "bf16"), time_limit_s=30
        )
        assert options.command() == (
            "vllm-flashinfer-vit tune --quick --dtypes fp8,bf16 --head-dims 80"
        )

    @pytest.mark.usefixtures("two_kernels")
    def test_its_batches_are_what_is_measured(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        effort = tuning.QUICK._replace(lengths=(8, 16), counts=(1, 2))
        monkeypatch.setattr(tuning, "QUICK", effort)
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

    def test_the_command_takes_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given = []

        def record(options: Options, console: Console) -> None:
            given.append(options)
            raise TuneError("enough")

        monkeypatch.setattr(tuning, "run", record)
        assert CliRunner().invoke(main, ["tune", "--quick"]).exit_code == 2
        assert given == [Options(quick=True)]


def test_candidates_are_the_gpu_kernels_that_can_run() -> None:
    found = candidates(STACK, torch.bfloat16, 80)
    assert {"cudnn", "flash_attn", "triton_window"} <= set(found)
    assert "reference" not in found
    old = replace(STACK, cudnn_backend=90800)
    assert "cudnn" not in candidates(old, torch.bfloat16, 80)
    assert "triton_window" not in candidates(STACK, torch.bfloat16, 256)
    assert not fp8_names().intersection(found)


def test_candidates_of_fp8_layers_are_those_of_bf16_and_the_fp8_kernels() -> None:
    fp8 = torch.float8_e4m3fn
    found = candidates(STACK, fp8, 80)
    assert set(found) > set(candidates(STACK, torch.bfloat16, 80))
    assert "triton_fp8" in found and "reference_fp8" not in found
    ampere = STACK.gpus[0]._replace(capability=(8, 0))
    with pytest.raises(TuneError, match="no FP8 kernel"):
        candidates(replace(STACK, gpus=(ampere,)), fp8, 80)


def test_fp8_layers_have_entries_of_their_own(
    monkeypatch: pytest.MonkeyPatch, kernels: dict[str, Callable[..., Any]]
) -> None:
    kernels["reference_fp8"] = attention_fp8_ref
    names = ["flash_attn", "reference_fp8"]
    monkeypatch.setattr(tuning, "candidates", lambda *_: names)
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


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (Options(dtypes="bf16,fp32"), "--dtypes has 'fp32': use bf16 or fp16 or fp8"),
        (Options(dtypes=""), "--dtypes has ''"),
        (Options(head_dims="80,x"), "--head-dims has 'x'"),
        (Options(head_dims="84"), "multiples of 8"),
        (Options(head_dims="264"), "multiples of 8 from 8 to 256"),
    ],
)
def test_bad_options_name_the_good_values(options: Options, what: str) -> None:
    with pytest.raises(TuneError, match=what):
        options.combinations()


def test_combinations_are_measured_once_each() -> None:
    options = Options(dtypes="fp16,bf16,fp16", head_dims="80,80")
    assert options.combinations() == [(torch.float16, 80), (torch.bfloat16, 80)]


def test_the_commands_defaults_are_those_of_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = []

    def record(options: Options, console: Console) -> None:
        given.append(options)
        raise TuneError("enough")

    monkeypatch.setattr(tuning, "run", record)
    assert CliRunner().invoke(main, ["tune"]).exit_code == 2
    assert given == [Options()]


def test_without_a_gpu_tune_says_so_and_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "probe", lambda: replace(STACK, gpus=()))
    monkeypatch.setenv(ENV_TUNED_DIR, str(tmp_path / "tuned"))
    result = CliRunner().invoke(main, ["tune"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: tune needs an NVIDIA GPU")
    assert not (tmp_path / "tuned").exists()


class TestBeforeMeasuring:
    """What would waste the measurements of minutes is said at once."""

    @pytest.fixture
    def measured(self, monkeypatch: pytest.MonkeyPatch) -> list[Options]:
        """Options of the runs that came to measuring, on a machine that has a GPU."""
        runs: list[Options] = []

        def measure(options: Options, *args: Any) -> tuned.Table:
            runs.append(options)
            raise TuneError("enough")

        monkeypatch.setattr(tuning, "probe", lambda: STACK)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(tuning, "GraphClock", lambda device: None)
        monkeypatch.setattr(tuning, "build_table", measure)
        return runs

    def tune(self, *args: str) -> str:
        result = CliRunner().invoke(main, ["tune", *args])
        assert result.exit_code == 2
        return result.stderr

    @pytest.mark.parametrize(
        ("name", "what"),
        [
            ("/dev/null", "it is a device"),
            ("folder", "it is a folder"),
            ("file/h200.json", "Not a directory|File exists"),
            ("loop.json", "circle of symlinks"),
        ],
    )
    def test_the_output_must_be_a_file(
        self, name: str, what: str, measured: list[Options], tmp_path: Path
    ) -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").touch()
        (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
        error = self.tune("--output", str(tmp_path / name))
        assert re.search(what, error)
        assert name in error
        assert not measured

    @pytest.mark.parametrize(
        ("option", "value"), [("--dtypes", "bf16,fp4"), ("--head-dims", "80,100")]
    )
    def test_names_and_numbers(
        self, option: str, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def inspect() -> None:
            raise AssertionError("the machine was inspected first")

        monkeypatch.setattr(tuning, "probe", inspect)
        error = self.tune(option, value)
        assert f"{option} has {value.partition(',')[2]!r}" in error

    def test_what_is_good_is_measured(
        self,
        measured: list[Options],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv(ENV_TUNED_DIR, str(tmp_path / "new" / "tuned"))
        assert "enough" in self.tune()
        assert "enough" in self.tune("--output", str(tmp_path / "h200.json"))
        assert len(measured) == 2
        assert not list(tmp_path.rglob("*.json"))


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


@pytest.mark.parametrize("count", range(3, 8))
def test_nobody_runs_after_the_same_one_only(count: int) -> None:
    contenders = range(count)
    turns = [order_of_turn(contenders, turn) for turn in range(2 * count)]
    assert all(sorted(turn) == list(contenders) for turn in turns)
    for end in (0, -1):
        assert Counter(turn[end] for turn in turns) == dict.fromkeys(contenders, 2)
    pairs = Counter(pair for turn in turns for pair in pairwise(turn))
    for contender in contenders:
        before, after = (contender - 1) % count, (contender + 1) % count
        assert pairs[before, contender] == pairs[after, contender] > 0


@pytest.mark.parametrize("budget_ms", [0.0, 1e6])
def test_kernels_take_turns_both_ways(
    budget_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def elapsed_time(self, end: "Event") -> float:
            return 0.001

    ran: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clocks, "_BUDGET_MS", budget_ms)
    clock = GraphClock(torch.device("cpu"))

    def run(name: str) -> Callable[[], torch.Tensor]:
        return lambda: ran.append(name) or torch.empty(0)

    kernels = ("cudnn", "triton", "flash_attn")
    found = clock.median_us({name: run(name) for name in kernels})
    assert found == dict.fromkeys(kernels, 1.0)
    turns = [tuple(ran[i : i + 3]) for i in range(3, len(ran), 3)]
    assert len(turns) == (24 if budget_ms else 4)
    assert turns[1::2] == [turn[::-1] for turn in turns[::2]]


@pytest.mark.gpu
def test_this_gpu_is_measured(tmp_path: Path) -> None:
    from vllm_flashinfer_vit.machine.probe import probe

    device = torch.device("cuda:0")
    stack = probe()
    table = build_table(
        Options(dtypes="bf16", head_dims="80"),
        stack,
        GraphClock(device),
        device,
        Console(file=io.StringIO()),
        lengths=(64, 256),
        counts=(1, 16),
    )
    tuned.write(table, tmp_path / tuned.file_name(stack.gpus[0].name))
    assert tuned.read(tmp_path, stack.gpus[0].name) == table
    kernels = candidates(stack, torch.bfloat16, 80)
    assert table.left_out == ()
    for row in table.measurements:
        expected = {k for k in kernels if row.longest <= 128 or k != "triton_window"}
        assert set(row.us) == expected
        # A replay takes microseconds; a cold cache cannot make it milliseconds.
        assert all(0.5 < us < 1000 for us in row.us.values())

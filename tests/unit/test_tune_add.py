# SPDX-License-Identifier: Apache-2.0
"""`tune --add` measures a part of a table and leaves the rest as it was."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _stacks import STACK
from typer.testing import CliRunner

pytest.importorskip("vllm")

from _tuning import (
    ToldClock,
    measure_fewer,
    on_this_gpu,
    replace_kernels,
    use_two_kernels,
)

from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.commands import tune as tuning
from vllm_flashinfer_vit.commands.cli import main
from vllm_flashinfer_vit.ops.plan import Class


def tune(path: Path, *args: str) -> Any:
    command = ["tune", "--dtypes", "bf16", "--output", str(path), *args]
    return CliRunner().invoke(main, command)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    replace_kernels(monkeypatch)
    use_two_kernels(monkeypatch)
    on_this_gpu(monkeypatch)
    measure_fewer(monkeypatch, lengths=(8, 16, 64, 256), counts=(1,))
    path = tmp_path / "h200.json"
    tune(path, "--head-dims", "80,64")
    return path


def test_another_head_dim_comes_beside_those_of_before(path: Path) -> None:
    before = tuned.read_file(path, "NVIDIA H200")
    assert tune(path, "--add", "--head-dims", "96").exit_code == 0
    table = tuned.read_file(path, "NVIDIA H200")
    assert before is not None and table is not None
    assert list(table.classes) == ["bfloat16/80", "bfloat16/64", "bfloat16/96"]
    assert table.classes.items() > before.classes.items()
    assert table.measurements[:8] == before.measurements
    assert [m.head_dim for m in table.measurements[8:]] == [96] * 4
    assert table.made_by["command"].split(" && ") == [
        "vllm-flashinfer-vit tune --dtypes bf16 --head-dims 80,64",
        "vllm-flashinfer-vit tune --add --dtypes bf16 --head-dims 96",
    ]


def test_a_file_that_does_not_say_its_command_is_added_to(path: Path) -> None:
    document = json.loads(path.read_text())
    del document["made_by"]["command"]
    path.write_text(json.dumps(document))
    assert tune(path, "--add", "--head-dims", "96").exit_code == 0
    table = tuned.read_file(path, "NVIDIA H200")
    assert table is not None
    assert list(table.classes) == ["bfloat16/80", "bfloat16/64", "bfloat16/96"]
    assert table.made_by["command"].startswith("unknown && vllm-flashinfer-vit tune")


def test_what_is_measured_again_is_replaced(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = {"flash_attn": lambda tokens: 1.0, "cudnn": lambda tokens: 9.0}
    monkeypatch.setattr(tuning, "GraphClock", lambda device: ToldClock(fast))
    assert tune(path, "--add", "--head-dims", "80").exit_code == 0
    table = tuned.read_file(path, "NVIDIA H200")
    assert table is not None
    assert table.classes["bfloat16/80"] == (Class(None, "flash_attn"),)
    assert table.classes["bfloat16/64"][0] == Class(16, "cudnn")
    assert sorted(m.head_dim for m in table.measurements) == [64] * 4 + [80] * 4


def test_what_a_later_run_does_not_finish_stays_and_is_said_to(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tuned.read_file(path, "NVIDIA H200")
    assert before is not None

    def left_out(limit: int) -> list[str]:
        # The limit is set at 0, each head dim takes 4.
        seconds = iter(range(100))
        monkeypatch.setattr(tuning.time, "monotonic", lambda: next(seconds))
        short = ("--only", "attention", "--time-limit", str(limit))
        assert tune(path, "--add", *short, "--head-dims", "96,80").exit_code == 0
        table = tuned.read_file(path, "NVIDIA H200")
        assert table is not None
        assert table.classes.items() >= before.classes.items()
        return [line for line in table.left_out if "time limit" in line]

    # However often: the last run's reason counts.
    for limit in (5, 6):
        (line,) = left_out(limit)
        assert line.startswith(f"bfloat16/80: the time limit of {limit} s passed")
        assert line.endswith("; what was measured before stays")
    assert left_out(50) == []


def test_what_choices_were_measured_without_stays_with_them() -> None:
    made_by = {"command": "tune", "gpu": "NVIDIA H200"}
    rows = {"bfloat16/80": (Class(None, "flash_attn"),)}
    old = tuned.Table(
        made_by,
        rows,
        left_out=("bfloat16/80: cudnn: wrong", "bfloat16/64: the time limit of 3 s"),
    )
    late = "bfloat16/80: the time limit of 4 s", "bfloat16/64: the time limit of 4 s"
    table = tuned.added(old, tuned.Table(made_by, {}, left_out=late))
    assert table.classes == rows
    assert table.left_out == (
        "bfloat16/80: cudnn: wrong",
        "bfloat16/80: the time limit of 4 s; what was measured before stays",
        "bfloat16/64: the time limit of 4 s",
    )


def test_a_second_run_meanwhile_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host with several GPUs, where either would write without the other's."""
    measure, second = tuning.build_table, []

    def build_table(*args: Any) -> tuned.Table:
        monkeypatch.setattr(tuning, "build_table", measure)
        second.append(tune(path, "--add", "--head-dims", "96"))
        return measure(*args)

    monkeypatch.setattr(tuning, "build_table", build_table)
    assert tune(path, "--add", "--head-dims", "128").exit_code == 0
    (refused,) = second
    assert refused.exit_code == 2
    assert "is being made by another process" in refused.stderr
    assert tune(path, "--add", "--head-dims", "96").exit_code == 0
    table = tuned.read_file(path, "NVIDIA H200")
    assert table is not None
    assert [name.partition("/")[2] for name in table.classes] == [
        "80",
        "64",
        "128",
        "96",
    ]
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_without_it_the_file_is_replaced(path: Path) -> None:
    assert tune(path, "--head-dims", "96").exit_code == 0
    table = tuned.read_file(path, "NVIDIA H200")
    assert table is not None and list(table.classes) == ["bfloat16/96"]


def test_without_a_file_there_is_nothing_to_keep(path: Path) -> None:
    path.unlink()
    assert tune(path, "--add", "--head-dims", "96").exit_code == 0
    table = tuned.read_file(path, "NVIDIA H200")
    assert table is not None and list(table.classes) == ["bfloat16/96"]


def test_another_stack_is_refused_before_anything_is_measured(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = path.read_bytes()
    monkeypatch.setattr(tuning, "probe", lambda: replace(STACK, triton="3.8.0"))
    monkeypatch.setattr(tuning, "build_table", lambda *_: pytest.fail("measured"))
    result = tune(path, "--add", "--head-dims", "96")
    assert result.exit_code == 2
    assert "triton 3.6.0 and not 3.8.0" in result.stderr
    # The file would name it no more, whose kernels it has times of.
    monkeypatch.setattr(tuning, "probe", lambda: replace(STACK, flashinfer=None))
    result = tune(path, "--add", "--head-dims", "96")
    assert "flashinfer 0.6.13 and not unknown" in result.stderr
    assert path.read_bytes() == held


def test_another_effort_is_refused(path: Path) -> None:
    result = tune(path, "--add", "--quick", "--head-dims", "96")
    assert result.exit_code == 2
    assert "measured with tune without --quick" in result.stderr


def test_a_damaged_file_is_refused(path: Path) -> None:
    path.write_text("{")
    result = tune(path, "--add", "--head-dims", "96")
    assert result.exit_code == 2
    assert f"the file of choices {path} cannot be used" in result.stderr

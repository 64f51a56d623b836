# SPDX-License-Identifier: Apache-2.0
"""What the command `tune` takes, and what it says before it measures."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _stacks import STACK
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("vllm")

import torch

from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.derive import TuneError
from vllm_flashinfer_vit.commands import tune as tuning
from vllm_flashinfer_vit.commands.cli import main
from vllm_flashinfer_vit.commands.tune import Options
from vllm_flashinfer_vit.settings import ENV_TUNED_DIR


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

# SPDX-License-Identifier: Apache-2.0
"""What the command `tune` takes, and what it says before it measures."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _stacks import STACK, TURING
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("vllm")

import torch
from _tuning import has_gpu, measure_fewer, measured_here

from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.derive import TuneError
from vllm_flashinfer_vit.choices.measure import candidates
from vllm_flashinfer_vit.commands import tune as tuning
from vllm_flashinfer_vit.commands.cli import main
from vllm_flashinfer_vit.commands.tune import Options
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS, KERNELS, fp8_names
from vllm_flashinfer_vit.machine.probe import probe
from vllm_flashinfer_vit.machine.stack import Stack
from vllm_flashinfer_vit.settings import ENV_TUNED_DIR


@pytest.mark.parametrize(
    ("words", "options"), [([], Options()), (["--quick"], Options(quick=True))]
)
def test_the_commands_defaults_are_those_of_options(
    words: list[str], options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def record(options: Options, console: Console) -> None:
        given.append(options)
        raise TuneError("enough")

    monkeypatch.setattr(tuning, "run", record)
    assert CliRunner().invoke(main, ["tune", *words]).exit_code == 2
    assert given == [options]


def test_without_a_gpu_tune_says_so_and_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "probe", lambda: replace(STACK, gpus=()))
    monkeypatch.setenv(ENV_TUNED_DIR, str(tmp_path / "tuned"))
    result = CliRunner().invoke(main, ["tune"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: tune needs an NVIDIA GPU")
    assert not (tmp_path / "tuned").exists()


def test_a_mistyped_option_is_refused_before_imports_of_seconds() -> None:
    code = (
        "import sys\n"
        "from vllm_flashinfer_vit.commands.cli import main\n"
        "for option, value in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        "    try:\n"
        "        main(['tune', option, value])\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code == 2\n"
        "    assert 'vllm' not in sys.modules"
    )
    options = {"--dtypes": "foo", "--only": "foo", "--gemms": "7x7"}
    command = [
        sys.executable,
        "-c",
        code,
        *(x for item in options.items() for x in item),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    for line, (option, value) in zip(lines, options.items(), strict=True):
        assert line.startswith(f"error: {option} has '{value}': ")


@pytest.mark.extended
def test_a_refusal_is_all_that_is_printed() -> None:
    command = [sys.executable, "-m", "vllm_flashinfer_vit.commands.cli", "tune"]
    # With a GPU, too, nothing is measured.
    command += ["--output", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch("error: .*\n", done.stderr) and not done.stdout


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
        has_gpu(monkeypatch)
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

    @pytest.mark.parametrize("content", ["notes", "[4]", '{"schema": "of mine"}'])
    def test_the_output_is_no_other_file(
        self, content: str, measured: list[Options], tmp_path: Path
    ) -> None:
        path = tmp_path / "mine.json"
        path.write_text(content)
        error = self.tune("--output", str(path))
        assert f"{path} is not replaced: it is not empty, and holds no choices" in error
        assert not measured
        # Choices of any GPU, or by an older schema, are what a run replaces.
        path.write_text('{"schema": "vllm-flashinfer-vit/choices/2"}')
        assert "enough" in self.tune("--output", str(path))

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

    def test_the_gpu_is_the_one_that_the_file_is_of(
        self, measured: list[Options], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv(ENV_TUNED_DIR, str(tmp_path))
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        # NVML's first GPU is an H200.
        for other in ("NVIDIA RTX PRO 6000", "NVIDIA H200 NVL"):
            has_gpu(monkeypatch, other)
            error = self.tune()
            assert f"CUDA's first GPU is {other}" in error
            assert "export CUDA_DEVICE_ORDER=PCI_BUS_ID" in error
        assert not measured
        # Then both are the same, by whichever names.
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        assert "enough" in self.tune()
        monkeypatch.delenv("CUDA_DEVICE_ORDER")
        has_gpu(monkeypatch, "NVIDIA H200 MIG 1g.18gb")
        assert "enough" in self.tune()

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


def runnable(stack: Stack, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Return the candidates where every test run is right."""
    found, left_out = candidates(stack, dtype, head_dim, lambda *_: None)
    assert not left_out
    return found


def test_candidates_are_the_gpu_kernels_that_can_run() -> None:
    found = runnable(STACK, torch.bfloat16, 80)
    assert {"cudnn", "flash_attn", "triton_window"} <= set(found)
    assert "reference" not in found
    old = replace(STACK, cudnn_backend=90800)
    assert "cudnn" not in runnable(old, torch.bfloat16, 80)
    assert "triton_window" not in runnable(STACK, torch.bfloat16, 256)
    assert not fp8_names().intersection(found)
    # Nothing is drawn then, nor computed in fp32.
    with pytest.raises(TuneError, match="^no kernel takes this head dim here$"):
        runnable(replace(STACK, gpus=(TURING,)), torch.bfloat16, 80)


def test_candidates_of_fp8_layers_are_those_of_bf16_and_the_fp8_kernels() -> None:
    fp8 = torch.float8_e4m3fn
    found = runnable(STACK, fp8, 80)
    assert set(found) > set(runnable(STACK, torch.bfloat16, 80))
    assert "triton_fp8" in found and "reference_fp8" not in found
    assert all("hopper_fp8" in runnable(STACK, fp8, dim) for dim in HEAD_DIMS)
    ampere = STACK.gpus[0]._replace(capability=(8, 0))
    with pytest.raises(TuneError, match="no FP8 kernel"):
        runnable(replace(STACK, gpus=(ampere,)), fp8, 80)


def test_what_layers_would_refuse_is_no_candidate() -> None:
    runs: list[tuple[str, int, torch.dtype]] = []

    def attempt(kernel: str, head_dim: int, dtype: torch.dtype) -> str | None:
        runs.append((kernel, head_dim, dtype))
        return "a test run is wrong" if kernel == "triton_fp8" else None

    fp8 = torch.float8_e4m3fn
    everything = runnable(STACK, fp8, 80)
    found, left_out = candidates(STACK, fp8, 80, attempt)
    assert left_out == ["triton_fp8: a test run is wrong"]
    assert found == [kernel for kernel in everything if kernel != "triton_fp8"]
    tried = [kernel for kernel in everything if KERNELS[kernel].needs_trial]
    assert runs == [(kernel, 80, torch.bfloat16) for kernel in tried]
    with pytest.raises(TuneError, match="no FP8 kernel.*triton_fp8: no"):
        candidates(STACK, fp8, 80, lambda *_: "no")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (Options(dtypes="bf16,fp32"), "--dtypes has 'fp32': use bf16 or fp16 or fp8"),
        (Options(dtypes=""), "--dtypes has ''"),
        (Options(head_dims="80,x"), "--head-dims has 'x'"),
        (Options(head_dims="84"), "multiples of 8"),
        (Options(head_dims=""), "--head-dims has ''"),
        (Options(head_dims="264"), "multiples of 8 from 8 to 256"),
    ],
)
def test_bad_options_name_the_good_values(options: Options, what: str) -> None:
    with pytest.raises(TuneError, match=what):
        options.combinations()


def test_combinations_are_measured_once_each() -> None:
    options = Options(dtypes="fp16,bf16,fp16", head_dims="80,80")
    assert options.combinations() == [(torch.float16, 80), (torch.bfloat16, 80)]


@pytest.mark.gpu
def test_this_gpu_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_fewer(monkeypatch, lengths=(64, 256), counts=(1, 16))
    table = measured_here(Options(dtypes="bf16", head_dims="80"), tmp_path)
    kernels = runnable(probe(), torch.bfloat16, 80)
    for row in table.measurements:
        expected = {k for k in kernels if row.longest <= 128 or k != "triton_window"}
        assert set(row.us) == expected
        # A replay takes microseconds; a cold cache cannot make it milliseconds.
        assert all(0.5 < us < 1000 for us in row.us.values())

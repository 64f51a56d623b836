# SPDX-License-Identifier: Apache-2.0
"""The command line: options reach the modules, errors become one line and a status."""

import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _stacks import STACK, TURING
from rich.console import Console
from typer.testing import CliRunner

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.commands import doctor
from vllm_flashinfer_vit.commands.cli import main
from vllm_flashinfer_vit.machine.problems import stack_problems
from vllm_flashinfer_vit.patches.patch import PatchError

runner = CliRunner()


@pytest.fixture
def encode(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stand in for `encode.py`, which needs vLLM: records options, raises at will."""
    fake = types.SimpleNamespace(
        options=None,
        error=None,
        log_level=None,
        document={"images": []},
        table="table",
        status=0,
    )

    def run(options: dict[str, Any], console: Console) -> types.SimpleNamespace:
        fake.options = options
        fake.log_level = os.environ.get("VLLM_LOGGING_LEVEL")
        console.print("progress")
        if fake.error is not None:
            raise fake.error
        return types.SimpleNamespace(
            to_json=lambda: fake.document, exit_status=fake.status
        )

    module = types.ModuleType("vllm_flashinfer_vit.commands.encode")
    module.run = run  # type: ignore[attr-defined]
    module.render = lambda report, console: console.print(fake.table)  # type: ignore[attr-defined]
    module.Options = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    # Restores what the command sets.
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    return fake


@pytest.mark.parametrize("command", ["encode", "calibrate"])
def test_an_empty_path_is_not_the_current_folder(
    command: str, encode: types.SimpleNamespace
) -> None:
    result = runner.invoke(main, [command, "", "--model", "a model"])
    assert result.exit_code == 2 and "folder is empty" in result.output
    assert encode.options is None


def test_version() -> None:
    result = runner.invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"vllm-flashinfer-vit {__version__}\n"


@pytest.mark.parametrize("command", [[], ["encode"], ["doctor"]])
def test_help(command: list[str]) -> None:
    result = runner.invoke(main, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_help_does_not_need_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert runner.invoke(main, ["encode", "--help"]).exit_code == 0


def test_encode_hands_over_every_option(encode: types.SimpleNamespace) -> None:
    result = runner.invoke(
        main,
        [
            *("encode", "a.png", "b.jpg"),
            *("--model", "Qwen/Qwen2-VL-2B-Instruct", "--random-weights"),
            *("--depth", "2", "--backend", "FLASHINFER", "--backend", "TORCH_SDPA"),
            *("--dtype", "fp32", "--device", "cpu", "--max-pixels", "200704"),
            *("--attn-dtype", "fp8", "--fp8-scale-path", "scales.json"),
            *("--quantization", "fp8_per_channel"),
            *("--unquantized", "re:.*attn.*", "--unquantized", "a.b"),
            *("--output", "out.safetensors", "--json"),
        ],
    )
    assert result.exit_code == 0, result.output
    assert encode.options == {
        "images": [Path("a.png"), Path("b.jpg")],
        "model": "Qwen/Qwen2-VL-2B-Instruct",
        "random_weights": True,
        "depth": 2,
        "backends": ["FLASHINFER", "TORCH_SDPA"],
        "attn_dtype": "fp8",
        "fp8_scale_path": Path("scales.json"),
        "quantization": "fp8_per_channel",
        "unquantized": ["re:.*attn.*", "a.b"],
        "dtype": "fp32",
        "device": "cpu",
        "max_pixels": 200704,
        "output": Path("out.safetensors"),
    }


def test_encode_takes_flashinfer_by_default(encode: types.SimpleNamespace) -> None:
    assert runner.invoke(main, ["encode", "a.png"]).exit_code == 0
    assert encode.options["backends"] == ["FLASHINFER"]


def test_encode_prints_only_the_result_on_stdout(
    encode: types.SimpleNamespace,
) -> None:
    assert runner.invoke(main, ["encode", "a.png"]).stdout == "table\n"
    result = runner.invoke(main, ["encode", "a.png", "--json"])
    assert json.loads(result.stdout) == {"images": []}
    assert result.stderr == "progress\n"


# Like the fixture, in a process whose standard output can be anything.
ENCODE = """
import sys, types
from vllm_flashinfer_vit.commands.cli import main
status = int(sys.argv.pop())
report = types.SimpleNamespace(to_json=lambda: "x" * 100_000, exit_status=status)
sys.modules["vllm_flashinfer_vit.commands.encode"] = types.SimpleNamespace(
    Options=dict,
    run=lambda options, console: report,
    render=lambda report, console: console.print("x\\n" * 10_000),
)
main()
"""


@pytest.mark.parametrize("options", [[], ["--json"]])
class TestStandardOutput:
    def encode(
        self, stdout: Any, options: list[str], status: int = 0
    ) -> tuple[int, str]:
        command = [sys.executable, "-c", ENCODE, "encode", "a.png", *options]
        done = subprocess.run(
            [*command, str(status)], stdout=stdout, stderr=subprocess.PIPE, text=True
        )
        return done.returncode, done.stderr

    def test_a_full_disk_is_one_line_and_2(self, options: list[str]) -> None:
        with open("/dev/full", "w") as full:
            status, errors = self.encode(full, options)
        assert status == 2
        assert errors == (
            "error: the result cannot be written to standard output: "
            "[Errno 28] No space left on device\n"
        )

    @pytest.mark.parametrize("status", [0, 1])
    def test_a_reader_that_has_seen_enough_changes_no_status(
        self, options: list[str], status: int
    ) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        try:
            assert self.encode(writing, options, status) == (status, "")
        finally:
            os.close(writing)


def test_a_name_that_is_not_utf_8_is_printed_escaped(
    encode: types.SimpleNamespace,
) -> None:
    encode.table = os.fsdecode(b"\xff.png")
    encode.document = {"images": [encode.table]}
    assert runner.invoke(main, ["encode", "a.png"]).stdout == "\\udcff.png\n"
    result = runner.invoke(main, ["encode", "a.png", "--json"])
    assert json.loads(result.stdout) == encode.document


def test_the_options_and_defaults_are_those_of_encode(
    encode: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    runner.invoke(main, ["encode", "a.png", "--model", "m"])
    monkeypatch.delitem(sys.modules, "vllm_flashinfer_vit.commands.encode")
    from vllm_flashinfer_vit.commands.encode import Options

    found = vars(Options(**encode.options))
    default = vars(Options(images=[Path("a.png")], model="m", backends=["FLASHINFER"]))
    assert found == default


@pytest.mark.parametrize("as_json", [False, True])
def test_encode_exits_with_1_after_leaving_something_out(
    encode: types.SimpleNamespace, as_json: bool
) -> None:
    encode.status = 1
    arguments = ["encode", "folder", *(["--json"] if as_json else [])]
    result = runner.invoke(main, arguments)
    assert result.exit_code == 1
    assert result.stdout


def test_json_holds_no_nan(encode: types.SimpleNamespace) -> None:
    encode.document = {"error": float("nan")}
    result = runner.invoke(main, ["encode", "a.png", "--json"])
    assert "NaN" not in result.stdout
    assert isinstance(result.exception, ValueError)


def test_encode_silences_vllm(encode: types.SimpleNamespace) -> None:
    runner.invoke(main, ["encode", "a.png"])
    assert encode.log_level == "WARNING"


def test_encode_leaves_the_users_log_level(
    encode: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    runner.invoke(main, ["encode", "a.png"])
    assert encode.log_level == "DEBUG"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no model is named x"),
        FileNotFoundError(2, "No such file or directory", "a.png"),
        ModuleNotFoundError("No module named 'vllm'"),
        # In strict mode.
        PatchError("patch x does not fit this vLLM"),
    ],
)
def test_an_error_is_one_line_on_stderr(
    encode: types.SimpleNamespace, error: Exception
) -> None:
    encode.error = error
    result = runner.invoke(main, ["encode", "a.png"])
    assert result.exit_code == 2
    assert result.stderr == f"progress\nerror: {error}\n"
    assert result.stdout == ""


def test_a_defect_is_not_hidden(encode: types.SimpleNamespace) -> None:
    encode.error = KeyError("a bug")
    result = runner.invoke(main, ["encode", "a.png"])
    assert result.exit_code == 1
    assert isinstance(result.exception, KeyError)


@pytest.mark.parametrize(
    "arguments",
    [
        ["encode"],
        ["encode", "a.png", "--depth", "0"],
        ["encode", "a.png", "--depth", "two"],
        ["encode", "a.png", "--max-pixels", "-1"],
        ["doctor", "--yaml"],
        ["decode"],
    ],
)
def test_bad_usage_exits_with_2(
    encode: types.SimpleNamespace, arguments: list[str]
) -> None:
    assert runner.invoke(main, arguments).exit_code == 2
    assert encode.options is None


@pytest.mark.parametrize(
    ("changes", "status"), [({}, 0), ({"gpus": ()}, 0), ({"gpus": (TURING,)}, 1)]
)
@pytest.mark.parametrize("as_json", [False, True])
def test_doctor_exits_with_its_verdict(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], status: int, as_json: bool
) -> None:
    stack = replace(STACK, **changes)
    stack = replace(stack, problems=tuple(stack_problems(stack)))
    report = doctor.diagnose(stack, {"active": True, "patches": []}, None, {})
    monkeypatch.setattr(doctor, "examine", lambda console: report)
    result = runner.invoke(main, ["doctor", *(["--json"] if as_json else [])])
    assert result.exit_code == status
    if as_json:
        assert json.loads(result.stdout) == json.loads(json.dumps(report.to_json()))
    else:
        # The terminal's width decides where the sentence is wrapped.
        assert report.summary in " ".join(result.stdout.split())

# SPDX-License-Identifier: Apache-2.0
"""What the canary tells and records: what fits, what is left out, what fails."""

import re
import sys
from pathlib import Path

import pytest
from _canary import REPORT, RUN, TESTS, canary

from vllm_flashinfer_vit.patches.fingerprints import known


def test_one_table_tells_it_all() -> None:
    assert RUN.table().splitlines() == [
        "| vLLM 0.34.0 | state | why |",
        "|---|---|---|",
        "| patch: 2 | fit |  |",
        "| optimisation: 1 | fit |  |",
        "| 2 tests | fit |  |",
        "| patch b-blocks | left out | patch b-blocks: it / differs |",
        "| patch d-blocks | left out | not for this vLLM |",
        "| patch e-blocks | left out | no source e.py |",
        "| optimisation gemma4_blocks | left out | it was not read |",
        "| 2 tests | left out | needs a GPU |",
        "| tests.unit.test_b::test_fails | fails | assert 1 == 2 |",
        "| tests.unit.test_b::test_errs | fails | no file 'a folder/a.json' |",
        "| doctor | fails | vLLM does not import |",
    ]
    assert RUN.failures == 3


def test_a_record_is_read_as_it_is_written() -> None:
    text = canary.dumps(RUN)
    assert canary.loads(text) == RUN
    assert RUN.made_by["command"] == "make canary VLLM=0.34.0"
    assert "a-host" not in text and "/home" not in text
    with pytest.raises(ValueError, match="canary/0"):
        canary.loads(text.replace(canary.SCHEMA, canary.SCHEMA[:-1] + "0"))


@pytest.mark.parametrize(
    "version, is_release",
    [
        ("0.34.0", True),
        ("0.34.0.post1", True),
        ("0.34.0rc1", False),
        ("0.35.0.dev3+g1a2b", False),
        ("0.34.0+cu129", False),
    ],
)
def test_what_is_recorded(version: str, is_release: bool) -> None:
    assert canary.is_release(version) == is_release


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return what is run. Doctor and pytest are another's work: what they leave is."""
    found = []

    def run(command, **_):
        found.append(command)
        for option in map(str, command):
            if option.startswith("--junitxml="):
                Path(option.partition("=")[2]).write_text(TESTS)
        return canary.subprocess.CompletedProcess(command, 1, canary.json.dumps(REPORT))

    monkeypatch.setattr(canary.subprocess, "run", run)
    monkeypatch.setattr(canary, "ROOT", tmp_path)
    monkeypatch.setattr(canary, "RECORDS", tmp_path / "results")
    monkeypatch.setattr(canary.Run, "of", lambda *_: RUN)
    monkeypatch.setattr(canary, "_commit", lambda: "abc1234")
    return found


@pytest.mark.parametrize("options, files", [([], []), (["--record"], ["0.34.0.json"])])
def test_a_run_is_recorded_when_asked_for(
    options: list[str],
    files: list[str],
    commands: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["canary.py", *options, "-m", "not gpu"])
    with pytest.raises(SystemExit) as raised:
        canary.main()
    assert raised.value.code == 1
    assert commands[1][-2:] == ["-m", "not gpu"] and "--record" not in commands[1]
    assert [path.name for path in tmp_path.glob("results/*")] == files
    assert RUN.table() in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, vllm, is_refused",
    [
        (["--record"], "0.34.0", True),
        # Neither is recorded.
        ([], "0.34.0", False),
        (["--record"], "0.35.0.dev3+g1a2b", False),
    ],
)
def test_a_tree_with_changes_is_not_recorded(
    options: list[str],
    vllm: str,
    is_refused: bool,
    commands: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(REPORT["stack"], "vllm", vllm)
    monkeypatch.setattr(canary, "_commit", lambda: "abc1234+dirty")
    monkeypatch.setattr(sys, "argv", ["canary.py", *options])
    with pytest.raises(SystemExit) as raised:
        canary.main()
    assert ("abc1234+dirty" in str(raised.value.code)) == is_refused
    # It says so before the tests run.
    assert len(commands) == (1 if is_refused else 2)
    assert not list(tmp_path.glob("results/*"))


def test_records_are_of_releases_that_were_read_and_name_no_machine() -> None:
    paths = sorted(canary.RECORDS.glob("*"))
    assert [path.stem for path in paths] == sorted(canary.recorded())
    for path in paths:
        text = path.read_text()
        run = canary.loads(text)
        assert canary.dumps(run) == text and canary.is_release(run.vllm)
        assert run.vllm in known().releases, "read it first: make fingerprints"
        assert not re.search(r"/(home|root|tmp|work|usr)\b|\.venv", text), path

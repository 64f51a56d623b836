# SPDX-License-Identifier: Apache-2.0
"""The script that compares two commits bit by bit."""

import csv
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from _benchmarks import BENCHMARKS, ENVIRONMENT

import bits
from csv_log import CsvLog

MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"


def write_rows(path: Path, commit: str, hashes: dict[str, str], **changes: str) -> None:
    environment = replace(ENVIRONMENT, commit=commit)
    log = CsvLog(path, bits.COLUMNS)
    for case, sha256 in hashes.items():
        row = {
            "model": MODEL,
            "case": case,
            "attn_dtype": "bf16",
            "mode": "graph",
            "kernels": "full: triton",
            "shape": "64x3584",
            "sha256": sha256,
        }
        log.add({**row, **asdict(environment), **changes})


def test_one_bit_changes_the_digest() -> None:
    values = torch.linspace(-1, 1, 64).bfloat16().view(8, 8)
    other = values.clone()
    other.view(torch.int16)[7, 7] ^= 1
    assert bits.digest(values) == bits.digest(values.clone())
    assert bits.digest(values) != bits.digest(other)
    # The order of elements counts, not how they lie in memory.
    assert bits.digest(values.t()) == bits.digest(values.t().contiguous())
    assert bits.digest(values.t()) != bits.digest(values)


def test_equal_commits_have_no_differences(tmp_path: Path) -> None:
    path = tmp_path / "bits.csv"
    write_rows(path, "old", {"1x256": "aa", "mixed": "bb"})
    # Run twice: the newer row counts.
    write_rows(path, "new", {"1x256": "cc"})
    write_rows(path, "new", {"1x256": "aa", "mixed": "bb"})
    assert bits.compare(path, "old", "new") == []


def test_differences_are_named_with_what_else_differs(tmp_path: Path) -> None:
    path = tmp_path / "bits.csv"
    write_rows(path, "old", {"1x256": "aa", "1x4096": "bb", "mixed": "cc"})
    write_rows(path, "new", {"1x256": "aa", "1x4096": "xx"}, torch="2.14.0")
    assert bits.compare(path, "old", "new") == [
        f"{MODEL} 1x4096 bf16 graph: other bits (torch: 2.11.0 and 2.14.0)",
        f"{MODEL} mixed bf16 graph: only in old",
    ]
    with pytest.raises(SystemExit, match="'odd'; it has: old, new"):
        bits.compare(path, "old", "odd")


def test_commits_are_compared_on_one_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bits.csv"
    write_rows(path, "old", {"1x256": "aa"})
    write_rows(path, "new", {"1x256": "aa"})
    write_rows(path, "new", {"1x256": "bb"}, vllm="0.33.0")
    with pytest.raises(SystemExit, match=r"0\.25\.1, 0\.33\.0: name one with --vllm"):
        bits.compare(path, "old", "new")
    assert bits.compare(path, "old", "new", "0.25.1") == []
    with pytest.raises(SystemExit, match=r"no such rows of vLLM 0\.33\.0"):
        bits.compare(path, "old", "new", "0.33.0")
    command = ["bits.py", "--vllm", "0.25.1", "--output", str(path)]
    monkeypatch.setattr("sys.argv", [*command, "--compare", "old", "new"])
    bits.main()
    assert "same bits in all 1 cases" in capsys.readouterr().out
    write_rows(path, "other", {"1x256": "cc"}, torch="2.14.0")
    monkeypatch.setattr("sys.argv", [*command, "--compare", "old", "other"])
    with pytest.raises(SystemExit, match="old and other differ in 1 cases"):
        bits.main()
    assert "other bits (torch: 2.11.0 and 2.14.0)\n" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit):
        bits.main()
    assert "it needs --compare" in capsys.readouterr().err


class Unsteady:
    """A tower whose output is another at each call."""

    def __init__(self) -> None:
        self.spec = type("Spec", (), {"patch_dim": 4})
        self.device = torch.device("cpu")
        self._calls = 0

    def visual(self, pixels: torch.Tensor, grids: list[list[int]]) -> torch.Tensor:
        self._calls += 1
        return pixels + self._calls


def test_outputs_that_differ_from_call_to_call_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="two runs"):
        bits._case_row(Unsteady(), ((1, 2, 2),), "eager")  # type: ignore[arg-type]


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU has real cases")
def test_towers_are_hashed_on_the_cpu(tmp_path: Path) -> None:
    output = tmp_path / "bits.csv"
    script = [sys.executable, str(BENCHMARKS / "bits.py"), "--output", str(output)]
    options = ["--smoke", "--models", MODEL, "--cases", "1x64"]
    subprocess.run([*script, *options], check=True, timeout=300)
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["attn_dtype"], row["mode"]) for row in rows] == [
        ("bf16", "eager"),
        ("fp8", "eager"),
    ]
    for row in rows:
        assert row["shape"] == "16x3584"
        assert len(row["sha256"]) == 64
    same = [*script, "--compare", rows[0]["commit"], rows[0]["commit"]]
    done = subprocess.run(same, check=True, timeout=300, capture_output=True, text=True)
    assert "same bits in all 2 cases" in done.stdout

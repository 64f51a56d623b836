# SPDX-License-Identifier: Apache-2.0
"""The tree: how long a module may be, and what README of the benchmarks lists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "docs", "examples", "src", "tests", "tools")
MOST_LINES = 450
# One kernel, which no one can read in parts.
LONGER = {
    f"src/vllm_flashinfer_vit/kernels/{name}.py"
    for name in ("hopper_bf16", "hopper_fp8")
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_modules_are_short_enough_to_have_one_job(folder: str) -> None:
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in (ROOT / folder).rglob("*.py")
    }
    assert lines
    long = {name for name, count in lines.items() if count > MOST_LINES}
    assert long == {name for name in LONGER if name.startswith(f"{folder}/")}


def test_readme_of_the_benchmarks_lists_each_file() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    listed = set(re.findall(r"`(\w+\.py)[` ]", table))
    assert {path.name for path in (ROOT / "benchmarks").glob("*.py")} <= listed

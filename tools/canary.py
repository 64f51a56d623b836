# SPDX-License-Identifier: Apache-2.0
"""Says what of this package works with the vLLM that is installed, in one table.

    python tools/canary.py -m "not extended and not gpu"    # options of pytest
    python tools/canary.py --record ...    # a release's also goes into tests/results/

`make canary VLLM=...` installs a vLLM in an environment of its own, and runs it there
with `--record`. docs/compatibility.md is made of what was recorded.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "tests" / "results"
SCHEMA = "vllm-flashinfer-vit/canary/1"
# Of doctor's stack: what the tests ran on besides vLLM.
_STACK = ("python", "torch", "triton", "flashinfer", "quack")
_CUT = 200
# States of what fits, by `doctor --json`.
_FITTING = frozenset({"applied", "not applied", "disabled", "enabled"})
# Folders of whoever ran it, before the name of a file.
_FOLDERS = re.compile(r"(?<![\w./:])/(?:[^\s/'\":]+/)+")


@dataclass(frozen=True)
class Fit:
    """Patches, or optimisations: how many fit, and why each other is left out."""

    fit: int
    left_out: Mapping[str, str]

    @classmethod
    def of_doctor(cls, found: Iterable[Mapping[str, Any]]) -> "Fit":
        """Return what rows of `doctor --json` say."""
        fit = 0
        left_out = {}
        for one in found:
            state, _, why = one["state"].partition(": ")
            if state in _FITTING:
                fit += 1
            else:
                left_out[one["name"]] = _short(why or state)
        return cls(fit, left_out)


@dataclass(frozen=True)
class Tests:
    """Tests: how many passed, how many were skipped by reason, and what failed how."""

    passed: int
    skipped: Mapping[str, int]
    failed: Mapping[str, str]

    @classmethod
    def of_xml(cls, cases: Iterable[ElementTree.Element]) -> "Tests":
        """Return what pytest's XML says of its test cases."""
        passed = 0
        skipped: Counter[str] = Counter()
        failed = {}
        for case in cases:
            for found in case:
                message = _short(found.get("message", ""))
                if found.tag in ("failure", "error"):
                    failed[f"{case.get('classname')}::{case.get('name')}"] = message
                    break
                if found.tag == "skipped":
                    skipped[message] += 1
                    break
            else:
                passed += 1
        return cls(passed, dict(sorted(skipped.items())), failed)


@dataclass(frozen=True)
class Run:
    """What works with a vLLM.

    Attributes:
        made_by: Command, commit and day.
        vllm: Its version.
        stack: Versions that the tests ran on, by the names of doctor's stack; None for
            what is not installed.
        flash_attn: FlashAttention versions whose code this vLLM brings.
        patches: Which of them fit.
        optimisations: Likewise.
        tests: What pytest says.
        problems: Why `doctor` says that nothing can be served, if it does.
    """

    made_by: Mapping[str, str]
    vllm: str
    stack: Mapping[str, str | None]
    flash_attn: tuple[int, ...]
    patches: Fit
    optimisations: Fit
    tests: Tests
    problems: tuple[str, ...]

    @classmethod
    def of(
        cls, report: Mapping[str, Any], cases: Iterable[ElementTree.Element]
    ) -> "Run":
        """Return what `doctor --json` and pytest's XML say."""
        stack = report["stack"]
        fatal = (p["what"] for p in report["problems"] if p["fatal"])
        return cls(
            made_by={
                "command": f"make canary VLLM={stack['vllm']}",
                "commit": _commit(),
                "date": datetime.now(UTC).date().isoformat(),
            },
            vllm=stack["vllm"],
            stack={name: stack[name] for name in _STACK},
            flash_attn=tuple(stack["flash_attn"]),
            patches=Fit.of_doctor(report["patches"]),
            optimisations=Fit.of_doctor(report["optimisations"]),
            tests=Tests.of_xml(cases),
            problems=tuple(map(_short, fatal)),
        )

    @property
    def failures(self) -> int:
        """How many tests fail, and things that `doctor` finds."""
        return len(self.tests.failed) + len(self.problems)

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield what is told: what, state, why; first what fits, last what fails."""
        kinds = {"patch": self.patches, "optimisation": self.optimisations}
        for kind, found in kinds.items():
            yield f"{kind}: {found.fit}", "fit", ""
        yield f"{self.tests.passed} tests", "fit", ""
        for kind, found in kinds.items():
            for name, why in found.left_out.items():
                yield f"{kind} {name}", "left out", why
        for why, count in self.tests.skipped.items():
            yield f"{count} tests", "left out", why
        for name, why in self.tests.failed.items():
            yield name, "fails", why
        for what in self.problems:
            yield "doctor", "fails", what

    def table(self) -> str:
        """Return the rows in Markdown."""
        lines = [f"| vLLM {self.vllm} | state | why |", "|---|---|---|"]
        for what, state, why in self.rows():
            lines.append(f"| {what} | {state} | {why.replace('|', '/')} |")
        return "\n".join(lines)


def is_release(vllm: str) -> bool:
    """Whether a vLLM is a release: no candidate, no build of a commit or a CUDA."""
    version = Version(vllm)
    return not (version.is_prerelease or version.local)


def _commit() -> str:
    # It imports torch, which whoever reads records does without.
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from environment import commit

    return commit()


def _short(text: str) -> str:
    """Return the start of a text on one line, without folders of this machine."""
    return _FOLDERS.sub("", " ".join(text.split()))[:_CUT]


def dumps(run: Run) -> str:
    """Write a record."""
    return json.dumps({"schema": SCHEMA, **asdict(run)}, indent=2) + "\n"


def loads(text: str) -> Run:
    """Read a record.

    Raises:
        ValueError: It has another schema.
    """
    document = json.loads(text)
    if (schema := document.pop("schema")) != SCHEMA:
        raise ValueError(f"a record has the schema {schema!r}, not {SCHEMA!r}")
    kinds = {"patches": Fit, "optimisations": Fit, "tests": Tests}
    parts = {name: kind(**document.pop(name)) for name, kind in kinds.items()}
    lists = {name: tuple(document.pop(name)) for name in ("flash_attn", "problems")}
    return Run(**document, **parts, **lists)


def recorded() -> dict[str, Run]:
    """Return the runs that were recorded, by the version of vLLM."""
    runs = (loads(path.read_text()) for path in sorted(RECORDS.glob("*.json")))
    return {run.vllm: run for run in runs}


def main() -> None:
    """Run `doctor` and the tests, and print the table.

    Raises:
        SystemExit: Something fails: 1; nothing is there to be told, or a record would
            not say what ran: the reason.
    """
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--record", action="store_true", help="write what a release's run found, too"
    )
    args, options = parser.parse_known_args()
    doctor = Path(sys.executable).with_name("vllm-flashinfer-vit")
    # It ends with 1 where this machine cannot serve, and tells of the patches anyway.
    told = subprocess.run([doctor, "doctor", "--json"], capture_output=True, text=True)
    if not told.stdout:
        raise SystemExit(f"doctor failed: {told.stderr}")
    report = json.loads(told.stdout)
    is_recorded = args.record and is_release(report["stack"]["vllm"])
    if is_recorded and (commit := _commit()).endswith("+dirty"):
        raise SystemExit(
            f"the tree is {commit}: a record names the commit that ran, so commit or "
            "stash what `git status` shows; without --record the table alone is printed"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        pytest = [sys.executable, "-m", "pytest", "-q", f"--junitxml={path}"]
        status = subprocess.run([*pytest, *options], cwd=ROOT).returncode
        # 1: tests failed, as the table is going to say.
        if status not in (0, 1) or not path.exists():
            raise SystemExit(f"pytest ended with {status}, see above")
        # Written by pytest just now.
        cases = ElementTree.parse(path).iter("testcase")  # noqa: S314
        run = Run.of(report, cases)
    if is_recorded:
        RECORDS.mkdir(exist_ok=True)
        target = RECORDS / f"{run.vllm}.json"
        target.write_text(dumps(run), encoding="utf-8")
        print(f"\nwrote {target.relative_to(ROOT)}: python docs/generate.py reads it")
    print(f"\n{run.table()}")
    raise SystemExit(bool(run.failures))


if __name__ == "__main__":
    main()

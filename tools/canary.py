# SPDX-License-Identifier: Apache-2.0
"""Says what of this package works with the vLLM that is installed, in one table.

    python tools/canary.py -m "not extended and not gpu"    # options of pytest

`make canary VLLM=...` installs a vLLM in an environment of its own, and runs it there.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
_CUT = 200
# States of what fits, by `doctor --json`.
_FITTING = frozenset({"applied", "not applied", "disabled", "enabled"})


def rows_of_doctor(
    kind: str, found: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[str, str, str]]:
    """Return what `doctor --json` says of patches: what, state, why.

    Args:
        kind: What they are called, `patch` or `optimisation`.
        found: Its rows of them.
    """
    fitting = 0
    for one in found:
        state, _, why = one["state"].partition(": ")
        if state in _FITTING:
            fitting += 1
        else:
            yield f"{kind} {one['name']}", "left out", why or state
    yield f"{kind}: {fitting}", "fit", ""


def rows_of_tests(
    cases: Iterable[ElementTree.Element],
) -> Iterator[tuple[str, str, str]]:
    """Return what pytest's XML says of tests: what, state, why."""
    passed = 0
    skipped: Counter[str] = Counter()
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for found in case:
            message = found.get("message", "")
            if found.tag in ("failure", "error"):
                yield name, "fails", message
                break
            if found.tag == "skipped":
                skipped[message] += 1
                break
        else:
            passed += 1
    for message, count in skipped.items():
        yield f"{count} tests", "left out", message
    yield f"{passed} tests", "fit", ""


def table(vllm: str | None, rows: Iterable[tuple[str, str, str]]) -> str:
    """Return rows as a table in Markdown: what fits, what is left out, what fails."""
    states = ("fit", "left out", "fails")
    lines = [f"| vLLM {vllm} | state | why |", "|---|---|---|"]
    for what, state, why in sorted(rows, key=lambda row: states.index(row[1])):
        short = " ".join(why.replace("|", "/").split())[:_CUT]
        lines.append(f"| {what} | {state} | {short} |")
    return "\n".join(lines)


def main() -> None:
    """Run `doctor` and the tests, and print the table.

    Raises:
        SystemExit: Something fails: 1; nothing is there to be told: the reason.
    """
    doctor = Path(sys.executable).with_name("vllm-flashinfer-vit")
    # It ends with 1 where this machine cannot serve, and tells of the patches anyway.
    told = subprocess.run([doctor, "doctor", "--json"], capture_output=True, text=True)
    if not told.stdout:
        raise SystemExit(f"doctor failed: {told.stderr}")
    report = json.loads(told.stdout)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        pytest = [sys.executable, "-m", "pytest", "-q", f"--junitxml={path}"]
        status = subprocess.run([*pytest, *sys.argv[1:]], cwd=ROOT).returncode
        # 1: tests failed, as the table is going to say.
        if status not in (0, 1) or not path.exists():
            raise SystemExit(f"pytest ended with {status}, see above")
        # Written by pytest just now.
        cases = list(ElementTree.parse(path).iter("testcase"))  # noqa: S314
    rows = [
        *rows_of_doctor("patch", report["patches"]),
        *rows_of_doctor("optimisation", report["optimisations"]),
        *rows_of_tests(cases),
    ]
    if not report["ok"]:
        fatal = (p["what"] for p in report["problems"] if p["fatal"])
        rows += [("doctor", "fails", what) for what in fatal]
    print(f"\n{table(report['stack']['vllm'], rows)}")
    raise SystemExit(any(state == "fails" for _, state, _ in rows))


if __name__ == "__main__":
    main()

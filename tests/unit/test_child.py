# SPDX-License-Identifier: Apache-2.0
"""Child processes that end well, crash, fail and hang."""

import os
import signal
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from vllm_flashinfer_vit.machine.child import run_isolated

CHILD = """
import os, sys, time

def fine(emit):
    print("noise without an end", end="")
    emit({"a": 1})
    emit({"b": [2]})

def crash(emit):
    emit({"importing": "cudnn"})
    os.abort()

def fail(emit):
    emit({"a": 1})
    raise RuntimeError("no such thing")

def torn(emit):
    emit({"a": 1})
    print(capture(lambda: emit({"b": 2}))[:-3])
    os.abort()

def capture(write):
    import contextlib, io
    with contextlib.redirect_stdout(io.StringIO()) as out:
        write()
    return out.getvalue().rstrip()

def hang(emit):
    emit({"a": 1})
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("report", "facts", "error"),
    [
        ("fine", {"a": 1, "b": [2]}, None),
        ("crash", {"importing": "cudnn"}, f"crashed with signal {signal.SIGABRT:d}"),
        ("fail", {"a": 1}, "failed: RuntimeError: no such thing"),
        ("missing", {}, "failed: AttributeError"),
        ("torn", {"a": 1}, f"crashed with signal {signal.SIGABRT:d}"),
    ],
)
def test_run_isolated(
    tmp_path: Path, report: str, facts: dict[str, Any], error: str | None
) -> None:
    (tmp_path / "child_module.py").write_text(CHILD)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found, what = run_isolated(report, module="child_module", env=env)
    assert found == facts
    assert what == error if error is None else str(what).startswith(error)


def test_run_isolated_kills_a_child_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "child_module.py").write_text(CHILD)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    # A busy machine may take seconds to start Python; far below the child's sleep.
    for seconds in (1, 15):
        found, what = run_isolated(
            "hang", module="child_module", env=env, timeout_s=seconds
        )
        assert what == f"did not finish in {seconds} s"
        if found:
            break
    assert found == {"a": 1}


def test_run_isolated_kills_a_child_that_nobody_waits_for(tmp_path: Path) -> None:
    (tmp_path / "child_module.py").write_text(CHILD)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    stop = Event()
    stop.set()
    begin_s = time.monotonic()
    _, what = run_isolated("hang", module="child_module", env=env, stop=stop)
    assert what == "was stopped"
    assert time.monotonic() - begin_s < 30

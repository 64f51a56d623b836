# SPDX-License-Identifier: Apache-2.0
"""Functions that may crash or hang, run in a child process."""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from threading import Event
from typing import Any

_TIMEOUT_S = 180
# How soon a child ends that is not wanted any more.
_POLL_S = 0.2
_MARK = "vllm-flashinfer-vit-fact:"


def run_isolated(
    report: str,
    *,
    module: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = _TIMEOUT_S,
    stop: Event | None = None,
) -> tuple[dict[str, Any], str | None]:
    """Run `module.report(emit)` in a child process that may crash or hang.

    Args:
        report: Name of the function; it gets an `emit` that takes a dict of JSON data.
        module: Name of the module that has it.
        env: Environment of the child; this process's by default.
        timeout_s: Seconds until it is killed.
        stop: Another thread sets it to have the child killed at once.

    Returns:
        All the facts that were emitted, even before a crash, merged; and what went
        wrong, or None.
    """
    code = "import sys, vllm_flashinfer_vit.machine.child as c; c._child(*sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, module, report],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
    ) as child:
        try:
            out, err, stopped = _written(child, timeout_s, stop)
        finally:
            child.kill()
    facts: dict[str, Any] = {}
    for line in out.splitlines():
        _, mark, data = line.partition(_MARK)
        if mark:
            # A child that is killed may leave half a line.
            with suppress(ValueError):
                facts.update(json.loads(data))
    if stopped is not None:
        return facts, stopped
    if child.returncode == 0:
        return facts, None
    if child.returncode < 0:
        return facts, f"crashed with signal {-child.returncode}"
    lines = err.strip().splitlines() or ["no message"]
    return facts, f"failed: {lines[-1].strip()}"


def _written(
    child: "subprocess.Popen[str]", timeout_s: float, stop: Event | None
) -> tuple[str, str, str | None]:
    """Return what a child wrote, and why it is to be killed, or None if it ended."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return *child.communicate(timeout=_POLL_S), None
        except subprocess.TimeoutExpired as error:
            # It has bytes, though a child's output is text.
            out, err = (
                (written or b"").decode(errors="replace")
                for written in (error.stdout, error.stderr)
            )
        if stop is not None and stop.is_set():
            return out, err, "was stopped"
        if time.monotonic() >= end_s:
            return out, err, f"did not finish in {timeout_s:.0f} s"


def _child(module: str, report: str) -> None:
    def emit(facts: dict[str, Any]) -> None:
        # A library's own unfinished line of output may stand before it.
        print(f"\n{_MARK}{json.dumps(facts)}", flush=True)

    getattr(importlib.import_module(module), report)(emit)

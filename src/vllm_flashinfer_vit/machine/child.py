# SPDX-License-Identifier: Apache-2.0
"""Functions that may crash or hang, run in a child process."""

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_TIMEOUT_S = 180
_MARK = "vllm-flashinfer-vit-fact:"


def run_isolated(
    report: str,
    *,
    module: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> tuple[dict[str, Any], str | None]:
    """Run `module.report(emit)` in a child process that may crash or hang.

    Args:
        report: Name of the function; it gets an `emit` that takes a dict of JSON data.
        module: Name of the module that has it.
        env: Environment of the child; this process's by default.
        timeout_s: Seconds until it is killed.

    Returns:
        All the facts that were emitted, even before a crash, merged; and what went
        wrong, or None.
    """
    code = "import sys, vllm_flashinfer_vit.machine.child as c; c._child(*sys.argv[1:])"
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", code, module, report],
            capture_output=True,
            text=True,
            errors="replace",
            env=env,
            timeout=timeout_s,
        )
        out, err, status = child.stdout, child.stderr, child.returncode
    except subprocess.TimeoutExpired as error:
        out, err, status = _text(error.stdout), _text(error.stderr), None
    facts: dict[str, Any] = {}
    for line in out.splitlines():
        _, mark, data = line.partition(_MARK)
        if mark:
            # A child that is killed may leave half a line.
            with suppress(ValueError):
                facts.update(json.loads(data))
    if status == 0:
        return facts, None
    if status is None:
        return facts, f"did not finish in {timeout_s:.0f} s"
    if status < 0:
        return facts, f"crashed with signal {-status}"
    lines = err.strip().splitlines() or ["no message"]
    return facts, f"failed: {lines[-1].strip()}"


def _child(module: str, report: str) -> None:
    def emit(facts: dict[str, Any]) -> None:
        # A library's own unfinished line of output may stand before it.
        print(f"\n{_MARK}{json.dumps(facts)}", flush=True)

    getattr(importlib.import_module(module), report)(emit)


def _text(output: bytes | str | None) -> str:
    return (
        output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    )

# SPDX-License-Identifier: Apache-2.0
"""Processes of benchmarks: none stays when its benchmark is ended."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _benchmarks import BENCHMARKS

from remote import Remote, RemoteError, close_all

# Holds something whose making takes long, and starts a process meanwhile.
BENCHMARK = """
import subprocess, sys, time
from remote import Remote

def make():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    remote = Remote(make, (), {}, 600.0)
    print(remote._process.pid, flush=True)
    remote.wait()
"""


def is_there(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # One that is dead and that nobody has waited for yet is none.
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_stays_behind_a_benchmark_that_is_ended(
    how: signal.Signals, tmp_path: Path
) -> None:
    script = tmp_path / "benchmark.py"
    script.write_text(BENCHMARK)
    benchmark = subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert benchmark.stdout is not None
    pids = [int(benchmark.stdout.readline()) for _ in range(2)]
    assert all(map(is_there, pids))
    benchmark.send_signal(how)
    benchmark.wait(30)
    until = time.monotonic() + 30
    while any(map(is_there, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    left = [pid for pid in pids if is_there(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_a_process_that_did_not_answer_in_time_is_gone() -> None:
    remote = Remote(time.sleep, (600.0,), {}, 0.0)
    with pytest.raises(RemoteError, match="no answer within 0 s"):
        remote.wait()
    assert not remote.is_there


class Nothing:
    def running(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def ready(self) -> None:
        pass


def test_no_process_waits_for_another_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    remotes = [Remote(Nothing, (), {}, 60.0) for _ in range(2)]
    for remote in remotes:
        remote.wait()
    close = Remote.close

    def close_last(self: Remote) -> None:
        until = time.monotonic() + 30
        while remotes[1].is_there and time.monotonic() < until:
            time.sleep(0.05)
        assert not remotes[1].is_there
        close(self)

    monkeypatch.setattr(Remote, "close", close_last)
    close_all(remotes)
    assert not any(remote.is_there for remote in remotes)

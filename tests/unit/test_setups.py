# SPDX-License-Identifier: Apache-2.0
"""What benchmarks start engines and servers with: names, variables, what rows say."""

import sys
import time
from pathlib import Path

import pytest
from _benchmarks import BENCHMARKS  # noqa: F401

from bench_serve import Server
from setups import THREADS, Setup, with_threads

SPAWN = "VLLM_WORKER_MULTIPROC_METHOD"


def test_rows_say_how_many_threads_pytorch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, arguments = Setup.of("stock-flash_attn:graph"), "--api-server-count 4"
    monkeypatch.delenv(THREADS, raising=False)
    assert with_threads(arguments) == arguments and with_threads("") == ""
    assert THREADS not in setup.variables([])
    monkeypatch.setenv(THREADS, "1")
    assert with_threads(arguments) == f"{THREADS}=1 {arguments}"
    assert with_threads("") == f"{THREADS}=1"
    assert f"{THREADS}=1 vllm serve" in setup.printed(["serve"])


@pytest.mark.parametrize("given", ["--mm-tensor-ipc torch_shm", "--a=torch_shm"])
def test_tensors_in_shared_memory_have_spawned_processes(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SPAWN, raising=False)
    setup = Setup.of("stock-flash_attn:graph")
    assert SPAWN not in setup.environment(["--mm-tensor-ipc", "direct_rpc"])
    assert f"{SPAWN}=spawn" in setup.printed(["serve", *given.split()])
    code = f"import os; print(os.environ['{SPAWN}'])"
    command = [sys.executable, "-c", code, *given.split()]
    log = tmp_path / "log"
    server = Server(setup, command, 1, log)
    with pytest.raises(RuntimeError, match="ended with 0"):
        server.wait(until=time.monotonic() + 120)
    assert log.read_text() == "spawn\n"


@pytest.mark.parametrize(
    "text", ["plugin", "plugin:fast", "stock-:graph", "other:eager"]
)
def test_an_unknown_setup_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PROVIDER:graph|use stock-<backend>"):
        Setup.of(text)

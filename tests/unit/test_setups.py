# SPDX-License-Identifier: Apache-2.0
"""What benchmarks start engines and servers with: names, variables, what rows say."""

import sys
import time
from pathlib import Path

import pytest
from _benchmarks import BENCHMARKS  # noqa: F401

import engines
from bench_serve import Server
from setups import NOTED, Setup, with_variables
from vllm_flashinfer_vit.machine.versions import ENV_V2_RUNNER

SPAWN = "VLLM_WORKER_MULTIPROC_METHOD"


@pytest.mark.parametrize("name", NOTED)
def test_rows_say_which_variables_they_are_of(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, arguments = Setup.of("stock-flash_attn:graph"), "--api-server-count 4"
    for one in NOTED:
        monkeypatch.delenv(one, raising=False)
    assert with_variables(arguments) == arguments and with_variables("") == ""
    assert name not in setup.variables([])
    monkeypatch.setenv(name, "1")
    assert with_variables(arguments) == f"{name}=1 {arguments}"
    assert with_variables("") == f"{name}=1"
    assert f"{name}=1 vllm serve" in setup.printed(["serve"])


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


@pytest.mark.parametrize(
    ("vllm", "mode", "runner"),
    [("0.25.1", "graph", "0"), ("0.25.1", "eager", None), ("0.28.0", "graph", None)],
)
def test_rows_with_graphs_are_of_a_runner_that_has_them(
    monkeypatch: pytest.MonkeyPatch, vllm: str, mode: str, runner: str | None
) -> None:
    monkeypatch.setattr(engines, "version", lambda _: vllm)
    monkeypatch.delenv(ENV_V2_RUNNER, raising=False)
    for provider in ("stock-flash_attn", "plugin"):
        variables = Setup.of(f"{provider}:{mode}").variables([])
        assert variables.get(ENV_V2_RUNNER) == runner

# SPDX-License-Identifier: Apache-2.0
"""The processes of the towers' benchmark: they build one tower after another."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _benchmarks import ENVIRONMENT

import block_stacks
import contenders
import model_names
import tower_bench
import tower_cases
import tower_worker
from failures import Failures
from known_stacks import STACKS
from remote import RemoteError


class Process:
    """A contender's process, which builds what `tower_worker.RemoteTower` would."""

    def __init__(self, contender, fails=()):
        self.contender, self.fails = contender, fails
        self.is_there = True
        self.built = []

    def begin(self, model, depth):
        if not self.is_there:
            raise RemoteError("its process ended with -9")
        self.built.append((model, depth))

    def wait(self):
        if self.built[-1][0] in self.fails:
            raise RemoteError("it cannot be built")
        return 72


def contender(provider):
    dtype = "fp32" if provider == contenders.REFERENCE else "bf16"
    stock = contenders.Contender.of("stock-torch_sdpa", dtype)
    return SimpleNamespace(provider=provider, blocks=stock.blocks)


def bench_of(failures):
    return tower_bench.Bench(None, ENVIRONMENT, failures, ["graph"], [], "bf16", 1.0)


def processes(**fails):
    names = (contenders.REFERENCE, "stock", "plugin")
    return [Process(contender(name), fails.get(name, ())) for name in names]


def test_each_process_builds_every_model(capsys):
    failures = Failures()
    remotes = processes(plugin=["A"])
    head_dim, ready = bench_of(failures).build(remotes, "A", 2)
    assert head_dim == 72
    assert ready == remotes[:2]
    assert bench_of(failures).build(remotes, "B", None) == (72, remotes)
    assert [remote.built for remote in remotes] == [[("A", 2), ("B", None)]] * 3
    assert "A plugin eager: RemoteError: it cannot be built" in capsys.readouterr().out


def test_nothing_is_timed_without_the_reference():
    remotes = processes(reference=["A"])
    assert bench_of(Failures()).build(remotes, "A", None)[1] == []
    assert bench_of(Failures()).build(remotes, "B", None)[1] == remotes


def test_a_process_that_is_gone_is_started_anew(monkeypatch):
    monkeypatch.setattr(tower_bench, "RemoteTower", Process)
    remotes = processes()
    gone = remotes[1]
    gone.is_there = False
    _, ready = bench_of(Failures()).build(remotes, "B", None)
    assert ready == remotes
    assert remotes[1] is not gone
    assert remotes[1].contender is gone.contender
    assert remotes[1].built == [("B", None)]


def test_a_worker_lets_go_of_a_tower_before_it_builds_the_next(monkeypatch):
    held = []

    class Tower:
        spec = SimpleNamespace(patch_dim=4)
        visual = SimpleNamespace(blocks=[])

        def __init__(self, model):
            self.model = model

        @contextmanager
        def running(self):
            held.append(self.model)
            yield
            held.remove(self.model)

        def attention_layers(self):
            return {"all": SimpleNamespace(head_size=64)}

    alive = []

    def build(model, depth, **how):
        alive.append([*held])
        return Tower(model)

    monkeypatch.setattr(tower_worker, "STACK_NAMES", {"A", "B"})
    monkeypatch.setattr(block_stacks, "build_stack", build)
    monkeypatch.setattr(tower_worker, "check_promises", lambda *given: None)
    worker = tower_worker.Worker(contenders.Contender.of("plugin", "bf16"))
    with worker.running():
        assert worker.build("A", None) == 64
        assert held == ["A"]
        worker._runs["graph"] = lambda: torch.ones(1)
        assert worker.build("B", None) == 64
        assert (held, worker._runs) == (["B"], {})
    assert alive == [[], []]
    assert held == []


@pytest.mark.parametrize("name", sorted(model_names.STACK_NAMES))
def test_a_tower_has_cases_that_it_takes(name):
    known = {**tower_cases.CASES, **tower_cases.DENSE_CASES, **tower_cases.AUDIO_CASES}
    stack = STACKS.get(name)
    cases = model_names.cases_of(name)
    assert cases
    for case in cases:
        sizes = {(h, w) for _, h, w in known[case]}
        if stack is None or stack.shape == "BSC":
            assert len(sizes) == 1
        if stack is not None:
            assert all(stack.fits(h, w) for h, w in sizes)


def test_a_whole_tower_has_every_case():
    assert model_names.cases_of("Qwen/Qwen3-VL-8B-Instruct") == (*tower_cases.CASES,)


@pytest.mark.parametrize("script", ["bench_encoder", "bench_host"])
def test_what_starts_them_does_without_vllm(script):
    """It would import vLLM for half a minute before theirs began to."""
    code = f"import sys, {script}; sys.exit('vllm' in sys.modules)"
    folder = Path(tower_bench.__file__).parent
    assert not subprocess.run([sys.executable, "-c", code], cwd=folder).returncode

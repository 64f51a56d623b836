# SPDX-License-Identifier: Apache-2.0
"""What measure.py begins when, and what it says of steps that fail or take too long."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from _benchmarks import BENCHMARKS, ENVIRONMENT

import measure
from measure import PLAN, Runner, Step, read_plan

assert Path(measure.__file__).parent == BENCHMARKS

# Writes when it began and ended, its GPUs and its cores, and ends with a status. It may
# wait until another one has begun.
SCRIPT = """
import json, os, sys, time
name, seconds, status = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
begun = time.monotonic()
open(name + ".begun", "w").close()
time.sleep(seconds)
while sys.argv[4:] and not os.path.exists(sys.argv[4] + ".begun"):
    time.sleep(0.05)
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
said = [begun, time.monotonic(), gpus, sorted(os.sched_getaffinity(0))]
open(name, "w").write(json.dumps(said))
sys.exit(status)
"""

# Starts itself as a server in a session of its own, which takes its time to end, as it
# does itself.
SERVER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] != "server":
    server = [sys.executable, __file__, "server"]
    started = subprocess.Popen(server, start_new_session=True)
    open(sys.argv[1], "w").write(str(started.pid))
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(measure, "_POLL_S", 0.02)
    return tmp_path


def step(folder, name, *, seconds=0.0, status=0, beside=None, **others):
    command = f"python {folder / 'script.py'} {folder / name} {seconds} {status}"
    if beside is not None:
        command += f" {folder / beside}"
    return Step(name, "A question?", command, **{"minutes": 1.0, **others})


def run(folder, steps, *, gpus=("0",), seconds=100.0, **measured):
    environment = replace(ENVIRONMENT, **measured)
    until = time.monotonic() + seconds
    runner = Runner(gpus, folder, environment, folder / "logs", until)
    outcomes = runner.run(steps)
    for name, outcome in outcomes.items():
        assert outcome.failed == outcome.text.startswith(("ended with", "stopped"))
        assert name in {one.name for one in steps}
    return {name: outcome.text for name, outcome in outcomes.items()}


def said(folder, name):
    return json.loads((folder / name).read_text())


def overlap(folder, first, second):
    begun, ended = said(folder, first)[:2]
    other_begun, other_ended = said(folder, second)[:2]
    return begun < other_ended and other_begun < ended


def test_steps_share_gpus_and_cores_among_them(folder):
    # Alone, each would wait until it is stopped.
    steps = [step(folder, "a", beside="b"), step(folder, "b", beside="a")]
    outcomes = run(folder, steps, gpus=("0", "3"))
    assert all(outcome.startswith("ended well") for outcome in outcomes.values())
    assert overlap(folder, "a", "b")
    assert {said(folder, name)[2] for name in "ab"} == {"0", "3"}
    cores = [set(said(folder, name)[3]) for name in "ab"]
    assert cores[0] and cores[1] and not cores[0] & cores[1]


def test_one_gpu_runs_one_step_at_a_time(folder):
    run(folder, [step(folder, name, seconds=0.1) for name in "ab"])
    assert not overlap(folder, "a", "b")
    assert said(folder, "a")[1] <= said(folder, "b")[0]


def test_a_step_that_times_the_host_runs_alone(folder):
    steps = [step(folder, "a", seconds=0.3), step(folder, "b", quiet=True)]
    steps.append(step(folder, "c"))
    run(folder, steps, gpus=("0", "1"))
    assert said(folder, "a")[1] <= said(folder, "b")[0]
    assert said(folder, "b")[1] <= said(folder, "c")[0]
    assert len(said(folder, "b")[3]) == len(measure.os.sched_getaffinity(0))


def test_a_step_gets_the_gpus_that_it_needs(folder):
    outcomes = run(
        folder,
        [step(folder, "a", gpus=2), step(folder, "b", gpus=3)],
        gpus=("0", "1"),
    )
    assert said(folder, "a")[2] == "0,1"
    assert outcomes["b"] == "needs 3 GPUs"
    assert not (folder / "b").exists()


def test_a_step_whose_time_does_not_fit_is_not_begun(folder):
    outcomes = run(
        folder, [step(folder, "a", minutes=2), step(folder, "b")], seconds=90
    )
    assert outcomes["a"] == "its time did not fit"
    assert outcomes["b"].startswith("ended well")
    assert not (folder / "a").exists()


def test_a_step_that_fails_or_takes_too_long_is_said(folder):
    steps = [step(folder, "a", status=3), step(folder, "b", seconds=60, minutes=0.01)]
    outcomes = run(folder, steps)
    assert outcomes["a"].startswith("ended with 3")
    assert outcomes["b"] == "stopped after 0.01 minutes"
    assert not (folder / "b").exists()


def test_what_ended_well_with_this_commit_is_not_run_again(folder):
    steps = [step(folder, "a"), step(folder, "b", status=1)]
    run(folder, steps)
    (folder / "a").unlink()
    outcomes = run(folder, steps)
    assert outcomes["a"] == "had ended well with abc1234"
    assert outcomes["b"].startswith("ended with 1")
    assert not (folder / "a").exists()
    assert run(folder, steps, commit="def5678")["a"].startswith("ended well")


def test_what_ended_well_with_another_stack_is_run(folder):
    steps = [step(folder, "a")]
    run(folder, steps)
    for other in ({"vllm": "0.0.1"}, {"quack": "0.0.1"}, {"gpu": "NVIDIA H100"}):
        assert run(folder, steps, **other)["a"].startswith("ended well")
    # Nor is any of them forgotten.
    assert run(folder, steps)["a"].startswith("had ended well")


def test_a_step_that_takes_too_long_leaves_no_server(folder, monkeypatch):
    monkeypatch.setattr("server_process.STOP_TIMEOUT_S", 1.0)
    server = folder / "server.py"
    server.write_text(SERVER)
    command = f"python {server} {folder / 'pid'}"
    slow = Step("a", "A question?", command, minutes=0.05)
    assert run(folder, [slow])["a"].startswith("stopped after")
    pid = int((folder / "pid").read_text())
    until = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_with_changes_in_the_tree_all_runs_again(folder):
    for _ in range(2):
        outcomes = run(folder, [step(folder, "a")], commit="abc1234+dirty")
        assert outcomes["a"].startswith("ended well")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name = 'a'\nanswers = ''\ncommand = 'rm -r x'\nminutes = 1", "runs rm"),
        ("name = 'a'\ncommand = 'python x'\nminutes = 1", "answers"),
        ("name = 'a'\nanswers = ''\ncommand = 'python x'\nhours = 1", "hours"),
    ],
)
def test_a_wrong_plan_is_refused(tmp_path, text, problem):
    plan = tmp_path / "plan.toml"
    plan.write_text(f"[[step]]\n{text}\n")
    with pytest.raises(SystemExit, match=problem):
        read_plan(plan)


def test_only_takes_patterns_and_refuses_what_fits_nothing():
    assert {one.name for one in read_plan(PLAN, ["towers-*", "doctor"])} == {
        *("doctor", "towers-qwen2", "towers-qwen2.5", "towers-qwen3"),
    }
    with pytest.raises(SystemExit, match="no step is called so"):
        read_plan(PLAN, ["tower"])


def test_commands_run_by_this_python_and_know_where_rows_go(tmp_path):
    (quantized,) = read_plan(PLAN, ["quantized-qwen2"])
    words = quantized.words(tmp_path)
    assert words[0] == sys.executable
    assert words[-1] == f"{tmp_path}/encoder_quantized.csv"

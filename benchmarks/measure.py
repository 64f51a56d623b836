# SPDX-License-Identifier: Apache-2.0
"""Runs all measurements of a release of vLLM, or some of them, within a time.

`measurements.toml` lists the steps. Each has a GPU, or as many as it asks for, and its
share of the host's cores, to itself. A step is begun only if its time still fits. What
ended well is not run again with the same commit, versions and kind of GPU: a call goes
on where another ended.

    python benchmarks/measure.py --print                  # the steps; no GPU
    python benchmarks/measure.py --minutes 25
    python benchmarks/measure.py --only kernels 'towers-*' --minutes 10
"""

import argparse
import json
import os
import shlex
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from csv_log import results_path
from environment import ROOT, STACK_COLUMNS, Environment, gpus_to_use, is_clean
from server_process import GroupProcess, stop_as_by_ctrl_c
from vllm_flashinfer_vit.machine import files

PLAN = ROOT / "benchmarks" / "measurements.toml"
LOGS = ROOT / "out" / "measure"
# The first words of commands, for which the process's own Python stands.
_PROGRAMS = {
    "python": [sys.executable],
    "pytest": [sys.executable, "-m", "pytest"],
    "vllm-flashinfer-vit": [sys.executable, "-m", "vllm_flashinfer_vit.commands.cli"],
}
_POLL_S = 0.5


@dataclass(frozen=True)
class Step:
    """One measurement.

    Attributes:
        name: Its name in `--only` and of its log.
        answers: The question that it answers.
        command: As it is typed in the repository's folder.
        minutes: The longest that it may take; then it is stopped.
        gpus: How many it needs.
        quiet: Whether it times the host, and so nothing else may run meanwhile.
    """

    name: str
    answers: str
    command: str
    minutes: float
    gpus: int = 1
    quiet: bool = False

    def words(self, results: Path) -> list[str]:
        """Return the command for this process's own Python.

        Args:
            results: The folder for this GPU's rows.
        """
        program, *rest = shlex.split(self.command)
        return [*_PROGRAMS[program], *(word.format(results=results) for word in rest)]


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        text: In words.
        failed: Whether it was begun and did not end well.
    """

    text: str
    failed: bool = False


@dataclass
class _Running:
    step: Step
    process: GroupProcess
    gpus: list[str]
    cores: list[int]
    begun: float


def read_plan(path: Path, only: Sequence[str] = ()) -> list[Step]:
    """Read the steps of a plan.

    Args:
        path: The TOML file, with one `[[step]]` each.
        only: Names, or patterns as of a shell; none for all steps.

    Raises:
        SystemExit: Two steps have one name, a step has an entry that none has or a
            program that is not known, or a pattern fits none.
    """
    try:
        steps = [Step(**entry) for entry in tomllib.loads(path.read_text())["step"]]
    except TypeError as error:
        raise SystemExit(f"{path}: {error}") from None
    names = [step.name for step in steps]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SystemExit(f"{path}: several steps are called {', '.join(sorted(twice))}")
    for step in steps:
        if (program := shlex.split(step.command)[0]) not in _PROGRAMS:
            raise SystemExit(f"{path}: {step.name} runs {program}, which is not known")
    for pattern in only:
        if not any(fnmatch(name, pattern) for name in names):
            raise SystemExit(f"--only {pattern}: no step is called so, see --print")
    return [
        step
        for step in steps
        if not only or any(fnmatch(step.name, pattern) for pattern in only)
    ]


class Runner:
    """Runs steps beside each other, as many as the GPUs allow."""

    def __init__(
        self,
        gpus: Sequence[str],
        results: Path,
        environment: Environment,
        logs: Path,
        until: float,
    ) -> None:
        """Run nothing yet.

        Args:
            gpus: Their names in CUDA_VISIBLE_DEVICES, at least one.
            results: The folder for this GPU's rows.
            environment: What is measured.
            logs: Folder for what the steps print, and for what has ended well.
            until: When all ends, by `time.monotonic`.
        """
        self._gpus = list(gpus)
        self._all_gpus = len(self._gpus)
        self._cores = sorted(os.sched_getaffinity(0))
        self._cores_of_a_gpu = len(self._cores) // self._all_gpus
        self._results = results
        self._logs = logs
        self._until = until
        self._running: list[_Running] = []
        self._done = logs / "done.json"
        self._commit = environment.commit
        # What a step that ended well has measured.
        stack = (f"{name} {getattr(environment, name)}" for name in STACK_COLUMNS)
        self._measured = ", ".join([self._commit, *stack])
        logs.mkdir(parents=True, exist_ok=True)

    def run(self, steps: Sequence[Step]) -> dict[str, Outcome]:
        """Run them in their order, and return what became of each, by its name."""
        outcomes = {step.name: Outcome("its time did not fit") for step in steps}
        ended_well = self._ended_well()
        waiting = []
        for step in steps:
            if step.gpus > self._all_gpus:
                outcomes[step.name] = Outcome(f"needs {step.gpus} GPUs")
            elif step.command in ended_well:
                outcomes[step.name] = Outcome(f"had ended well with {self._commit}")
            else:
                waiting.append(step)
        try:
            while waiting or self._running:
                for step in list(self._next(waiting)):
                    waiting.remove(step)
                    self._begin(step)
                for running, outcome in self._ended():
                    outcomes[running.step.name] = outcome
                    print(f"{running.step.name}: {outcome.text}", flush=True)
                if not self._running and not any(map(self._fits, waiting)):
                    break
                time.sleep(_POLL_S)
        finally:
            # Only an interruption leaves any.
            for running in self._running:
                running.process.stop()
        return outcomes

    def _next(self, waiting: Sequence[Step]) -> Iterator[Step]:
        """Yield what can begin now; nothing overtakes a step that times the host."""
        if any(running.step.quiet for running in self._running):
            return
        free = len(self._gpus)
        busy = bool(self._running)
        for step in filter(self._fits, waiting):
            if step.quiet:
                if not busy:
                    yield step
                return
            if step.gpus <= free:
                free -= step.gpus
                busy = True
                yield step

    def _fits(self, step: Step) -> bool:
        return time.monotonic() + 60 * step.minutes <= self._until

    def _begin(self, step: Step) -> None:
        gpus = [self._gpus.pop(0) for _ in range(step.gpus)]
        count = self._cores_of_a_gpu * step.gpus
        cores = self._cores[:] if step.quiet else self._cores[:count]
        self._cores = [core for core in self._cores if core not in cores]
        listed = ",".join(map(str, cores))
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "PYTHONUNBUFFERED": "1",
        }
        process = GroupProcess(
            ["taskset", "-c", listed, *step.words(self._results)],
            self._logs / f"{step.name}.log",
            environment,
            ROOT,
        )
        now = time.monotonic()
        self._running.append(_Running(step, process, gpus, cores, now))
        left = (self._until - now) / 60
        print(f"{step.name}: begun, {left:.1f} minutes are left", flush=True)

    def _ended(self) -> Iterator[tuple[_Running, Outcome]]:
        """Yield what is over, and how it ended; stop what takes too long."""
        for running in list(self._running):
            seconds = time.monotonic() - running.begun
            status = running.process.wait_for_end(0)
            if status is None:
                if seconds < 60 * running.step.minutes:
                    continue
                minutes = f"{running.step.minutes:g} minutes"
                outcome = Outcome(f"stopped after {minutes}", failed=True)
            elif status == 0:
                outcome = Outcome(f"ended well after {seconds:.0f} s")
                self._note(running.step)
            else:
                text = f"ended with {status} after {seconds:.0f} s"
                outcome = Outcome(text, failed=True)
            # What it has started may still be there.
            running.process.stop()
            self._running.remove(running)
            self._gpus = sorted([*self._gpus, *running.gpus])
            self._cores = sorted([*self._cores, *running.cores])
            yield running, outcome

    def _ended_well(self) -> set[str]:
        """Return what ended well with this commit and stack; with changes nothing."""
        if not self._done.exists() or not is_clean(self._commit):
            return set()
        return set(json.loads(self._done.read_text()).get(self._measured, ()))

    def _note(self, step: Step) -> None:
        if is_clean(self._commit):
            noted = json.loads(self._done.read_text()) if self._done.exists() else {}
            noted[self._measured] = sorted({*self._ended_well(), step.command})
            files.write(self._done, json.dumps(noted, indent=1).encode())


def print_outcomes(outcomes: Mapping[str, Outcome]) -> None:
    """Print what became of each step, below each other."""
    width = max(map(len, outcomes), default=0)
    print()
    for name, outcome in outcomes.items():
        print(f"{name:<{width}}  {outcome.text}")


def main() -> None:
    """Run the steps that the command line names; end with 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=(), help="names or shell patterns")
    parser.add_argument("--minutes", type=float, default=600, help="for all of it")
    parser.add_argument("--gpus", type=int, help="how many to use; default all")
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder for the logs")
    parser.add_argument("--print", action="store_true", help="only print the steps")
    args = parser.parse_args()
    steps = read_plan(PLAN, args.only)
    if args.print:
        for step in steps:
            print(f"{step.name} ({step.minutes:g} minutes): {step.answers}")
            print(f"  {step.command}")
        return
    import torch

    gpus = gpus_to_use(torch.cuda.device_count() if args.gpus is None else args.gpus)
    if not gpus:
        raise SystemExit("no GPU here: only --print runs without one")
    stop_as_by_ctrl_c()
    environment = Environment.probe()
    results = results_path("", environment.gpu, None).parent
    until = time.monotonic() + 60 * args.minutes
    runner = Runner(gpus, results, environment, args.logs, until)
    outcomes = runner.run(steps)
    print_outcomes(outcomes)
    print(f"logs in {args.logs}")
    if any(outcome.failed for outcome in outcomes.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

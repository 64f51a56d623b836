# SPDX-License-Identifier: Apache-2.0
"""Commands in the pages, and of measurements.toml, are taken as they are written.

Those that need no GPU also run in CI: `make`'s in `.ci/run`, tables' when pages are
generated, smoke runs of benchmarks and the examples in tests of their own.
"""

import argparse
import re
import runpy
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest
import typer.main
from _benchmarks import BENCHMARKS
from _vllm_serve import serve_arguments
from packaging.version import Version

from measure import PLAN, read_plan
from page_commands import PAGES, commands, words
from vllm_flashinfer_vit.commands.cli import main as command

ROOT = BENCHMARKS.parent
# What a page of the log shows, not a command.
LOG_LINES = ("vllm-flashinfer-vit warmed up",)
# Nothing here can take them: they need Docker, or change the environment. `make
# package` installs the package, `make setup` all of it.
ELSEWHERE = ("docker", "pip", "uv")
# Options that the oldest vLLM lacks, as their pages say.
SINCE = {"--quantization online": "0.33.0"}

# Of the click that typer brings, or that it is installed with.
UsageError = typer.BadParameter.__bases__[0]


class Parsed(Exception):  # noqa: N818 - it is no error
    """A script has read its command line."""


def take_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*?[^\\])\n", makefile, re.MULTILINE | re.DOTALL)
    assert phony is not None
    targets = phony[1].replace("\\", " ").split()
    named = [word for word in words[1:] if "=" not in word]
    assert named and set(named) <= set(targets)
    for word in set(words[1:]) - set(named):
        assert re.search(rf"\b{word.partition('=')[0]}\b", makefile)


def take_own(words: list[str]) -> None:
    group = typer.main.get_command(command)
    name, *arguments = words[1:] or ["--version"]
    if name.startswith("--"):
        return
    sub = group.commands[name]  # type: ignore[attr-defined]
    # A command that a sentence names, without what it needs.
    if arguments:
        sub.make_context(name, arguments)


def take_python(words: list[str]) -> None:
    script = ROOT / words[1]
    assert script.is_file()
    if not re.search("argparse|draw_by_options", script.read_text()):
        assert len(words) == 2
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser, *given: object) -> None:
        parse(self, *given)  # type: ignore[call-overload]
        raise Parsed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", words[1:])
        # As for a script that is run: its neighbours can be imported.
        patched.syspath_prepend(script.parent)
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        with pytest.raises(Parsed):
            runpy.run_path(str(script), run_name="__main__")


def take_vllm(words: list[str]) -> None:
    # `vllm serve` in a sentence, and vLLM's other commands.
    if words[1] == "serve" and len(words) > 2:
        serve_arguments(words[2:])


def take_ci(words: list[str]) -> None:
    steps = re.search(r"^STEPS=\((.*)\)", (ROOT / ".ci" / "run").read_text(), re.M)
    assert steps is not None
    assert set(words[1:]) <= {*steps[1].split(), "STEP", "--list"}


def take_shell(words: list[str]) -> None:
    assert (ROOT / words[1]).is_file()


def take_pytest(words: list[str]) -> None:
    markers = (ROOT / "pyproject.toml").read_text()
    assert f'"{words[words.index("-m") + 1]}:' in markers


TAKE: dict[str, Callable[[list[str]], None]] = {
    "make": take_make,
    "vllm-flashinfer-vit": take_own,
    "python": take_python,
    "vllm": take_vllm,
    ".ci/run": take_ci,
    "sh": take_shell,
    "pytest": take_pytest,
}


def is_taken(line: str) -> bool:
    """Whether a program here can say if it would take a command."""
    program, *more = words(line)
    return program in TAKE and bool(more) and not line.startswith(LOG_LINES)


FOUND = [
    pytest.param(line, id=f"{page.relative_to(ROOT)}-{line[:60]}")
    for page in PAGES
    for line in commands(page, (*TAKE, *ELSEWHERE))
    if is_taken(line)
]


FOUND += [
    pytest.param(one.command, id=f"{PLAN.name}-{one.name}") for one in read_plan(PLAN)
]


def test_pages_have_commands() -> None:
    assert len(FOUND) > 100


@pytest.mark.parametrize("line", FOUND)
def test_a_command_is_taken(line: str) -> None:
    for option, vllm in SINCE.items():
        if option in line and Version(version("vllm")) < Version(vllm):
            pytest.skip(f"{option}: from vLLM {vllm} on")
    TAKE[words(line)[0]](words(line))


@pytest.mark.parametrize(
    "line",
    [
        "make encodes",
        "make test VLLMS=1",
        "vllm-flashinfer-vit encodes",
        "vllm-flashinfer-vit encode IMAGES --models X",
        "python benchmarks/table.py worst FILE",
        "python benchmarks/no_such.py",
        "vllm serve MODEL --mm-encoder-attn-backends FLASHINFER",
        ".ci/run newst",
        "sh examples/no_such.sh",
        "pytest -m gpus",
    ],
)
def test_a_command_with_a_mistake_is_found(line: str) -> None:
    with pytest.raises((AssertionError, KeyError, SystemExit, UsageError)):
        TAKE[words(line)[0]](words(line))

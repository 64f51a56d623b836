# SPDX-License-Identifier: Apache-2.0
"""How tests run command lines up to their work, and what they know of options."""

import contextlib
import re
import time
from collections.abc import Sequence
from types import ModuleType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints
from unittest import mock

import typer.main
from _fuzz import WORDS
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_flashinfer_vit.commands import calibrate, cli, doctor, encode, quiet, tune


class WorkError(RuntimeError):
    """A command came to its work, which no test here does."""


class Option(NamedTuple):
    """An option of a command, as its function is annotated."""

    name: str
    flag: str
    kind: type
    least: float | None
    is_repeatable: bool


def options_of(command: str) -> list[Option]:
    """Return a command's options; `--help` is none that it gets."""
    group = typer.main.get_command(cli.main)
    parameters = group.commands[command].params  # type: ignore[attr-defined]
    hints = get_type_hints(getattr(cli, command), include_extras=True)
    found = []
    for parameter in parameters:
        if not parameter.opts[0].startswith("--") or parameter.name not in hints:
            continue
        kind, info = get_args(hints[parameter.name])
        is_repeatable = get_origin(kind) is list
        if is_repeatable or isinstance(kind, UnionType):
            kind = get_args(kind)[0]
        name, flag = parameter.name, parameter.opts[0]
        found.append(Option(name, flag, kind, info.min, is_repeatable))
    return found


COMMANDS = {
    name: options_of(name) for name in ("encode", "calibrate", "doctor", "tune")
}
FLAGS = sorted({option.flag for options in COMMANDS.values() for option in options})
AT_ONCE = ((encode, "run"), (calibrate, "run"), (doctor, "examine"), (tune, "run"))
# What is first with a tower that is known, and then vLLM is imported.
AFTER_CHECKS = ((encode, "image_processor"), (calibrate, "image_processor"))


class Outcome(NamedTuple):
    """How a command line ended: `work` has what the work was given, or else is None."""

    work: Any
    status: int
    message: str


def run(
    words: Sequence[str], stops: Sequence[tuple[ModuleType, str]] = AT_ONCE
) -> Outcome:
    """Run a command line up to its work.

    It ends there, or with the exit of help, or of an error that has a message; and
    before five seconds of the CPU's time are over.
    """
    given = []

    def work(*args: Any) -> None:
        given.append(args[0])
        raise WorkError

    began = time.process_time()
    with contextlib.ExitStack() as stack:
        for module, name in (*stops, (quiet, "quiet_vllm"), (calibrate, "quiet_vllm")):
            stand_in = contextlib.nullcontext if name == "quiet_vllm" else work
            stack.enter_context(mock.patch.object(module, name, stand_in))
        # As wide as messages are long, and nothing of the command stays set.
        env = {"COLUMNS": "400", "VLLM_LOGGING_LEVEL": "WARNING"}
        result = CliRunner(env=env).invoke(cli.main, words)
    assert time.process_time() - began < 5
    if isinstance(result.exception, WorkError):
        return Outcome(given[0], 0, "")
    assert result.exception is None or isinstance(result.exception, SystemExit)
    # Typer colours what is printed in CI of GitHub.
    message = re.sub(r"\x1b\[[\d;]*m", "", result.stderr)
    assert result.exit_code in (0, 2)
    if result.exit_code == 2:
        assert message.strip() and not result.stdout
        assert "Traceback" not in message
    return Outcome(None, result.exit_code, message)


def letters(text: str) -> str:
    """Return what is left of a text in a box of lines, or in quotes."""
    printed = text.encode(errors="backslashreplace").decode()
    return "".join(re.findall(r"\w", printed))


def says(message: str, word: str) -> bool:
    """Whether a message has a word of the command line: as it was given or quoted, or
    with what cannot be printed quoted alone."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in word)
    said, *forms = (text.lower() for text in (message, word, repr(word)[1:-1], shown))
    if not letters(word):
        return any(text in said for text in forms)
    return any(letters(text) in letters(said) for text in forms)


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# What is left out may be a number for some releases of typer.
NO_NUMBERS = WORDS.filter(
    lambda text: number(text) is None and not any(map(str.isdigit, text))
)
BELOW_1 = st.sampled_from(["0", "0.99", "-1", "-inf", "nan"])

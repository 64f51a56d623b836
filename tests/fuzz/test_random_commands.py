# SPDX-License-Identifier: Apache-2.0
"""Any command line: a command that has what it needs, or status 2 and a message."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from _commands import BELOW_1, COMMANDS, FLAGS, NO_NUMBERS, Option, run, says
from _fuzz import LONG, WORDS, fuzz
from hypothesis import example, given
from hypothesis import strategies as st


def values(
    option: Option,
) -> tuple[st.SearchStrategy[str], st.SearchStrategy[str] | None]:
    """Return good values of an option, and bad ones, if there are such to a parser."""
    if option.kind is int:
        bad = st.sampled_from(["0", "-1", "1.5", "nan", "8" * 5000, "8" * 130_000])
        return st.integers(1, 10**30).map(str), bad | NO_NUMBERS
    if option.kind is float:
        least = -math.inf if option.least is None else option.least
        good = st.floats(min_value=least, allow_nan=False).map(repr)
        return good, NO_NUMBERS if option.least is None else NO_NUMBERS | BELOW_1
    return WORDS, None


class Line(NamedTuple):
    """A command line.

    Attributes:
        words: Its arguments.
        expected: What its command should get, by the attribute's name.
        bad: What an error may name: options that are wrong, and what is missing.
    """

    words: list[str]
    expected: Mapping[str, Any]
    bad: set[str]


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """Draw options with values that are good, bad or missing, and misspelt options."""
    command = draw(st.sampled_from(["encode", "calibrate", "doctor"]))
    options = COMMANDS[command]
    words = [command]
    expected: dict[str, Any] = {}
    bad = set()
    for option in draw(st.lists(st.sampled_from(options), max_size=6)):
        how = draw(st.sampled_from(["good", "good", "good", "good", "bad", "misspelt"]))
        if how == "misspelt":
            flag = option.flag[:-1] + draw(st.sampled_from(["", "q", "_"]))
            if flag not in FLAGS:
                words.append(flag)
                bad.add(flag)
        elif option.kind is bool:
            words.append(option.flag + ("=1" if how == "bad" else ""))
            if how == "bad":
                bad.add(option.flag)
            elif option.name != "as_json":
                expected[option.name] = True
        else:
            good, wrong = values(option)
            if how == "bad" and wrong is not None:
                value = draw(wrong)
                bad.add(option.flag)
            else:
                value = draw(good)
                # The last one counts, and the others are not looked at.
                bad.discard(option.flag)
                name = "backends" if option.name == "backend" else option.name
                if option.is_repeatable:
                    expected[name] = [*expected.get(name, ()), value]
                else:
                    expected[name] = option.kind(value)
            is_one = draw(st.booleans())
            words += [f"{option.flag}={value}"] if is_one else [option.flag, value]
    if command != "doctor":
        images = draw(st.lists(WORDS, max_size=3))
        words += ["--", *images]
        expected["images"] = [Path(image) for image in images]
        if not images:
            bad.add("argument 'images")
        if "" in images:
            bad.add("for 'images")
        if command == "calibrate" and "model" not in expected:
            bad.add("--model")
    return Line(words, expected, bad)


@given(line=lines())
@example(line=Line(["encode", "--depth=0", "--", "a.png"], {}, {"--depth"}))
@example(line=Line(["encode", "--max-pixels=0", "--", "a.png"], {}, {"--max-pixels"}))
@fuzz(250)
def test_a_command_gets_what_was_given_or_a_message_names_the_option(
    line: Line,
) -> None:
    """Good values arrive as they are, the last one of an option and all of one that can
    be repeated; of bad ones, misspelt options and what is missing, one is named."""
    outcome = run(line.words)
    if line.bad:
        assert outcome.status == 2
        # Some releases of typer write IMAGES.
        assert any(name in outcome.message.lower() for name in line.bad)
        return
    assert outcome.status == 0
    if line.words[0] != "doctor":
        given = vars(outcome.work)
        assert {name: given[name] for name in line.expected} == line.expected


ANYTHING = (
    st.sampled_from([*COMMANDS, *FLAGS, "--help", "--version", "--", "-", "-q", "="])
    | st.builds("{}={}".format, st.sampled_from(FLAGS), WORDS)
    | WORDS
)


@given(
    words=st.lists(ANYTHING, min_size=1, max_size=8)
    | st.builds(
        lambda name, rest: [name, *rest],
        st.sampled_from(list(COMMANDS)),
        st.lists(ANYTHING, max_size=8),
    )
)
@example(words=["tune", "--head-dims", LONG[0]])
@example(words=["--", "doctor"])
@fuzz(300)
def test_any_words_end_in_a_command_or_in_a_message_on_one_of_them(
    words: list[str],
) -> None:
    """No traceback; without an error only the work, the help and the version; an error
    names one of the words, or an option or argument that is missing."""
    outcome = run(words)
    if outcome.work is not None:
        # Options may end before the command.
        assert words[words[0] == "--"] in COMMANDS
    elif outcome.status == 0:
        assert {"--help", "--version"} & set(words)
    else:
        parts = [part for word in words for part in word.split("=", 1)]
        missing = ["argument 'images", "--model", "Missing command"]
        short = [word[:2] for word in words if word.startswith("-")]
        names = [*parts, *missing, *short]
        assert any(says(outcome.message, name) for name in names)

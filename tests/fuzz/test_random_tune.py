# SPDX-License-Identifier: Apache-2.0
"""Any options of `tune`: what is listed is measured, or an option is named."""

import math
import re
import shlex
from typing import Any

import pytest
from _commands import BELOW_1, NO_NUMBERS, number, run
from _fuzz import LONG, WORDS, fuzz
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_flashinfer_vit.choices.derive import TuneError
from vllm_flashinfer_vit.commands.tune_options import DTYPES, PARTS, Options

# A number of plain digits may have zeros before it.
HEAD_DIM_TEXTS = {f"{n:0{width}}" for n in range(8, 257, 8) for width in (1, 2, 3)}
SIDE_TEXTS = {f"{n:0{width}}" for n in range(16, 65537, 16) for width in range(1, 6)}
SIZES = st.builds("{}x{}".format, *[st.sampled_from(["16", "01152", "65536"])] * 2)
PARTLY_GOOD = {
    "--dtypes": st.sampled_from(list(DTYPES)),
    "--head-dims": st.sampled_from(["80", "72", "072", "8", "256"]),
    "--gemms": SIZES,
    "--only": st.sampled_from(PARTS),
    "--time-limit": st.floats(1).map(repr),
}
NEARLY = st.sampled_from(
    ["BF16", "84", "264", "0", "\uff18\uff10", "8" * 5000, "16x8", "16x16x16", "both"]
)


@st.composite
def tune_options(draw: st.DrawFn) -> dict[str, str]:
    """Draw values of `tune`'s options, lists among them, most of them good."""
    drawn = {}
    for flag in draw(st.sets(st.sampled_from(list(PARTLY_GOOD)))):
        good = PARTLY_GOOD[flag]
        is_good = draw(st.sampled_from([True, True, True, False]))
        wrong = NO_NUMBERS | BELOW_1 if flag == "--time-limit" else NEARLY | WORDS
        part = good if is_good else good | wrong
        longest = 1 if flag in ("--only", "--time-limit") else 4
        parts = draw(st.lists(part, min_size=1, max_size=longest))
        drawn[flag] = draw(st.sampled_from([",", ", ", ",\t", "\n,"])).join(parts)
    return drawn


def is_valid(flag: str, value: str) -> bool:
    """Whether `tune` should take a value of an option."""
    parts = [part.strip() for part in value.split(",")]
    if flag == "--dtypes":
        return set(parts) <= set(DTYPES)
    if flag == "--head-dims":
        return set(parts) <= HEAD_DIM_TEXTS
    if flag == "--gemms":
        pairs = [part.split("x") for part in parts]
        return all(len(pair) == 2 and set(pair) <= SIDE_TEXTS for pair in pairs)
    if flag == "--only":
        return value in PARTS
    seconds = number(value)
    return seconds is not None and seconds >= 1


def measured(options: Options) -> tuple[Any, ...]:
    return (
        *(options.combinations(), options.layers()),
        *(options.effort.lengths, options.effort.counts, options.effort.rows),
    )


@given(drawn=tune_options(), switches=st.sets(st.sampled_from(["--quick", "--add"])))
@example(drawn={"--head-dims": LONG[1]}, switches=set())
@example(drawn={"--head-dims": "\uff18\uff10"}, switches=set())
@example(drawn={"--head-dims": "80,080"}, switches=set())
@example(drawn={"--gemms": f"16x{LONG[0]}"}, switches=set())
@example(drawn={"--only": LONG[0]}, switches=set())
@example(drawn={"--dtypes": LONG[0]}, switches=set())
@example(drawn={"--head-dims": "80,\n72", "--gemms": "16x16,\t32x32"}, switches=set())
@fuzz(250)
def test_tune_measures_what_is_listed_or_a_short_line_names_the_option(
    drawn: dict[str, str], switches: set[str]
) -> None:
    """All options good: each dtype, head dim and layer once, and the command that a
    table notes measures the same. Otherwise one short line, however long the value,
    names an option that is bad, or two that leave each other nothing to do."""
    words = [f"{flag}={value}" for flag, value in drawn.items()]
    outcome = run(["tune", *words, *sorted(switches)])
    bad = {flag for flag, value in drawn.items() if not is_valid(flag, value)}
    if outcome.work is None:
        assert outcome.status == 2
        if (message := outcome.message).startswith("error: "):
            assert len(message) < 250 and message.count("\n") == 1
        if not re.search("leave out --|needs bf16 or fp16 in --dtypes", message):
            assert any(
                f"{flag} has" in message or f"'{flag}'" in message for flag in bad
            )
        return
    assert not bad
    options = outcome.work
    for found in (options.combinations(), options.layers()):
        assert len(set(found)) == len(found)
    if "--head-dims" in drawn:
        dims = dict.fromkeys(map(int, drawn["--head-dims"].split(",")))
        found = dict.fromkeys(dim for _, dim in options.combinations())
        assert list(found) == list(dims)
    _, *again = shlex.split(options.command())
    same = run(again).work
    assert measured(same) == measured(options)
    assert same.command() == options.command()


def test_a_time_limit_that_is_no_number_is_named() -> None:
    """Also where typer lets it pass, as older releases do: no time is after it."""
    with pytest.raises(TuneError, match="^--time-limit has nan: "):
        Options(time_limit_s=math.nan).check()

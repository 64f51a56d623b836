# SPDX-License-Identifier: Apache-2.0
"""Any environment: valid settings, or an error and a report that name what is wrong."""

import io
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from _fuzz import LONG, WORDS, fuzz
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from vllm_flashinfer_vit.blocks.spec import OPTIMISATIONS
from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.commands.doctor import ENTRY_POINT, ENV_PLUGINS, diagnose
from vllm_flashinfer_vit.commands.doctor_text import render
from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.machine.stack import Gpu, Stack
from vllm_flashinfer_vit.settings import (
    ENV_DISABLE_PATCHES,
    ENV_TUNED_DIR,
    PREFIX,
    SCALE_METHODS,
    VARIABLES,
    Settings,
    Variable,
    bad_values,
    unknown_variables,
)

NAMES = [variable.name for variable in VARIABLES]
PATCH = {"name": "qwen9-fused", "state": "not applied"}
# With the kernels that a GPU may need, so that no other problem comes up.
STACK = Stack(
    python="3.12.1",
    vllm="0.33.0",
    torch="2.9",
    triton="3.6.0",
    flashinfer="0.9",
    cudnn_frontend="1.28.0",
    cudnn_backend=92400,
    flash_attn=(2, 3, 4),
    gpus=(Gpu("NVIDIA H200", (9, 0), 2**37),),
    inspected=True,
)


@st.composite
def near(draw: st.DrawFn) -> tuple[str, str]:
    """Draw a variable's name, and what a slip of a finger makes of it."""
    name = draw(st.sampled_from(NAMES))
    rest = name.removeprefix(PREFIX)
    at = draw(st.integers(0, len(rest) - 1))
    before, letter, after = rest[:at], rest[at], rest[at + 1 :]
    other = draw(st.sampled_from("AEX_-0"))
    slips = [before + after, before + letter * 2 + after, before + other + after]
    slipped = PREFIX + draw(st.sampled_from(slips))
    slipped = draw(st.sampled_from([slipped, slipped.lower(), name.lower()]))
    return name, slipped


NAMES_OF_PATCHES = st.lists(
    st.sampled_from([PATCH["name"], *OPTIMISATIONS]) | WORDS, max_size=3
).map(",".join)
VALUES = (
    st.sampled_from(["auto", "0", "1", *KERNELS, *SCALE_METHODS, "~/tuned", "/tuned"])
    | NAMES_OF_PATCHES
    | WORDS
)
OTHERS = (
    near().map(lambda pair: pair[1])
    | st.sampled_from(["XDG_CONFIG_HOME", PREFIX, "VLLM_FLASHINFER_VI"])
    | WORDS.map(lambda word: PREFIX + word)
    | WORDS
)
# A name holds no "=" and has a letter at least.
ENVIRONMENTS = st.dictionaries(
    st.sampled_from(NAMES)
    | OTHERS.map(lambda name: name.replace("=", "")).filter(bool),
    VALUES,
    max_size=6,
)


def is_good(variable: Variable, text: str) -> bool:
    """Whether a text is one of the values that messages list."""
    if variable.values.endswith("comma-separated"):
        return True
    if variable.values == "the path of a folder":
        return text != ""
    return text in re.split(", | or ", variable.values.removeprefix("one of "))


@given(env=ENVIRONMENTS)
@example(env={ENV_TUNED_DIR: LONG[2]})
@fuzz(300)
def test_settings_are_those_that_are_listed_or_each_bad_one_is_named(
    env: dict[str, str],
) -> None:
    """What messages list as good is accepted and nothing else; one ValueError names all
    bad variables, as `bad_values` does; variables that are not set have defaults."""
    bad = [v for v in VARIABLES if v.name in env and not is_good(v, env[v.name])]
    problems = bad_values(env)
    assert [problem.what for problem in problems] == [
        f"{v.name}={env[v.name]!r}: use {v.values}" for v in bad
    ]
    assert [problem.remedy for problem in problems] == [f"unset {v.name}" for v in bad]
    assert all(problem.fatal for problem in problems)
    try:
        settings = Settings.from_env(env)
    except ValueError as error:
        assert bad
        assert str(error) == "; ".join(problem.what for problem in problems)
        return
    assert not bad
    unset = {name: text for name, text in env.items() if name not in NAMES}
    default = Settings.from_env(unset)
    for v in VARIABLES:
        if v.name not in env:
            assert getattr(settings, v.field) == getattr(default, v.field)


@given(env=ENVIRONMENTS)
@fuzz(200)
def test_settings_can_be_set_again_from_their_document(env: dict[str, str]) -> None:
    """Valid settings as JSON, each value in its variable, are the same settings."""
    try:
        settings = Settings.from_env(env)
    except ValueError:
        return
    document = json.loads(json.dumps(settings.to_json(), allow_nan=False))
    again = {}
    for v in VARIABLES:
        value = document[v.field]
        if isinstance(value, list):
            value = ",".join(value)
        again[v.name] = str(int(value)) if isinstance(value, bool) else value
    assert Settings.from_env(again) == settings


@given(env=ENVIRONMENTS)
@example(env={f"{PREFIX}STRICT\n": "1"})
@example(env={f"{PREFIX}FP8-SCALES": "block"})
@fuzz(300)
def test_what_has_the_prefix_and_is_no_variable_is_named(env: dict[str, str]) -> None:
    """Each such name once, in one line that can be printed, with names that exist and a
    command that a shell takes, if there is one; values are not shown."""
    names = sorted(
        name for name in env if name.upper().startswith(PREFIX) and name not in NAMES
    )
    problems = unknown_variables(env)
    assert len(problems) == len(names)
    for name, (what, remedy, fatal) in zip(names, problems, strict=True):
        assert what.isprintable() and not fatal
        shown, _, advice = what.rpartition(" has no effect: ")
        assert shown in (name, repr(name))
        assert any(known in advice for known in NAMES)
        # The name alone decides.
        assert unknown_variables({name: ""}) == [(what, remedy, fatal)]
        assert remedy in (None, f"unset {name}")
        assert (remedy is None) == bool(re.search("[^A-Za-z0-9_]", name))


@given(pair=near())
@fuzz(200)
def test_a_slip_of_a_finger_is_told_the_name_that_was_meant(
    pair: tuple[str, str],
) -> None:
    """One letter lost, doubled or replaced, or all of them small."""
    meant, name = pair
    if name in NAMES:
        return
    (problem,) = unknown_variables({name: "1"})
    assert problem.what.endswith(f"did you mean {meant}?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the process is, without tables of choices, which take long to read."""
    path, bundled = (tmp_path_factory.mktemp(name) for name in ("here", "bundled"))
    with (
        mock.patch.object(tuned, "BUNDLED", bundled),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(path)
        yield path


@given(
    env=ENVIRONMENTS,
    patches=st.none() | NAMES_OF_PATCHES,
    plugins=st.none() | WORDS | st.just(ENTRY_POINT),
)
@fuzz(60)
def test_the_doctor_lists_these_problems_and_no_others(
    folder: Path, env: dict[str, str], patches: str | None, plugins: str | None
) -> None:
    """Bad values, unknown variables, names of patches that do not exist and a list of
    plugins without this one, whatever else is wrong; in the text and the document, too.
    """
    more = {ENV_DISABLE_PATCHES: patches, ENV_PLUGINS: plugins}
    env = env | {name: text for name, text in more.items() if text is not None}
    plugins = env.get(ENV_PLUGINS)
    report = diagnose(STACK, {"active": True, "patches": [PATCH]}, None, env)
    expected = [*bad_values(env), *unknown_variables(env)]
    assert report.problems[: len(expected)] == tuple(expected)
    assert (report.settings is None) == bool(bad_values(env))
    left = list(report.problems[len(expected) :])
    if plugins is not None and ENTRY_POINT not in plugins.split(","):
        problem = left.pop(0)
        assert problem.what.startswith(f"{ENV_PLUGINS}={plugins!r} keeps vLLM from")
        assert problem.remedy is not None
        _, command = shlex.split(problem.remedy)
        assert ENTRY_POINT in command.removeprefix(f"{ENV_PLUGINS}=").split(",")
    named = {name.strip() for name in env.get(ENV_DISABLE_PATCHES, "").split(",")}
    for name in sorted(named - {"", PATCH["name"], *OPTIMISATIONS}):
        problem = left.pop(0)
        assert problem.what.startswith(f"{ENV_DISABLE_PATCHES} names {name!r}, which")
    # A kernel that is forced may not be one for this machine.
    assert all(problem.what.startswith("nothing serves ") for problem in left)
    assert report.ok == (not any(problem.fatal for problem in report.problems))
    json.dumps(report.to_json(), allow_nan=False)
    console = Console(file=io.StringIO(), width=300_000)
    render(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for problem in report.problems:
        assert re.sub(r"\s", "", problem.what) in re.sub(r"\s", "", text)
    assert list(folder.iterdir()) == []
    assert os.getcwd() == str(folder)

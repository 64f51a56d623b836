# SPDX-License-Identifier: Apache-2.0
"""How the tests of this folder draw: how often, and what a damaged file may hold.

They draw the same each time, so that a change is judged by itself; with `FUZZ=random`,
as each night, something else.
"""

import json
import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

INT32 = st.integers(-(2**31), 2**31 - 1)
# What an argument or a variable of the environment may hold: no NUL, and bytes that are
# no UTF-8. Linux takes 128 KiB of each.
LONG = ["8" * 5000, "8" * 130_000, "~" + "x" * 5000, "[/red]" * 1000]
WORDS = (
    st.text(max_size=12).map(lambda text: text.replace("\0", ""))
    | st.binary(max_size=8).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"")))
    | st.sampled_from(["", " ", "nan", "-1", "--", "\n", "\x1b[31m", "[/red]", *LONG])
)


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Return the settings of a test that draws so many examples."""
    return settings(
        max_examples=examples,
        derandomize=os.environ.get("FUZZ") != "random",
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )


# What JSON may hold where something else belongs: too large, too small, not finite.
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 10**400, 2**63, 1e-60, 1e300, 0.0, -0.0])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "\ud800", "nan", "1"])
)
GARBAGE = st.recursive(
    VALUES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


_JSON_BYTES = b'0123456789.eE-+"{}[],: '


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw a file that was cut off, or has one byte changed, lost or doubled."""
    at = draw(st.integers(0, len(content) - 1))
    before, byte, after = content[:at], content[at : at + 1], content[at + 1 :]
    new = bytes([draw(st.sampled_from(_JSON_BYTES) | st.integers(0, 255))])
    return before + draw(
        st.sampled_from([b"", after, new + after, byte + new + after, byte * 2 + after])
    )


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """Draw a document one entry of which, at any depth, is garbage, lost or new."""
    document = json.loads(json.dumps(document))
    parent, key = draw(st.sampled_from(list(_places(document))))
    how = draw(st.sampled_from(["garbage", "lost", "new"]))
    if how == "lost":
        del parent[key]
    elif how == "new" and isinstance(parent, dict):
        parent[draw(st.text(max_size=4))] = draw(GARBAGE)
    else:
        parent[key] = draw(GARBAGE)
    return document


def _places(document: Any) -> Any:
    entries = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in entries:
        yield document, key
        yield from _places(value)

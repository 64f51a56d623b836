# SPDX-License-Identifier: Apache-2.0
"""The canary's table: what fits, what is left out, what fails."""

import sys
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import canary  # noqa: E402

PATCHES = [
    {"name": "a-blocks", "state": "not applied"},
    {"name": "b-blocks", "state": "unavailable: patch b-blocks: it | differs"},
    {"name": "c-blocks", "state": "applied"},
    {"name": "d-blocks", "state": "not for this vLLM"},
]
OPTIMISATIONS = [
    {"name": "add_norm", "state": "enabled"},
    {"name": "gemma4_blocks", "state": "unavailable: it was not read"},
]
TESTS = """
<testsuites><testsuite>
  <testcase classname="tests.unit.test_a" name="test_passes"/>
  <testcase classname="tests.unit.test_a" name="test_prints">
    <system-out>a line</system-out>
  </testcase>
  <testcase classname="tests.unit.test_a" name="test_skips">
    <skipped message="needs a GPU"/>
  </testcase>
  <testcase classname="tests.unit.test_b" name="test_skips">
    <skipped message="needs a GPU"/>
  </testcase>
  <testcase classname="tests.unit.test_b" name="test_fails">
    <failure message="assert 1&#10;  == 2">traceback</failure>
  </testcase>
  <testcase classname="tests.unit.test_b" name="test_errs">
    <error message="no such fixture"/>
  </testcase>
</testsuite></testsuites>
"""


def test_one_table_tells_it_all() -> None:
    cases = ElementTree.fromstring(TESTS).iter("testcase")
    rows = [
        *canary.rows_of_doctor("patch", PATCHES),
        *canary.rows_of_doctor("optimisation", OPTIMISATIONS),
        *canary.rows_of_tests(cases),
    ]
    assert canary.table("0.34.0", rows).splitlines() == [
        "| vLLM 0.34.0 | state | why |",
        "|---|---|---|",
        "| patch: 2 | fit |  |",
        "| optimisation: 1 | fit |  |",
        "| 2 tests | fit |  |",
        "| patch b-blocks | left out | patch b-blocks: it / differs |",
        "| patch d-blocks | left out | not for this vLLM |",
        "| optimisation gemma4_blocks | left out | it was not read |",
        "| 2 tests | left out | needs a GPU |",
        "| tests.unit.test_b::test_fails | fails | assert 1 == 2 |",
        "| tests.unit.test_b::test_errs | fails | no such fixture |",
    ]

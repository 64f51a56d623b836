# SPDX-License-Identifier: Apache-2.0
"""What `doctor` and pytest say of a vLLM, and the canary's run of it."""

import sys
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import canary  # noqa: E402

REPORT = {
    "stack": {
        "python": "3.13.0",
        "vllm": "0.34.0",
        "torch": "2.15.0",
        "triton": "3.9.0",
        "flashinfer": "0.7.3",
        "quack": None,
        "flash_attn": [2, 3, 4],
        "cudnn_libraries": ["/home/someone/.venv/lib/libcudnn.so.9"],
    },
    "patches": [
        {"name": "a-blocks", "state": "not applied"},
        {"name": "b-blocks", "state": "unavailable: patch b-blocks: it | differs"},
        {"name": "c-blocks", "state": "applied"},
        {"name": "d-blocks", "state": "not for this vLLM"},
        {"name": "e-blocks", "state": "unavailable: no source /home/someone/e.py"},
    ],
    "optimisations": [
        {"name": "add_norm", "state": "enabled"},
        {"name": "gemma4_blocks", "state": "unavailable: it was not read"},
    ],
    "problems": [
        {"what": "a package is old", "remedy": None, "fatal": False},
        {"what": "vLLM does not import", "remedy": None, "fatal": True},
    ],
}
TESTS = """
<testsuites><testsuite hostname="a-host">
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
    <error message="no file '/home/someone/a folder/a.json'"/>
  </testcase>
</testsuite></testsuites>
"""
RUN = canary.Run.of(REPORT, ElementTree.fromstring(TESTS).iter("testcase"))

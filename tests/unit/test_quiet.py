# SPDX-License-Identifier: Apache-2.0
"""What a command lets through of other packages' logs."""

import subprocess
import sys

import pytest

pytest.importorskip("vllm")

# In a process of its own: the first import of a package may set its level.
CODE = """
import logging
from vllm_flashinfer_vit.commands.quiet import quiet_vllm

def passes(level):
    return logging.getLogger("transformers.models.a").isEnabledFor(level)

with quiet_vllm():
    from transformers.utils import logging as of_transformers
    of_transformers.get_logger("transformers.models.a")
    assert passes(logging.ERROR) and not passes(logging.WARNING)
assert passes(logging.WARNING)
"""


@pytest.mark.extended
def test_warnings_of_transformers_stay_out_and_come_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

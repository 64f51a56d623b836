# SPDX-License-Identifier: Apache-2.0
"""Kernels of blocks are assembled for GPUs that are not here."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest


@pytest.mark.extended
def test_they_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """The interpreter runs no PTX; the assembler at least reads it."""
    script = Path(__file__).with_name("compile_blocks.py")
    env = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = Counter(line.split()[0] for line in done.stdout.splitlines())
    # e4m3 begins with 8.9.
    assert lines == {
        **dict.fromkeys(("80", "86"), 18),
        **dict.fromkeys(("89", "90", "100", "120"), 38),
    }

# SPDX-License-Identifier: Apache-2.0
"""What needs no Triton runs without it."""

import subprocess
import sys
from pathlib import Path

import vllm_flashinfer_vit.kernels

FOLDER = Path(vllm_flashinfer_vit.kernels.__file__).parent


def test_references_need_no_triton() -> None:
    names = ["formats", "buckets", *(path.stem for path in FOLDER.glob("*_ref.py"))]
    assert "attention_ref" in names
    code = "import sys; sys.modules['triton'] = None\n" + "".join(
        f"import vllm_flashinfer_vit.kernels.{name}\n" for name in names
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

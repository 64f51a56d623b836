# SPDX-License-Identifier: Apache-2.0
"""What needs no Triton runs without it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vllm_flashinfer_vit.kernels
from vllm_flashinfer_vit.kernels.formats import qk_max

FOLDER = Path(vllm_flashinfer_vit.kernels.__file__).parent


def test_references_need_no_triton() -> None:
    names = ["formats", "buckets", *(path.stem for path in FOLDER.glob("*_ref.py"))]
    assert "attention_ref" in names
    code = "import sys; sys.modules['triton'] = None\n" + "".join(
        f"import vllm_flashinfer_vit.kernels.{name}\n" for name in names
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("head_dim", range(32, 129, 8))
def test_sums_of_the_largest_products_fit_fp16(head_dim: int) -> None:
    largest = qk_max(head_dim)
    assert torch.tensor(largest).to(torch.float8_e4m3fn).item() == largest
    most = torch.finfo(torch.float16).max
    assert largest**2 * head_dim <= most
    # What is quantised must not depend on which kernels take a head dim.
    assert largest == 28 or (largest + 2) ** 2 * head_dim > most

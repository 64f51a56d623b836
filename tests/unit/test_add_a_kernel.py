# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING's list "Add a kernel", followed with a toy: two files and one record.

A copy of the package gets them and nothing else, and a new process runs the toy.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "vllm_flashinfer_vit"

KERNEL = '''
"""A toy: every token attends to itself alone."""


def toy(q, k, v, cu_seqlens, max_seqlen, scale):
    """Return v, `[T, H, D]`."""
    return v.clone()
'''
RECORD = """
        Kernel(
            name="toy",
            summary="a toy",
            sequences="up to 7 tokens",
            entry="toy:toy",
            needs=Needs("torch", capability=None),
            max_len=7,
            is_reference=True,
        ),
"""
USE = """
import torch
from vllm_flashinfer_vit.choices.lookup import plan_of
from vllm_flashinfer_vit.choices.usable import usable_choices
from vllm_flashinfer_vit.kernels.toy_ref import toy_ref
from vllm_flashinfer_vit.machine.probe import probe
from vllm_flashinfer_vit.ops.attention import attention
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.ops.plan import Plan
from vllm_flashinfer_vit.settings import Settings

settings = Settings.from_env()
assert settings.kernel == "toy"
choices, refusals = usable_choices(probe(libraries=False), 8, "float32", settings.kernel)
plan = plan_of(choices)
# Not for sequences beyond its record's bound.
assert not refusals and plan.kernel_for(7) == "toy" and plan.kernel_for(8) != "toy"
q, k, v = (torch.randn(5, 2, 8) for _ in range(3))
offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
batch = Batch(q, k, v, cu_seqlens=offsets, max_seqlen=torch.tensor(3))
out = attention(batch, 1.0, plan)
assert torch.equal(out, toy_ref(q, k, v, offsets, 3, 1.0))
assert not torch.equal(out, attention(batch, 1.0, Plan.of("reference")))
"""


ASK = """
from vllm_flashinfer_vit.settings import Settings
Settings.from_env()
"""


@pytest.fixture(scope="module")
def with_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a package that the list was followed in."""
    source = tmp_path_factory.mktemp("toy")
    package = source / PACKAGE.name
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    kernels = package / "kernels"
    (kernels / "toy.py").write_text(KERNEL)
    (kernels / "toy_ref.py").write_text(KERNEL.replace("def toy", "def toy_ref"))
    catalog = kernels / "catalog.py"
    text = catalog.read_text()
    before = '\n        Kernel(\n            name="triton",'
    assert text.count(before) == 1
    catalog.write_text(text.replace(before, RECORD.rstrip() + before))
    return source


def run(source: Path, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(source), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_record_is_enough_for_settings_choice_and_op(with_toy: Path) -> None:
    run(with_toy, "-c", USE, VLLM_FLASHINFER_VIT_KERNEL="toy")


def test_a_record_is_enough_for_the_page_of_kernels(with_toy: Path) -> None:
    page = run(with_toy, "docs/generate.py", "kernels")
    assert "| `toy` | a toy | any | up to 7 tokens |" in page


def test_without_the_record_the_kernel_is_unknown() -> None:
    with pytest.raises(AssertionError, match="VLLM_FLASHINFER_VIT_KERNEL='toy'"):
        run(PACKAGE.parent, "-c", ASK, VLLM_FLASHINFER_VIT_KERNEL="toy")


def test_the_list_names_what_was_added() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    steps = text.partition("## Add a kernel")[2].partition("\n## ")[0]
    for step in ("kernels/NAME.py", "kernels/NAME_ref.py", "kernels/catalog.py"):
        assert f"`{step}`" in steps
    assert "tests/unit/test_add_a_kernel.py" in steps

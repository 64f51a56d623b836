# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING's list "Add a kernel", followed with a toy: two files and one record.

A copy of the package gets them and nothing else, and a new process runs the toy. What
else reads the records is asked in this process, whose catalog gets the record.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from _stacks import AMPERE, STACK

from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.derive import derive_classes
from vllm_flashinfer_vit.choices.lookup import plan_of
from vllm_flashinfer_vit.choices.measure import candidates
from vllm_flashinfer_vit.choices.table import Measurement
from vllm_flashinfer_vit.choices.trial import attempt
from vllm_flashinfer_vit.choices.usable import (
    kernel_verdict,
    serves_fp8,
    usable_choices,
)
from vllm_flashinfer_vit.commands.doctor import diagnose
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS, KERNELS, Kernel
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE, Needs
from vllm_flashinfer_vit.ops.attention import attention
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.ops.plan import Class

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
            needs=Needs("torch", dtypes=None, capability=None),
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
stack = probe(libraries=False)
choices, refusals = usable_choices(stack, 8, "float32", settings.kernel)
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


# A process that imports vLLM; `TestWhoReadsTheRecord` asks the same in this one.
@pytest.mark.extended
def test_a_record_is_enough_for_settings_choice_and_op(with_toy: Path) -> None:
    run(with_toy, "-c", USE, VLLM_FLASHINFER_VIT_KERNEL="toy")


def test_a_record_is_enough_for_the_page_of_kernels(with_toy: Path) -> None:
    page = run(with_toy, "docs/generate.py", "kernels")
    assert "| `toy` | a toy | any | up to 7 tokens |" in page


def test_a_record_is_enough_for_the_setting(with_toy: Path) -> None:
    run(with_toy, "-c", ASK, VLLM_FLASHINFER_VIT_KERNEL="toy")


def test_without_the_record_the_kernel_is_unknown() -> None:
    with pytest.raises(AssertionError, match="VLLM_FLASHINFER_VIT_KERNEL='toy'"):
        run(PACKAGE.parent, "-c", ASK, VLLM_FLASHINFER_VIT_KERNEL="toy")


def test_the_list_names_what_was_added() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    steps = text.partition("## Add a kernel")[2].partition("\n## ")[0]
    for step in ("kernels/NAME.py", "kernels/NAME_ref.py", "kernels/catalog.py"):
        assert f"`{step}`" in steps
    assert "tests/unit/test_add_a_kernel.py" in steps


class TestWhoReadsTheRecord:
    """A kernel for GPUs, tried before a layer is promised to it, with a fallback."""

    SOURCE = ModuleType("vllm_flashinfer_vit.kernels.toy")

    @pytest.fixture(autouse=True)
    def records(self, monkeypatch: pytest.MonkeyPatch) -> None:
        toy = Kernel(
            name="toy",
            summary="a toy",
            sequences="up to 1024 tokens",
            entry="toy:toy",
            needs=Needs("triton", head_dims=(32, 64)),
            max_len=1024,
            fallback="triton",
            needs_trial=True,
        )
        toy_fp8 = Kernel(
            name="toy_fp8",
            summary="a toy in FP8",
            sequences="long",
            entry="toy:toy_fp8",
            needs=Needs("triton", dtypes=(FP8_DTYPE,), capability=(8, 9)),
            quantized="blocks",
            fallback="triton_fp8",
            needs_trial=True,
        )
        monkeypatch.setitem(KERNELS, "toy", toy)
        monkeypatch.setitem(KERNELS, "toy_fp8", toy_fp8)
        monkeypatch.setitem(sys.modules, self.SOURCE.__name__, self.SOURCE)

    def put(self, monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> Any:
        """Let the toy compute something; returns the longest lengths that it gets."""
        longest: list[int] = []

        def toy(*args: Any) -> Any:
            longest.append(args[4])
            return function(*args)

        # The op looks a function up once, so that this one asks for the newest.
        monkeypatch.setattr(self.SOURCE, "newest", toy, raising=False)
        self.SOURCE.toy = lambda *args: self.SOURCE.newest(*args)  # type: ignore
        return longest

    @pytest.fixture
    def tuned_dir(self, tmp_path: Path) -> Path:
        """A folder with a table that chooses the toys."""
        last = Class(None, "flash_attn")
        classes = {
            "bfloat16/64": (Class(512, "toy"), last),
            f"{FP8_DTYPE}/64": (Class(512, "toy"), Class(None, "toy_fp8")),
        }
        made_by = {"gpu": "NVIDIA H200", "vllm": "0.25.1"}
        table = tuned.Table(made_by, classes)
        tuned.write(table, tmp_path / tuned.file_name("NVIDIA H200"))
        return tmp_path

    def test_verdicts(self) -> None:
        assert kernel_verdict("toy", STACK, 64, "bfloat16").ok
        assert not kernel_verdict("toy", STACK, 72, "bfloat16").ok
        assert not kernel_verdict("toy", STACK, 64, "float32").ok
        assert kernel_verdict("toy_fp8", STACK, 72, FP8_DTYPE).ok

    def test_a_table_chooses_it_and_the_op_runs_it(
        self, tuned_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        choices, refusals = usable_choices(STACK, 64, "bfloat16", None, tuned_dir)
        assert not refusals
        plan = plan_of(choices)
        assert plan.text == "512:toy,*:flash_attn"
        longest = self.put(monkeypatch, lambda q, k, v, *args: v.clone())
        q, k, v = torch.randn(3, 5, 2, 64)
        batch = Batch(q, k, v, seq_len=5)
        assert torch.equal(attention(batch, 1.0, plan), v)
        assert longest == [5]

    def test_one_that_fails_gives_way_to_its_fallback(self, tuned_dir: Path) -> None:
        tried: list[str] = []

        def fail(kernel: str) -> str | None:
            tried.append(kernel)
            return "it is a toy" if kernel.startswith("toy") else None

        choices, refusals = usable_choices(
            STACK, 64, "bfloat16", None, tuned_dir, attempt=fail
        )
        assert plan_of(choices).text == "512:triton,*:flash_attn"
        assert refusals == {"toy": "toy: it is a toy"}
        choices, refusals = usable_choices(
            STACK, 64, "bfloat16", None, tuned_dir, fp8=True, attempt=fail
        )
        assert plan_of(choices).text == "512:triton,*:triton_fp8"
        assert serves_fp8(choices, refusals)
        assert tried == ["toy", "toy", "toy_fp8", "triton_fp8"]

    @pytest.mark.parametrize(
        ("factor", "answer"), [(1.0, None), (1.5, "a test run is wrong")]
    )
    def test_the_trial_runs_it_within_its_bound(
        self, factor: float, answer: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        longest = self.put(monkeypatch, lambda *args: attention_ref(*args) * factor)
        error = attempt("toy", 64, torch.bfloat16, "cpu")
        assert (error or "").startswith(answer or "")
        assert (error is None) == (answer is None)
        assert longest == [1024]

    @staticmethod
    def compared(*what: Any) -> list[str]:
        return candidates(*what, lambda *_: None)[0]

    def test_tune_compares_it(self) -> None:
        assert "toy" in self.compared(STACK, torch.bfloat16, 64)
        assert "toy" not in self.compared(STACK, torch.bfloat16, 80)
        found = self.compared(STACK, torch.float8_e4m3fn, 64)
        assert {"toy", "toy_fp8"} < set(found)
        ampere = replace(STACK, gpus=(AMPERE,))
        assert "toy" in self.compared(ampere, torch.bfloat16, 64)
        # It takes no sequence above its bound, however fast it is.
        rows = [
            Measurement("bfloat16", 64, length, 1, {"toy": 1.0, "flash_attn": 2.0})
            for length in (512, 1024)
        ]
        rows.append(Measurement("bfloat16", 64, 2048, 1, {"flash_attn": 2.0}))
        assert derive_classes(rows) == (Class(1024, "toy"), Class(None, "flash_attn"))

    def test_doctor_shows_it(self) -> None:
        report = diagnose(STACK, {"active": True, "patches": []}, None, {})
        rows = {
            (row["head_dim"], row["dtype"]): row["ok"]
            for row in report.kernels
            if row["kernel"] == "toy"
        }
        fits = [head_dim for head_dim in HEAD_DIMS if rows[head_dim, "bfloat16"]]
        assert fits == [head_dim for head_dim in HEAD_DIMS if head_dim <= 64]

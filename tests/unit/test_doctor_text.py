# SPDX-License-Identifier: Apache-2.0
"""The doctor's report for people."""

from dataclasses import replace

import pytest
from _doctor import NO_GPU, PATCH, judge, text_of
from _stacks import AMPERE, BLACKWELL, BLACKWELL_RTX, STACK, TURING

from vllm_flashinfer_vit.commands.doctor_text import OWN_STEPS
from vllm_flashinfer_vit.kernels.catalog import KERNELS, fp8_names
from vllm_flashinfer_vit.machine.stack import Stack
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES, ENV_TUNED_DIR


def test_the_text_says_when_blocks_run_as_vllms_own() -> None:
    assert OWN_STEPS in " ".join(text_of(judge(), width=80).split())


def test_the_text_names_versions_reasons_and_remedies() -> None:
    text = text_of(judge(replace(STACK, cudnn_backend=91001, torch_cudnn=91001)))
    for expected in (
        "NVIDIA H200, compute capability 9.0, 141 GiB",
        "580.65.06",
        "2.11.0 (CUDA 13.0)",
        "0.5.0",
        "/venv/nvidia/cudnn/lib/libcudnn.so.9",
        "need cuDNN 9.10.2; 9.10.1 is loaded",
        "FP8 on Hopper needs cuDNN 9.23.0; 9.10.1 is loaded",
        "qwen9-fused",
        "not nvidia-cudnn-cu13 9.19.0.56",
        "try: unset LD_LIBRARY_PATH",
    ):
        assert expected in text


def test_a_gpus_memory_may_not_be_known() -> None:
    gpu = BLACKWELL_RTX._replace(memory_bytes=None)
    text = text_of(judge(replace(STACK, gpus=(gpu,))))
    assert f"{gpu.name}, compute capability 12.0\n" in text


def test_the_text_of_an_empty_machine() -> None:
    report = judge(Stack(python="3.12.1"), {}, "failed: no vllm", {})
    text = text_of(report)
    assert not report.ok
    assert "vllm is not installed" in text
    # Without vLLM there is nothing to activate, so that is not reported as well.
    assert "activating the plugin" not in text


LONG = {
    ENV_TUNED_DIR: "/home/a/user/with/a/long/path/to/some/folder",
    ENV_DISABLE_PATCHES: "typo",
}
ROWS = [
    {**PATCH, "name": "qwen9-fused-rotary-and-more"},
    {**PATCH, "name": "b", "state": f"unavailable: patch b: {'takes q, ' * 20}"},
    {**PATCH, "name": "c", "state": "disabled"},
]
STACKS = [
    pytest.param(STACK, id="h200"),
    pytest.param(replace(STACK, gpus=(BLACKWELL,), flashinfer=None), id="b200"),
    pytest.param(replace(STACK, gpus=(TURING, AMPERE)), id="t4"),
    pytest.param(NO_GPU, id="no-gpu"),
    pytest.param(Stack(python="3.12.1"), id="empty"),
]
RUN = "Kernels that this machine can run"
REFUSED = "Kernels that it cannot run, by reason"
SERVE = "Which kernel serves FLASHINFER, by longest sequence in tokens"


def sections(stack: Stack, width: int) -> dict[str, list[str]]:
    """Return the lines of the text by their titles."""
    report = judge(stack, {"active": True, "patches": ROWS}, env=LONG)
    parts = text_of(report, width).split("\n\n")
    lines = (part.strip().splitlines() for part in parts)
    return {title: [line.rstrip() for line in rest] for title, *rest in lines}


class TestText:
    """The report for people: 80 columns, each reason once."""

    @pytest.mark.parametrize("stack", STACKS)
    def test_it_fits_80_columns_and_no_row_of_a_table_wraps(self, stack: Stack) -> None:
        narrow, wide = sections(stack, 80), sections(stack, 300)
        assert max(len(line) for rows in narrow.values() for line in rows) <= 80
        for title in ("Installed", RUN, SERVE):
            assert narrow[title] == wide[title]
        # The sentence below the patches takes two lines.
        assert narrow["Patches"][:3] == wide["Patches"][:3]
        assert len(narrow["Patches"]) == 5

    @pytest.mark.parametrize("stack", STACKS)
    def test_each_reason_stands_once(self, stack: Stack) -> None:
        told = [line[2:] for line in sections(stack, 500)[REFUSED] if line[0] == "-"]
        reasons = {
            row["reason"]
            for row in judge(stack).kernels
            if not row["ok"]
            and (row["kernel"] in fp8_names()) == (row["dtype"] == FP8_DTYPE)
        }
        assert {line.rpartition(": ")[0] for line in told} == reasons
        assert len(told) == len(reasons)

    def test_a_kernel_is_named_with_the_head_dims_that_a_reason_is_of(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernel = KERNELS["hopper_fp8"]
        narrow = replace(kernel, needs=replace(kernel.needs, head_dims=(32, 80)))
        monkeypatch.setitem(KERNELS, "hopper_fp8", narrow)
        reason = "it takes head dims of 32 to 80 that are multiples of 8"
        assert f"- {reason}: hopper_fp8 (96, 128)" in sections(STACK, 500)[REFUSED]

    def test_the_kernels_that_run_are_listed_by_dtype_and_head_dim(self) -> None:
        rows = [line.split("  ") for line in sections(STACK, 80)[RUN]]
        found = {row[0]: [c.strip() for c in row[1:] if c.strip()] for row in rows}
        assert found["hopper_fp8"] == ["float8_e4m3fn", "64, 72, 80, 96, 128"]
        assert found["triton"] == ["float16, bfloat16", "64, 72, 80, 96, 128"]
        assert found["reference"][0] == "float16, bfloat16, float32"
        assert "cudnn_fp8" not in found

    def test_one_reason_for_all_choices_needs_no_numbers(self) -> None:
        lines = sections(STACK, 80)[SERVE]
        assert lines[-1].startswith("fastest on NVIDIA H200, measured")
        assert "  up to 2048  triton" in lines
        lines = sections(NO_GPU, 80)[SERVE]
        assert "  any  reference (1)" in lines
        assert lines[-2].startswith("(1) no GPU")
        assert lines[-1].startswith("(2) no GPU")

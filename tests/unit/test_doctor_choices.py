# SPDX-License-Identifier: Apache-2.0
"""The doctor's choices of kernels: whose they are, and what is wrong with them."""

from dataclasses import replace
from pathlib import Path

import pytest
from _doctor import NO_GPU, judge, text_of
from _stacks import ADA, AMPERE, BLACKWELL, BLACKWELL_RTX, HOPPER, STACK

from vllm_flashinfer_vit.choices import lookup
from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.gemm_table import GemmClass
from vllm_flashinfer_vit.choices.lookup import Choice
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS, fp8_names
from vllm_flashinfer_vit.machine.stack import Gpu, Stack
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE
from vllm_flashinfer_vit.settings import (
    ENV_DISABLE_PATCHES,
    ENV_FP8_SCALES,
    ENV_FP8_SKIP_LAYERS,
    ENV_KERNEL,
    ENV_TUNED_DIR,
)

H20 = HOPPER._replace(name="NVIDIA H20")
H100 = HOPPER._replace(name="NVIDIA H100 80GB HBM3")


def test_a_kernel_that_is_dropped_from_the_table_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = (Choice("cudnn", 1024, "short"), Choice("flash_attn", None, "long"))
    monkeypatch.setattr(lookup, "choices_for", lambda *_: table)
    report = judge(replace(STACK, cudnn_backend=90800))
    assert report.ok
    assert any("need cuDNN 9.10.2; 9.8.0 is loaded" in note for note in report.notes)
    assert not any("multiples" in note for note in report.notes)


def test_one_kernel_serves_where_bits_must_not_depend_on_the_batch() -> None:
    stack = replace(STACK, vllm="0.30.0")
    report = judge(stack, env={"VLLM_BATCH_INVARIANT": "1"})
    found = {row["dtype"] == FP8_DTYPE: row["kernel"] for row in report.choices}
    assert found == {False: "triton", True: "hopper_fp8"}
    assert {row["max_len"] for row in report.choices} == {None}
    assert not any("here 0.30.0" in note for note in report.notes)
    assert any("here 0.30.0" in note for note in judge(stack, env={}).notes)


def test_the_users_choices_are_shown_with_their_origin(tmp_path: Path) -> None:
    table = tuned.Table(
        {"gpu": HOPPER.name, "vllm": "0.25.1"},
        {"bfloat16/80": (tuned.Class(None, "cudnn"),)},
    )
    tuned.write(table, tmp_path / tuned.file_name(HOPPER.name))
    text = text_of(judge(env={ENV_TUNED_DIR: str(tmp_path)}))
    assert "fastest on this machine, measured by tune with vLLM 0.25.1" in text
    assert str(tmp_path) in text


def test_choices_that_were_measured_with_other_versions_are_noted(
    tmp_path: Path,
) -> None:
    stack = replace(STACK, vllm="0.30.0", cudnn_backend=92400)
    versions = "vllm 0.25.1 (here 0.30.0), cudnn 9.19.0 (here 9.24.0)"

    def noted(stack: Stack, **env: str) -> list[str]:
        notes = judge(stack, env=env).notes
        return [note for note in notes if "other versions" in note]

    assert noted(STACK) == []
    (note,) = noted(stack)
    assert versions in note
    assert "For " not in note
    assert judge(stack).ok
    assert noted(stack, **{ENV_KERNEL: "flash_attn"}) == []
    # What was measured here is not, until FP8's choices are the package's again.
    made_by = {"gpu": HOPPER.name, **stack.versions}
    dtypes = ("bfloat16", "float16", FP8_DTYPE)
    names = [tuned.key(dtype, dim) for dtype in dtypes for dim in HEAD_DIMS]
    classes = dict.fromkeys(names, (tuned.Class(None, "cudnn"),))
    path = tmp_path / tuned.file_name(HOPPER.name)
    env = {ENV_TUNED_DIR: str(tmp_path)}
    tuned.write(tuned.Table(made_by, classes), path)
    assert noted(stack, **env) == []
    del classes[tuned.key(FP8_DTYPE, 80)]
    tuned.write(tuned.Table(made_by, classes), path)
    assert noted(stack, **env) == [f"{note} (For {FP8_DTYPE}/80.)"]


def noted(stack: Stack, env: dict[str, str]) -> list[str]:
    return [note for note in judge(stack, env=env).notes if "--quick" in note]


@pytest.mark.parametrize("stack", [STACK, replace(STACK, gpus=(H100,)), NO_GPU])
def test_a_gpu_that_was_measured_is_told_nothing(stack: Stack, tmp_path: Path) -> None:
    assert not noted(stack, {ENV_TUNED_DIR: str(tmp_path)})


@pytest.mark.parametrize("gpu", [AMPERE, ADA, BLACKWELL, BLACKWELL_RTX, H20])
def test_a_gpu_that_nobody_measured_is_told_how(gpu: Gpu, tmp_path: Path) -> None:
    stack = replace(STACK, gpus=(gpu,))
    env = {ENV_TUNED_DIR: str(tmp_path)}
    (note,) = noted(stack, env)
    assert note.startswith(f"Nobody measured these kernels on {gpu.name}. ")
    assert "`vllm-flashinfer-vit tune --quick`" in note
    assert not noted(stack, {**env, ENV_KERNEL: "flash_attn"})
    path = tmp_path / tuned.file_name(gpu.name)
    path.write_text("{")
    assert not noted(stack, env)
    made_by = {"gpu": gpu.name, "vllm": "0.25.1"}
    classes = {"bfloat16/80": (tuned.Class(None, "cudnn"),)}
    tuned.write(tuned.Table(made_by, classes), path)
    assert not noted(stack, env)


def test_what_serves_many_sequences_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (Choice("flash_attn_4", None, "fast", "flash_attn"),)
    monkeypatch.setattr(lookup, "choices_for", lambda *_: table)
    report = judge()
    assert "flash_attn_4, flash_attn below 512 rows" in text_of(report)
    assert report.summary.endswith(", by flash_attn_4 and flash_attn.")


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff", b"[" * 100_000, b"[]", None],
    ids=["torn", "binary", "deep", "list", "folder"],
)
def test_a_file_of_choices_that_is_refused_is_one_fatal_problem(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / tuned.file_name(HOPPER.name)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    report = judge(env={ENV_TUNED_DIR: str(tmp_path)})
    assert not report.ok
    (problem,) = report.problems
    assert str(path) in problem.what
    assert "tune` again" in problem.what


class TestGemms:
    @pytest.fixture
    def env(self, tmp_path: Path) -> dict[str, str]:
        few = (GemmClass(512, "cublaslt"), GemmClass(None, "cutlass"))
        entries = {
            "bfloat16/1152x3456/tensor": few,
            "bfloat16/1152x1152/tensor": few,
            "float16/1152x3456/rows": (GemmClass(None, "cutlass"),),
        }
        made_by = {"gpu": HOPPER.name, "vllm": "0.25.1", "torch": STACK.torch}
        table = tuned.Table(made_by, {}, gemms=entries)
        tuned.write(table, tmp_path / tuned.file_name(HOPPER.name))
        return {ENV_TUNED_DIR: str(tmp_path)}

    def test_what_was_measured_is_shown_with_its_origin(
        self, env: dict[str, str]
    ) -> None:
        report = judge(env=env)
        rows = [row for row in report.to_json()["gemms"] if row["inputs"] == 1152]
        reason = "fastest on this machine, measured by tune with vLLM 0.25.1"
        layer = {
            "dtype": "bfloat16",
            "inputs": 1152,
            "outputs": 3456,
            "scales": "tensor",
            "reason": reason,
        }
        assert rows[:2] == [
            {**layer, "max_rows": 512, "gemm": "cublaslt"},
            {**layer, "max_rows": None, "gemm": "cutlass"},
        ]
        text = text_of(report)
        (line,) = (line for line in text.splitlines() if "1152x3456, 1152x1152" in line)
        assert line.split(None, 2)[:2] == ["bfloat16", "tensor"]
        assert line.rstrip().endswith("cuBLASLt up to 512 rows, CUTLASS")
        assert "GEMMs of linear layers in FP8" in text
        assert "Layers of other sizes or scales run by CUTLASS." in text

    def test_where_nothing_was_measured_nothing_is_shown(self) -> None:
        report = judge(replace(STACK, gpus=(ADA,)))
        assert report.gemms == judge(NO_GPU).gemms == ()
        assert "GEMMs of linear layers" not in text_of(report)

    @pytest.mark.parametrize("name", ["fp8_gemm", "fp8_linear"])
    def test_nothing_is_shown_where_they_are_left_out(
        self, env: dict[str, str], name: str
    ) -> None:
        assert judge(env=env).gemms
        assert judge(env={**env, ENV_DISABLE_PATCHES: name}).gemms == ()

    def test_nothing_is_shown_of_a_damaged_file(
        self, env: dict[str, str], tmp_path: Path
    ) -> None:
        (tmp_path / tuned.file_name(HOPPER.name)).write_text("{")
        report = judge(env=env)
        assert report.gemms == () and len(report.problems) == 1


class TestFp8:
    def test_the_choices_of_fp8_layers_are_listed(self) -> None:
        rows = [row for row in judge().choices if row["dtype"] == FP8_DTYPE]
        assert {row["head_dim"] for row in rows} == set(HEAD_DIMS)
        assert "triton_fp8" in {row["kernel"] for row in rows}
        # The verdict is about FLASHINFER, with FP8 or without.
        assert "fp8" not in judge().summary

    def test_a_refusal_elsewhere_hides_no_head_dim(self) -> None:
        # By the H200's table FP8 pays nowhere at head dim 96 but where FlashAttention
        # would be faster.
        report = judge(replace(STACK, flash_attn=()))
        assert any("flash_attn" in note for note in report.notes)
        rows = [row for row in report.choices if row["dtype"] == FP8_DTYPE]
        assert {row["head_dim"] for row in rows} == set(HEAD_DIMS)
        kernels = {row["kernel"] for row in rows if row["head_dim"] == 96}
        assert "triton" in kernels and kernels & fp8_names() == {"triton_fp8"}

    def test_a_gpu_without_fp8_is_a_note(self) -> None:
        ampere = HOPPER._replace(name="NVIDIA A100", capability=(8, 0))
        report = judge(replace(STACK, gpus=(ampere,)))
        assert report.ok
        (note,) = (note for note in report.notes if "fp8" in note)
        assert "NVIDIA A100 has 8.0" in note

    def test_a_forced_fp8_kernel_is_for_engines_with_fp8(self) -> None:
        report = judge(env={ENV_KERNEL: "hopper_fp8"})
        assert report.ok
        rows = [row for row in report.choices if row["dtype"] == FP8_DTYPE]
        assert {row["head_dim"] for row in rows} == set(HEAD_DIMS)
        assert {row["kernel"] for row in rows} == {"hopper_fp8"}
        # Those of layers that stay in the model's dtype are not forced.
        others = [row for row in report.choices if row["dtype"] != FP8_DTYPE]
        assert others == [r for r in judge().choices if r["dtype"] != FP8_DTYPE]
        (note,) = (note for note in report.notes if ENV_KERNEL in note)
        assert "without --mm-encoder-attn-dtype fp8 stops" in note

    def test_one_that_cannot_run_leaves_nothing(self) -> None:
        report = judge(replace(STACK, gpus=(AMPERE,)), env={ENV_KERNEL: "triton_fp8"})
        (problem,) = (problem for problem in report.problems if problem.fatal)
        assert problem.remedy == f"unset {ENV_KERNEL}"
        (note,) = (note for note in report.notes if "error on this machine" in note)
        assert "NVIDIA A100 has 8.0" in note

    def test_with_another_kernel_forced_fp8_is_an_error(self) -> None:
        report = judge(env={ENV_KERNEL: "triton"})
        assert report.ok
        assert not any(row["dtype"] == FP8_DTYPE for row in report.choices)
        (note,) = (note for note in report.notes if ENV_KERNEL in note)
        assert "makes --mm-encoder-attn-dtype fp8 an error" in note

    def test_the_settings_are_shown(self) -> None:
        env = {ENV_FP8_SCALES: "dynamic", ENV_FP8_SKIP_LAYERS: "0,31"}
        report = judge(env=env)
        settings = report.to_json()["settings"]
        assert settings["fp8_scales"] == "dynamic"
        assert settings["fp8_skip_layers"] == ["0", "31"]
        assert ENV_FP8_SKIP_LAYERS in text_of(report)


def test_a_folder_of_choices_without_a_file_for_this_gpu_is_noted(
    tmp_path: Path,
) -> None:
    env = {ENV_TUNED_DIR: str(tmp_path)}
    (note,) = (note for note in judge(env=env).notes if ENV_TUNED_DIR in note)
    assert f"{tmp_path / 'h200.json'} does not exist" in note
    assert not any(ENV_TUNED_DIR in note for note in judge(env={}).notes)
    assert not any(ENV_TUNED_DIR in note for note in judge(NO_GPU, env=env).notes)

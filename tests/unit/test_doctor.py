# SPDX-License-Identifier: Apache-2.0
"""The doctor's judgement of made-up machines, its document, and this machine."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _stacks import ADA, AMPERE, BLACKWELL, BLACKWELL_RTX, HOPPER, STACK, TURING
from rich.console import Console

from vllm_flashinfer_vit.blocks.spec import OPTIMISATIONS
from vllm_flashinfer_vit.choices import lookup
from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.lookup import Choice
from vllm_flashinfer_vit.commands import doctor
from vllm_flashinfer_vit.commands.doctor import HEAD_DIMS, Report, diagnose
from vllm_flashinfer_vit.commands.doctor_text import OWN_STEPS, render
from vllm_flashinfer_vit.kernels.catalog import KERNELS, fp8_names
from vllm_flashinfer_vit.machine.problems import stack_problems
from vllm_flashinfer_vit.machine.stack import Gpu, Stack
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE
from vllm_flashinfer_vit.patches.fingerprints import left_out
from vllm_flashinfer_vit.settings import (
    ENV_DISABLE_PATCHES,
    ENV_FP8_SCALES,
    ENV_FP8_SKIP_LAYERS,
    ENV_KERNEL,
    ENV_STRICT,
    ENV_TUNED_DIR,
    Settings,
    unknown_variables,
)

PATCH = {
    "name": "qwen9-fused",
    "target": "vllm.model_executor.models.qwen9:Attention.forward",
    "why": "stock is slow",
    "remove_when": "stock is fast",
    "stands_for": ["vllm.model_executor.models.qwen9:Attention.forward"],
    "state": "not applied",
}
PLUGIN = {"active": True, "patches": [PATCH]}
NO_GPU = replace(STACK, gpus=(), driver=None)
H100 = HOPPER._replace(name="NVIDIA H100 80GB HBM3")


def judge(
    stack: Stack = STACK,
    plugin: Mapping[str, Any] = PLUGIN,
    plugin_error: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Report:
    stack = replace(stack, problems=tuple(stack_problems(stack)))
    return diagnose(stack, plugin, plugin_error, env or {})


def text_of(report: Report, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    render(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_sound_machine() -> None:
    report = judge()
    assert report.ok
    assert report.problems == ()
    assert {row["kernel"] for row in report.choices} <= set(KERNELS)
    assert "FLASHINFER can serve" in report.summary


def test_every_head_dim_and_dtype_is_served() -> None:
    served = {(row["head_dim"], row["dtype"]) for row in judge().choices}
    assert served == {
        (head_dim, dtype)
        for head_dim in (64, 72, 80, 96, 128)
        for dtype in ("float16", "bfloat16", FP8_DTYPE)
    }


def test_a_machine_without_a_gpu_is_served_by_the_reference_and_told_so() -> None:
    report = judge(NO_GPU)
    assert report.ok
    kernels = {row["kernel"] for row in report.choices}
    assert kernels == {"reference", "reference_fp8"}
    assert any(note.startswith("No GPU") for note in report.notes)


@pytest.mark.parametrize(
    ("stack", "what"),
    [
        pytest.param(replace(STACK, gpus=(TURING,)), "Tesla T4 has 7.5", id="sm75"),
        pytest.param(
            replace(STACK, vllm="0.21.0"), "vLLM 0.21.0 is installed", id="old-vllm"
        ),
        pytest.param(replace(NO_GPU, vllm=None), "vllm is not installed", id="no-vllm"),
        pytest.param(
            replace(NO_GPU, torch=None), "torch is not installed", id="no-torch"
        ),
    ],
)
def test_a_machine_that_cannot_serve(stack: Stack, what: str) -> None:
    report = judge(stack)
    assert not report.ok
    assert any(what in problem.what for problem in report.problems if problem.fatal)
    assert "cannot serve" in report.summary


def test_a_newer_vllm_is_served_with_a_note() -> None:
    report = judge(replace(STACK, vllm="0.34.0.dev7+gabc"))
    assert report.ok
    assert report.problems == ()
    (note,) = (note for note in report.notes if "newer than those" in note)
    assert "0.34.0.dev7+gabc" in note
    assert note in text_of(report)
    assert not any("newer than those" in note for note in judge().notes)


def test_a_forced_kernel_that_cannot_run_is_fatal() -> None:
    stack = replace(STACK, flashinfer=None)
    assert judge(stack, env={ENV_KERNEL: "flash_attn"}).ok
    report = judge(stack, env={ENV_KERNEL: "cudnn"})
    assert not report.ok
    (problem,) = (p for p in report.problems if p.fatal)
    assert problem.what.startswith(
        "nothing serves float16 and bfloat16 with head dims 64, 72, 80, 96, 128: "
        "cudnn: flashinfer-python is not installed"
    )


def test_a_kernel_that_is_dropped_from_the_table_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = (Choice("cudnn", 1024, "short"), Choice("flash_attn", None, "long"))
    monkeypatch.setattr(lookup, "choices_for", lambda *_: table)
    report = judge(replace(STACK, cudnn_backend=90800))
    assert report.ok
    assert any("need cuDNN 9.10.2; 9.8.0 is loaded" in note for note in report.notes)
    assert not any("multiples" in note for note in report.notes)


@pytest.mark.parametrize(
    ("env", "what", "remedy"),
    [
        pytest.param(
            {ENV_KERNEL: "fa9"},
            f"{ENV_KERNEL}='fa9': use one of auto",
            f"unset {ENV_KERNEL}",
            id="kernel",
        ),
        pytest.param(
            {ENV_STRICT: "yes"},
            f"{ENV_STRICT}='yes': use 0 or 1",
            f"unset {ENV_STRICT}",
            id="strict",
        ),
        pytest.param(
            {ENV_DISABLE_PATCHES: "qwen9-fused,typo"},
            "names 'typo', which is no patch or optimisation",
            "qwen9-fused",
            id="patch",
        ),
        pytest.param(
            {"VLLM_PLUGINS": "other"},
            "VLLM_PLUGINS='other' keeps vLLM from loading flashinfer_vit",
            "export VLLM_PLUGINS=other,flashinfer_vit",
            id="excluded",
        ),
        pytest.param(
            {"VLLM_PLUGINS": ""},
            "keeps vLLM from loading flashinfer_vit",
            "export VLLM_PLUGINS=flashinfer_vit",
            id="excluded-all",
        ),
    ],
)
def test_a_bad_environment_is_a_problem(
    env: dict[str, str], what: str, remedy: str
) -> None:
    report = judge(env=env)
    assert not report.ok
    (problem,) = report.problems
    assert what in problem.what
    assert problem.remedy is not None
    assert remedy in problem.remedy


def test_an_allowed_plugin_is_no_problem() -> None:
    assert judge(env={"VLLM_PLUGINS": "a,flashinfer_vit"}).problems == ()


def test_a_missing_entry_point_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "entry_points", lambda **query: ())
    report = judge()
    assert not report.ok
    assert report.entry_point is None
    assert "vLLM cannot see the plugin" in report.problems[0].what


def test_the_entry_point_of_this_package_is_found() -> None:
    assert judge().entry_point == "vllm_flashinfer_vit:register"


def test_a_disabled_patch_is_shown_as_its_state() -> None:
    row = {**PATCH, "state": "disabled"}
    report = judge(
        plugin={"active": True, "patches": [row]},
        env={ENV_DISABLE_PATCHES: "qwen9-fused"},
    )
    assert report.ok
    assert "disabled" in text_of(report)


def test_optimisations_are_listed_with_their_state() -> None:
    report = judge(env={ENV_DISABLE_PATCHES: "quack_mlp"})
    assert report.ok
    assert report.problems == ()
    states = {row["name"]: row["state"] for row in report.optimisations}
    assert states == {
        **dict.fromkeys(OPTIMISATIONS, "enabled"),
        "quack_mlp": "disabled",
    }
    lines = [line.strip() for line in text_of(report).splitlines()]
    for name, what in OPTIMISATIONS.items():
        shown = "disabled" if name == "quack_mlp" else what
        assert any(line.split(None, 1) == [name, shown] for line in lines), name


def test_the_text_says_when_blocks_run_as_vllms_own() -> None:
    assert OWN_STEPS in " ".join(text_of(judge(), width=80).split())


def test_a_patch_that_does_not_fit_is_reported_and_not_fatal() -> None:
    row = {**PATCH, "state": "unavailable: patch qwen9-fused: no such class"}
    report = judge(plugin={"active": True, "patches": [row]})
    assert report.ok
    (problem,) = report.problems
    assert problem.what == "patch qwen9-fused: no such class"


@pytest.mark.parametrize(
    ("stack", "name", "is_fatal"),
    [
        (STACK, "select-cuda", True),
        (STACK, "select-cpu", False),
        (NO_GPU, "select-cuda", False),
        (NO_GPU, "select-cpu", True),
    ],
)
def test_the_selection_of_this_machine_must_fit(
    stack: Stack, name: str, is_fatal: bool
) -> None:
    row = {**PATCH, "name": name, "state": f"unavailable: patch {name}: it differs"}
    report = judge(stack, plugin={"active": True, "patches": [row]})
    (problem,) = report.problems
    assert problem.what == f"patch {name}: it differs"
    assert problem.fatal is is_fatal


@pytest.mark.parametrize(
    ("plugin", "error", "what"),
    [
        ({}, "crashed with signal 11", "crashed with signal 11"),
        ({"active": False}, None, "its attention layer is not in place"),
    ],
)
def test_a_plugin_that_does_not_activate_is_fatal(
    plugin: dict[str, Any], error: str | None, what: str
) -> None:
    report = judge(plugin=plugin, plugin_error=error)
    assert not report.ok
    assert what in report.problems[0].what


@pytest.mark.parametrize(
    ("vllm", "noted"),
    [("0.25.1", True), ("0.33.0", False), ("0.21.0", False), ("unknown", False)],
)
def test_the_runner_is_noted_where_the_package_serves(vllm: str, noted: bool) -> None:
    report = judge(replace(STACK, vllm=vllm))
    assert any("cudagraph_mm_encoder" in note for note in report.notes) is noted


def test_the_document_has_a_stable_shape() -> None:
    env = {ENV_KERNEL: "flash_attn", ENV_TUNED_DIR: "/tuned"}
    report = judge(replace(STACK, flashinfer=None), env=env)
    document = json.loads(json.dumps(report.to_json()))
    assert {name: type(value).__name__ for name, value in document.items()} == {
        "schema": "str",
        "made_by": "dict",
        "ok": "bool",
        "summary": "str",
        "stack": "dict",
        "settings": "dict",
        "plugin": "dict",
        "kernels": "list",
        "choices": "list",
        "patches": "list",
        "optimisations": "list",
        "problems": "list",
        "notes": "list",
    }
    assert document["schema"] == "vllm-flashinfer-vit/doctor/2"
    assert set(document["made_by"]) == {"command", "version"}
    assert set(document["stack"]) == {
        "python",
        "vllm",
        "torch",
        "triton",
        "flashinfer",
        "cudnn_frontend",
        "quack",
        "cuda_bindings",
        "damaged_bindings",
        "cudnn_wheels",
        "cudnn_backend",
        "cudnn_libraries",
        "torch_cudnn",
        "torch_cuda",
        "flash_attn",
        "gpus",
        "driver",
        "pins",
        "import_errors",
    }
    assert set(document["stack"]["gpus"][0]) == {"name", "capability", "memory_bytes"}
    assert document["settings"] == {
        "kernel": "flash_attn",
        "strict": False,
        "disabled_patches": [],
        "tuned_dir": "/tuned",
        "fp8_scales": "auto",
        "fp8_skip_layers": [],
        "fix_graph_padding": False,
    }
    assert set(document["kernels"][0]) == {
        "kernel",
        "head_dim",
        "dtype",
        "ok",
        "reason",
        "remedy",
    }
    assert set(document["choices"][0]) == {
        "head_dim",
        "dtype",
        "kernel",
        "max_len",
        "reason",
        "many",
    }
    assert document["patches"] == [PATCH]
    assert set(document["optimisations"][0]) == {"name", "what", "state"}
    assert set(document["problems"][0]) == {"what", "remedy", "fatal"}


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
    stack = replace(STACK, vllm="0.33.0", cudnn_backend=92400)
    versions = "vllm 0.25.1 (here 0.33.0), cudnn 9.19.0 (here 9.24.0)"

    def noted(stack: Stack, **env: str) -> list[str]:
        notes = judge(stack, env=env).notes
        return [note for note in notes if "other versions" in note]

    assert noted(STACK) == []
    (note,) = noted(stack)
    assert versions in note
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
    assert noted(stack, **env) == [note]


@pytest.mark.parametrize("gpu", [AMPERE, ADA, BLACKWELL, BLACKWELL_RTX, H100])
def test_a_gpu_that_nobody_measured_is_told_how(gpu: Gpu, tmp_path: Path) -> None:
    stack = replace(STACK, gpus=(gpu,))
    env = {ENV_TUNED_DIR: str(tmp_path)}

    def noted(stack: Stack, env: dict[str, str]) -> list[str]:
        return [note for note in judge(stack, env=env).notes if "--quick" in note]

    (note,) = noted(stack, env)
    assert note.startswith(f"Nobody measured these kernels on {gpu.name}. ")
    assert "`vllm-flashinfer-vit tune --quick`" in note
    assert not noted(STACK, env)
    assert not noted(NO_GPU, env)
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


def test_the_document_covers_each_kernel_head_dim_and_dtype_once() -> None:
    rows = judge().to_json()["kernels"]
    keys = {(row["kernel"], row["head_dim"], row["dtype"]) for row in rows}
    assert len(keys) == len(rows) == len(KERNELS) * 5 * 4


def test_invalid_settings_are_null_in_the_document() -> None:
    assert judge(env={ENV_STRICT: "yes"}).to_json()["settings"] is None


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


def test_the_text_of_an_empty_machine() -> None:
    report = judge(Stack(python="3.12.1"), {}, "failed: no vllm", {})
    text = text_of(report)
    assert not report.ok
    assert "vllm is not installed" in text
    # Without vLLM there is nothing to activate, so that is not reported as well.
    assert "activating the plugin" not in text


def test_a_bad_setting_does_not_hide_the_state_of_the_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {}

    def run(report: str, *, module: str, env: Mapping[str, str]) -> tuple[Any, None]:
        seen.update(env)
        return PLUGIN, None

    monkeypatch.setattr(doctor, "run_isolated", run)
    monkeypatch.setattr(doctor, "probe", lambda isolated: STACK)
    env = {
        ENV_KERNEL: "fa9",
        ENV_FP8_SCALES: "static",
        ENV_TUNED_DIR: "",
        ENV_DISABLE_PATCHES: "qwen9-fused",
        "VLLM_FLASHINFER_VIT_KERNAL": "1",
        "HOME": "/home/me",
    }
    report = doctor.examine(Console(quiet=True), env)
    assert Settings.from_env(seen).disabled_patches == {"qwen9-fused"}
    assert unknown_variables(seen) == []
    assert seen["HOME"] == "/home/me"
    assert report.patches == (PATCH,)
    assert [problem.what.split("=")[0].split()[0] for problem in report.problems] == [
        ENV_KERNEL,
        ENV_TUNED_DIR,
        ENV_FP8_SCALES,
        "VLLM_FLASHINFER_VIT_KERNAL",
    ]


# Every process of the command leaves the names of the modules that it imported.
SITECUSTOMIZE = """
import atexit, os, pathlib, sys
path = pathlib.Path(os.environ["LOADED"], str(os.getpid()))
atexit.register(lambda: path.write_text(" ".join(sys.modules)))
"""


@pytest.mark.extended
def test_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    loaded = tmp_path / "loaded"
    loaded.mkdir()
    env = {
        **os.environ,
        "VLLM_PLUGINS": "flashinfer_vit",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "LOADED": str(loaded),
    }
    done = subprocess.run(
        [sys.executable, "-m", "vllm_flashinfer_vit.commands.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        env=env,
    )
    document = json.loads(done.stdout)
    assert done.returncode == (0 if document["ok"] else 1)
    assert document["ok"], document["problems"]
    assert document["stack"]["torch"] is not None
    assert "this can take half a minute" in " ".join(done.stderr.split())
    names = [row["name"] for row in document["patches"]]
    assert len(names) == len(set(names)) > 0
    states = {row["state"] for row in document["patches"]}
    elsewhere = {"not for this vLLM"} if left_out() else set()
    assert states == {"applied", "not applied"} | elsewhere
    if not document["stack"]["gpus"]:
        kernels = {row["kernel"] for row in document["choices"]}
        assert kernels == {"reference", "reference_fp8"}
    # Models and workers take seconds to import, and this process needs no torch.
    processes = [set(path.read_text().split()) for path in loaded.iterdir()]
    assert any("vllm.platforms" in modules for modules in processes)
    for modules in processes:
        assert "vllm.v1.worker.gpu_worker" not in modules
        assert not {m for m in modules if m.startswith("vllm.model_executor.models.q")}
    (command,) = (
        m for m in processes if "vllm_flashinfer_vit.commands.doctor_text" in m
    )
    assert not command & {"torch", "vllm", "flashinfer"}


def test_hopper_is_first_in_the_mixed_report() -> None:
    report = judge(replace(STACK, gpus=(HOPPER, TURING)))
    assert report.ok
    assert "this report is about the first" in report.problems[0].what


class TestFp8:
    def test_the_choices_of_fp8_layers_are_listed(self) -> None:
        rows = [row for row in judge().choices if row["dtype"] == FP8_DTYPE]
        assert {row["head_dim"] for row in rows} == set(HEAD_DIMS)
        assert "triton_fp8" in {row["kernel"] for row in rows}
        # The verdict is about FLASHINFER, with FP8 or without.
        assert "fp8" not in judge().summary

    def test_a_refusal_elsewhere_hides_no_head_dim(self) -> None:
        # By the H200's table FP8 pays nowhere at head dim 96.
        report = judge(replace(STACK, flash_attn=()))
        assert any("flash_attn" in note for note in report.notes)
        rows = [row for row in report.choices if row["dtype"] == FP8_DTYPE]
        assert {row["head_dim"] for row in rows} == set(HEAD_DIMS)
        kernels = {row["kernel"] for row in rows if row["head_dim"] == 96}
        assert "triton" in kernels and not kernels & fp8_names()

    def test_a_gpu_without_fp8_is_a_note(self) -> None:
        ampere = HOPPER._replace(name="NVIDIA A100", capability=(8, 0))
        report = judge(replace(STACK, gpus=(ampere,)))
        assert report.ok
        (note,) = (note for note in report.notes if "fp8" in note)
        assert "NVIDIA A100 has 8.0" in note

    def test_the_settings_are_shown(self) -> None:
        env = {ENV_FP8_SCALES: "dynamic", ENV_FP8_SKIP_LAYERS: "0,31"}
        report = judge(env=env)
        settings = report.to_json()["settings"]
        assert settings["fp8_scales"] == "dynamic"
        assert settings["fp8_skip_layers"] == ["0", "31"]
        assert ENV_FP8_SKIP_LAYERS in text_of(report)


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

    def test_a_kernel_is_named_with_the_head_dims_that_a_reason_is_of(self) -> None:
        reason = "it takes head dims of 32 to 80 that are multiples of 8"
        assert f"- {reason}: hopper_fp8 (96, 128)" in sections(STACK, 500)[REFUSED]

    def test_the_kernels_that_run_are_listed_by_dtype_and_head_dim(self) -> None:
        rows = [line.split("  ") for line in sections(STACK, 80)[RUN]]
        found = {row[0]: [c.strip() for c in row[1:] if c.strip()] for row in rows}
        assert found["hopper_fp8"] == ["float8_e4m3fn", "64, 72, 80"]
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


def test_an_unserved_gpu_is_one_problem_with_each_reason_once() -> None:
    (problem,) = judge(replace(STACK, gpus=(TURING,))).problems
    assert problem.what.startswith("nothing serves")
    assert problem.what.count("needs compute capability 8.0") == 1
    assert "triton_window, flash_attn: it needs" in problem.what


def test_all_bad_settings_are_shown_at_once() -> None:
    env = {ENV_KERNEL: "fa9", ENV_STRICT: "yes", "VLLM_FLASHINFER_VIT_KERNAL": "x"}
    report = judge(env=env)
    assert [problem.fatal for problem in report.problems] == [True, True, False]
    text = text_of(report)
    assert "VLLM_FLASHINFER_VIT_KERNEL='fa9': use one of" in text
    assert "VLLM_FLASHINFER_VIT_STRICT='yes': use 0 or 1" in text
    assert "VLLM_FLASHINFER_VIT_KERNAL has no effect" in text
    assert f"did you mean {ENV_KERNEL}?" in " ".join(text.split())
    assert "2 problems" in report.summary


def test_a_misspelt_patch_is_told_the_nearest_name() -> None:
    (problem,) = judge(env={ENV_DISABLE_PATCHES: "qwen9_fused"}).problems
    assert problem.remedy is not None
    assert "perhaps qwen9-fused was meant" in problem.remedy


def test_a_misspelt_optimisation_is_told_the_nearest_name() -> None:
    (problem,) = judge(env={ENV_DISABLE_PATCHES: "quack_mlps"}).problems
    assert problem.remedy is not None
    assert "perhaps quack_mlp was meant" in problem.remedy


def test_a_folder_of_choices_without_a_file_for_this_gpu_is_noted(
    tmp_path: Path,
) -> None:
    env = {ENV_TUNED_DIR: str(tmp_path)}
    (note,) = (note for note in judge(env=env).notes if ENV_TUNED_DIR in note)
    assert f"{tmp_path / 'h200.json'} does not exist" in note
    assert not any(ENV_TUNED_DIR in note for note in judge(env={}).notes)
    assert not any(ENV_TUNED_DIR in note for note in judge(NO_GPU, env=env).notes)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_takes_time_is_shown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
) -> None:
    monkeypatch.setattr(doctor, "run_isolated", lambda *_, **__: (PLUGIN, None))
    monkeypatch.setattr(doctor, "probe", lambda isolated: STACK)
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, color_system=None)
    doctor.examine(console, {})
    assert "cuDNN and FlashInfer" in file.getvalue()
    assert "vLLM with the plugin" in file.getvalue()
    assert ("half a" in file.getvalue()) is not is_terminal
    assert capsys.readouterr().out == ""

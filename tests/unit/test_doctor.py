# SPDX-License-Identifier: Apache-2.0
"""The doctor's judgement of made-up machines, its document, and this machine."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _doctor import NO_GPU, PATCH, PLUGIN, judge, text_of
from _stacks import HOPPER, STACK, TURING
from rich.console import Console

from vllm_flashinfer_vit.blocks.spec import OPTIMISATIONS
from vllm_flashinfer_vit.commands import doctor
from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.machine.stack import Stack
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE
from vllm_flashinfer_vit.models import gemma4
from vllm_flashinfer_vit.patches.fingerprints import left_out
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES, ENV_KERNEL, ENV_TUNED_DIR


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


def test_a_missing_entry_point_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "entry_points", lambda **query: ())
    report = judge()
    assert not report.ok
    assert report.entry_point is None
    problem = report.problems[0]
    assert "vLLM cannot see the plugin" in problem.what
    # As README's install, until an index has the package.
    assert problem.remedy == "in a clone: pip install --force-reinstall --no-deps ."


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


def test_an_optimisation_that_does_not_fit_the_libraries() -> None:
    unfit = {"gemma4_blocks": "of this Transformers"}
    report = judge(plugin={"active": True, "unfit": unfit})
    states = {row["name"]: row["state"] for row in report.optimisations}
    assert states.pop("gemma4_blocks") == "unavailable: of this Transformers"
    assert set(states.values()) == {"enabled"}
    assert "unavailable: of this Transformers" in text_of(report)


def test_a_transformers_that_was_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    if doctor._unfit_optimisations() != {}:
        pytest.skip("this Transformers was not read")
    monkeypatch.setattr(gemma4, "_READ", {"rotate_half": ("0",)})
    unfit = doctor._unfit_optimisations()
    assert unfit == {
        "gemma4_blocks": "rotate_half of this Transformers is not as it was read"
    }


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
        "gemms": "list",
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


def test_the_document_covers_each_kernel_head_dim_and_dtype_once() -> None:
    rows = judge().to_json()["kernels"]
    keys = {(row["kernel"], row["head_dim"], row["dtype"]) for row in rows}
    assert len(keys) == len(rows) == len(KERNELS) * 5 * 4


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


def test_an_unserved_gpu_is_one_problem_with_each_reason_once() -> None:
    (problem,) = judge(replace(STACK, gpus=(TURING,))).problems
    assert problem.what.startswith("nothing serves")
    assert problem.what.count("needs compute capability 8.0") == 1
    assert "triton_window, flash_attn: it needs" in problem.what


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_takes_time_is_shown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
) -> None:
    monkeypatch.setattr(doctor, "run_isolated", lambda *_, **__: (PLUGIN, None))
    monkeypatch.setattr(doctor, "probe", lambda **_: STACK)
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, color_system=None)
    doctor.examine(console, {})
    assert "cuDNN and FlashInfer" in file.getvalue()
    assert "vLLM with the plugin" in file.getvalue()
    assert ("half a" in file.getvalue()) is not is_terminal
    assert capsys.readouterr().out == ""


def test_an_interrupt_of_its_own_process_ends_its_children_too(tmp_path: Path) -> None:
    """As a supervisor sends it; a terminal's reaches the children by itself."""
    hanging = tmp_path / "python"
    hanging.write_text(
        "#!/bin/sh\n"
        f"echo $$ >> '{tmp_path}/children'\n"
        'case "$*" in *report_plugin) kill -INT $PPID ;; esac\n'
        "exec sleep 60\n"
    )
    hanging.chmod(0o755)
    code = (
        "import signal, sys; from vllm_flashinfer_vit.commands.cli import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.executable = {str(hanging)!r}; main(['doctor'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=40
    )
    assert (ended.returncode, ended.stdout) == (130, "")
    assert "Traceback" not in ended.stderr
    for pid in (tmp_path / "children").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_an_interrupt_that_another_thread_receives_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that waits is not woken, as by a signal right before it waits."""
    stopped = []

    def probe(isolated: bool, stop: threading.Event) -> None:
        # Until the main thread waits.
        stop.wait(0.5)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        stopped.append(stop.wait(10))

    monkeypatch.setattr(doctor, "probe", probe)
    monkeypatch.setattr(doctor, "_run_plugin", lambda env, stop: ({}, None))
    # A shell's job in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            doctor.examine(Console(file=io.StringIO()))
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped == [True]

# SPDX-License-Identifier: Apache-2.0
"""What this machine has: GPUs, libraries, and importing as little as possible."""

import mmap
import os
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from _stacks import AMPERE, HOPPER, TURING

import vllm_flashinfer_vit
import vllm_flashinfer_vit.machine.probe as probing
from vllm_flashinfer_vit.machine.probe import probe
from vllm_flashinfer_vit.machine.stack import Gpu


class NVMLError(Exception):
    """The base class of NVML's errors."""


def _fake_nvml(gpus: list[Gpu]) -> types.SimpleNamespace:
    def memory_info(gpu: Gpu) -> types.SimpleNamespace:
        if gpu.memory_bytes is None:
            raise NVMLError("Not Supported")
        return types.SimpleNamespace(total=gpu.memory_bytes)

    return types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda i: gpus[i],
        nvmlDeviceGetHandleByUUID=lambda uuid: gpus[int(uuid.removeprefix("GPU-"))],
        nvmlDeviceGetMemoryInfo=memory_info,
        nvmlDeviceGetCudaComputeCapability=lambda gpu: gpu.capability,
        nvmlDeviceGetName=lambda gpu: gpu.name,
    )


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (HOPPER, AMPERE)),
        ("1", (AMPERE,)),
        ("1, 0", (AMPERE, HOPPER)),
        ("GPU-1", (AMPERE,)),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", (HOPPER,)),
        ("0,2,1", (HOPPER,)),
    ],
)
def test_gpus_follow_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: tuple[Gpu, ...]
) -> None:
    monkeypatch.setattr(probing, "_load_nvml", lambda: _fake_nvml([HOPPER, AMPERE]))
    monkeypatch.setattr(probing, "report_libraries", lambda emit: None)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    stack = probe()
    assert stack.gpus == expected
    assert stack.driver == "580.65.06"
    assert stack.capability == (expected[0].capability if expected else None)


def test_a_gpu_without_memory_of_its_own_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver of a DGX Spark has no answer, and vLLM runs there all the same."""
    shared = Gpu("NVIDIA GB10", (12, 1), None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(probing, "_load_nvml", lambda: _fake_nvml([shared]))
    stack = probe(libraries=False)
    assert stack.gpus == (shared,)
    assert stack.driver == "580.65.06"
    assert not [p for p in stack.problems if "driver" in p.what]


@pytest.mark.parametrize(
    ("gpus", "visible", "order", "is_said"),
    [
        ((AMPERE, HOPPER), None, None, True),
        ((AMPERE, HOPPER), "0", None, True),
        ((AMPERE, HOPPER), "0", "FASTEST_FIRST", True),
        ((AMPERE, HOPPER), "0", "PCI_BUS_ID", False),
        ((AMPERE, HOPPER), "GPU-0,GPU-1", None, False),
        ((AMPERE, HOPPER), "", None, False),
        ((HOPPER, HOPPER), None, None, False),
    ],
)
def test_gpus_that_cuda_may_number_otherwise(
    gpus: tuple[Gpu, ...],
    visible: str | None,
    order: str | None,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probing, "_load_nvml", lambda: _fake_nvml(list(gpus)))
    for name, value in (
        ("CUDA_VISIBLE_DEVICES", visible),
        ("CUDA_DEVICE_ORDER", order),
    ):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    said = [p for p in probe(libraries=False).problems if "several kinds" in p.what]
    assert bool(said) is is_said
    for problem in said:
        assert "NVIDIA A100 and NVIDIA H200" in problem.what
        assert problem.remedy == "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
        assert not problem.fatal


def test_a_broken_driver_is_a_stated_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> types.ModuleType:
        raise OSError("driver/library version mismatch")

    monkeypatch.setattr(probing, "_load_nvml", broken)
    (problem,) = [p for p in probe().problems if "driver" in p.what]
    assert "driver/library version mismatch" in problem.what
    assert problem.remedy is not None
    assert "nvidia-smi" in problem.remedy


def test_libraries_are_read_only_where_a_gpu_can_use_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = []
    facts = {"cudnn_backend": 92400, "import_errors": {}}

    def report(emit: Callable[[dict[str, Any]], object]) -> None:
        read.append(True)
        emit(facts)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(probing, "report_libraries", report)
    for gpus, count in (([], 0), ([TURING], 0), ([HOPPER], 1)):
        monkeypatch.setattr(probing, "_load_nvml", lambda gpus=gpus: _fake_nvml(gpus))
        stack = probe()
        assert len(read) == count
        assert stack.inspected is bool(count)
    assert stack.cudnn_backend == 92400


def test_libraries_may_be_left_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bool] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(probing, "_load_nvml", lambda: _fake_nvml([HOPPER]))
    monkeypatch.setattr(probing, "report_libraries", lambda emit: read.append(True))
    assert probe(libraries=False).inspected is None
    assert not read
    assert probe().inspected is False
    assert read


def test_a_library_that_fails_to_import_does_not_hide_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no libcudart")

    libraries = {"torch": broken, "cudnn": lambda: {"cudnn_backend": 91900}}
    monkeypatch.setattr(probing, "_LIBRARIES", libraries)
    facts: dict[str, Any] = {}
    probing.report_libraries(facts.update)
    assert facts["cudnn_backend"] == 91900
    assert facts["import_errors"] == {"torch": "RuntimeError: no libcudart"}


def test_a_crash_is_blamed_on_the_module_that_was_being_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = {"torch_cuda": "13.0", "importing": "cudnn"}
    monkeypatch.setattr(
        probing,
        "run_isolated",
        lambda *_, **__: (facts, "crashed with signal 11"),
    )
    stack = probe(isolated=True)
    assert stack.torch_cuda == "13.0"
    assert stack.import_errors == {"cudnn": "crashed with signal 11"}
    assert any("crashed with signal 11" in problem.what for problem in stack.problems)


def _install(site: Path, name: str, version: str, files: Mapping[str, str]) -> None:
    """Put files in a site folder, and what an installer records of them."""
    record = []
    for file, content in files.items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        record.append(f"{file},sha256=x,{len(content)}")
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    # Compiled files, and the record itself, have no size.
    record += ["cuda/bindings/__pycache__/x.pyc,,", f"{info.name}/RECORD,,"]
    (info / "RECORD").write_text("\n".join(record))


def test_damaged_files_of_cuda_bindings_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(probing, "run_isolated", lambda *_, **__: ({}, None))
    names = [f"cuda/bindings/{name}" for name in ("a.so", "b.so", "c.py", "d.so")]
    _install(tmp_path, "cuda-bindings", "13.4.4", dict.fromkeys(names, "thirteen"))
    assert probe(isolated=True).damaged_bindings == ()
    # As a packager does who links anew: nobody else's file.
    (tmp_path / names[3]).write_text("linked anew")
    assert probe(isolated=True).damaged_bindings == ()
    _install(tmp_path, "cuda-python", "12.6.2", dict.fromkeys(names[:2], "twelve"))
    (tmp_path / names[2]).unlink()
    stack = probe(isolated=True)
    assert stack.damaged_bindings == tuple(names[:3])
    assert stack.cuda_bindings == "13.4.4"
    # Only doctor looks.
    assert probe().damaged_bindings == ()


def test_importing_is_inert() -> None:
    code = (
        "import sys, vllm_flashinfer_vit.settings, vllm_flashinfer_vit.machine.probe, "
        "vllm_flashinfer_vit.commands.cli, vllm_flashinfer_vit.commands.doctor_text; "
        "print([m for m in ('vllm', 'torch', 'triton', 'flashinfer', 'cudnn') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_probing_imports_nothing_and_starts_no_cuda() -> None:
    code = (
        "import sys; from vllm_flashinfer_vit.machine.probe import probe; probe(); "
        "loaded = [m for m in ('vllm', 'triton') if m in sys.modules]; "
        "torch = sys.modules.get('torch'); "
        "print(loaded, torch is not None and torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout.strip() == "[] False"


def test_probing_works_without_any_of_the_packages() -> None:
    # -S leaves site-packages out, so that nothing is installed.
    root = Path(vllm_flashinfer_vit.__file__).parents[1]
    packaging = Path(__import__("packaging").__file__).parents[1] / "packaging"
    code = (
        "import sys, importlib.util, types; "
        f"spec = importlib.util.spec_from_file_location('packaging', "
        f"{str(packaging / '__init__.py')!r}, "
        f"submodule_search_locations=[{str(packaging)!r}]); "
        "sys.modules['packaging'] = importlib.util.module_from_spec(spec); "
        f"sys.path.insert(0, {str(root)!r}); "
        "from vllm_flashinfer_vit.machine.probe import probe; stack = probe(); "
        "print(stack.vllm, stack.torch, stack.gpus, len(stack.problems))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None None ()")


def test_loaded_cudnn_is_found_beside_files_of_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudnn = types.SimpleNamespace(backend_version=lambda: 91900)
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    library = tmp_path / "a folder" / "libcudnn.so.9"
    library.parent.mkdir()
    with ExitStack() as stack:
        for path in (library, tmp_path / os.fsdecode(b"of another encoding \xff")):
            path.write_bytes(b"0")
            file = stack.enter_context(path.open("rb"))
            stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        facts = probing._read_cudnn()
    assert facts["cudnn_backend"] == 91900
    assert str(library) in facts["cudnn_libraries"]

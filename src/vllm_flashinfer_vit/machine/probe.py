# SPDX-License-Identifier: Apache-2.0
"""Find out what this machine has.

Facts come from package metadata and from NVML, so that asking creates no CUDA context.
The one thing that must be imported is cuDNN: what counts is the library that
cudnn-frontend loads, which `LD_LIBRARY_PATH` can make another than the installed wheel.
"""

import csv
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import MappingProxyType, ModuleType
from typing import Any

from packaging.requirements import Requirement

from vllm_flashinfer_vit.machine.child import run_isolated
from vllm_flashinfer_vit.machine.problems import stack_problems
from vllm_flashinfer_vit.machine.remedies import PACKAGES
from vllm_flashinfer_vit.machine.stack import CUDNN_WHEELS, Gpu, Problem, Stack
from vllm_flashinfer_vit.machine.versions import installed

_PINNED_BY_VLLM = ("flashinfer-python", "nvidia-cudnn-frontend")


def probe(
    *, isolated: bool = False, libraries: bool = True, stop: Event | None = None
) -> Stack:
    """Find out what this machine has; never raises and creates no CUDA context.

    Args:
        isolated: Import cuDNN and FlashInfer in a child process, which may crash, and
            do so even without a GPU; compare the files of cuda-bindings with what was
            installed. Otherwise libraries are imported here, as the cuDNN kernel will
            do anyway, and only if there is a GPU for it.
        libraries: Whether to import them at all, which takes seconds.
        stop: As `run_isolated` takes it.
    """
    problems: list[Problem] = []
    wheels = {name: v for name in CUDNN_WHEELS if (v := installed(name))}
    pins = _pins()
    gpus, driver = _read_gpus(problems)
    facts: dict[str, Any] = {}
    errors: dict[str, str] = {}
    if isolated:
        facts, error = run_isolated("report_libraries", module=__name__, stop=stop)
        errors = facts.pop("import_errors", {})
        if error is not None:
            problems.append(Problem(f"reading the versions of torch and cuDNN {error}"))
            errors.setdefault(facts.pop("importing", "torch"), error)
    elif libraries and gpus and gpus[0].capability >= (8, 0):
        report_libraries(facts.update)
        errors = facts.pop("import_errors", {})
    stack = Stack(
        python=platform.python_version(),
        vllm=installed("vllm"),
        torch=installed("torch"),
        triton=installed("triton"),
        flashinfer=installed(PACKAGES["flashinfer"]),
        cudnn_frontend=installed(PACKAGES["cudnn_frontend"]),
        quack=installed("quack-kernels"),
        cuda_bindings=installed("cuda-bindings"),
        damaged_bindings=_damaged_bindings() if isolated else (),
        cudnn_wheels=wheels,
        cudnn_backend=facts.get("cudnn_backend"),
        cudnn_libraries=tuple(facts.get("cudnn_libraries", ())),
        torch_cudnn=facts.get("torch_cudnn"),
        torch_cuda=facts.get("torch_cuda"),
        flash_attn=_bundled_flash_attn(),
        gpus=gpus,
        driver=driver,
        pins=pins,
        import_errors=errors,
        inspected=bool(facts) if libraries else None,
    )
    problems += stack_problems(stack)
    return replace(stack, problems=tuple(problems))


def report_libraries(emit: Callable[[dict[str, Any]], object]) -> None:
    """Import what the cuDNN kernel imports, torch first as an engine does.

    Args:
        emit: Called with each fact as soon as it is known; keys are fields of `Stack`,
            and `importing` names the module whose import comes next.
    """
    errors: dict[str, str] = {}
    for module, read in _LIBRARIES.items():
        emit({"importing": module})
        try:
            emit(read())
        except Exception as error:
            errors[module] = f"{type(error).__name__}: {error}"
    emit({"import_errors": errors})


def _read_torch() -> dict[str, Any]:
    import torch

    return {
        "torch_cuda": torch.version.cuda,
        "torch_cudnn": torch.backends.cudnn.version(),
    }


def _read_cudnn() -> dict[str, Any]:
    import cudnn

    facts = {"cudnn_backend": cudnn.backend_version()}
    maps = Path("/proc/self/maps")
    if maps.exists():
        # The name of any file that is mapped, in any encoding.
        paths = re.findall(r" (/.*/libcudnn\.so.*)", maps.read_text(errors="replace"))
        facts["cudnn_libraries"] = sorted(set(paths))
    return facts


def _read_flashinfer() -> dict[str, Any]:
    from flashinfer.cudnn import prefill

    if not prefill.CUDNN_AVAILABLE:
        raise ImportError("FlashInfer could not import cudnn")
    return {}


_LIBRARIES: Mapping[str, Callable[[], dict[str, Any]]] = MappingProxyType(
    {"torch": _read_torch, "cudnn": _read_cudnn, "flashinfer.cudnn": _read_flashinfer}
)


def _damaged_bindings() -> tuple[str, ...]:
    """List files of cuda-bindings that are missing, or that cuda-python overwrote.

    cuda-python below 12.8 brings files of the same names, whose sizes differ.
    """
    others = _recorded("cuda-python")
    damaged = []
    for name, (path, size) in _recorded("cuda-bindings").items():
        found = path.stat().st_size if path.exists() else None
        # A packager who links anew changes sizes, too.
        if found is None or (name in others and found != size):
            damaged.append(name)
    return tuple(damaged)


def _recorded(package: str) -> dict[str, tuple[Path, int]]:
    """Return where a package's files belong, and their sizes in bytes, by their names.

    Compiled Python files, which have no size, are left out.
    """
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return {}
    # `distribution.files` leaves out what is missing, from Python 3.12 on.
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    return {
        name: (Path(str(distribution.locate_file(name))), int(size))
        for name, _, size in rows
        if size
    }


def _pins() -> dict[str, str]:
    """Read what vLLM demands of packages that this one uses too."""
    try:
        lines = importlib.metadata.requires("vllm") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    needs = [Requirement(line) for line in lines]
    return {
        need.name: str(need.specifier)
        for need in needs
        if need.name in _PINNED_BY_VLLM and need.marker is None
    }


def _vllm_folder() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _bundled_flash_attn() -> tuple[int, ...]:
    """Look for vLLM's FlashAttention extensions without importing vLLM."""
    folder = _vllm_folder()
    if folder is None:
        return ()
    patterns = {2: "_vllm_fa2_C*.so", 3: "_vllm_fa3_C*.so", 4: "cute/interface.py"}
    root = folder / "vllm_flash_attn"
    return tuple(version for version, p in patterns.items() if any(root.glob(p)))


def _load_nvml() -> ModuleType:
    """Load NVML's bindings: vLLM's copy, without vLLM, or those of nvidia-ml-py."""
    folder = _vllm_folder()
    copy = folder / "third_party" / "pynvml.py" if folder else None
    if copy is None or not copy.exists():
        return importlib.import_module("pynvml")
    return _import_file(copy)


@functools.cache
def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_vllm_flashinfer_vit_nvml", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The file looks itself up by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _nvml() -> Iterator[ModuleType]:
    nvml = _load_nvml()
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _read_gpus(problems: list[Problem]) -> tuple[tuple[Gpu, ...], str | None]:
    """Ask NVML for the driver and for the GPUs that CUDA_VISIBLE_DEVICES leaves."""
    gpus = []
    driver = None
    try:
        with _nvml() as nvml:
            driver = nvml.nvmlSystemGetDriverVersion()
            problems += _order_problems(nvml)
            for handle in _visible(nvml):
                capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
                name = nvml.nvmlDeviceGetName(handle)
                memory = _memory_bytes(nvml, handle)
                gpus.append(Gpu(name, tuple(capability), memory))
    except Exception as error:
        # NVML tells its errors apart by classes that it makes at run time.
        if type(error).__name__ != "NVMLError_LibraryNotFound":
            problems.append(
                Problem(
                    f"the NVIDIA driver cannot be asked for its GPUs: {error}",
                    "run nvidia-smi; it says what is wrong with the driver",
                )
            )
    return tuple(gpus), driver


def _memory_bytes(nvml: ModuleType, handle: Any) -> int | None:
    """Return a GPU's memory; None for one of the host's, as GB10's, or not shown."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return None


def _visible(nvml: ModuleType) -> list[Any]:
    """Return NVML handles in the order in which CUDA will number the GPUs.

    Numbers are taken for NVML's, as vLLM takes them; see `_order_problems`.
    """
    count = nvml.nvmlDeviceGetCount()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    handles = []
    for entry in (part.strip() for part in listed.split(",")):
        if entry.isdecimal() and int(entry) < count:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(int(entry)))
        elif entry.startswith(("GPU-", "MIG-")):
            handles.append(nvml.nvmlDeviceGetHandleByUUID(entry))
        else:
            # CUDA ignores everything from the first entry on that names no GPU.
            break
    return handles


def _order_problems(nvml: ModuleType) -> list[Problem]:
    """Say if CUDA may number the GPUs of this machine in another order than NVML."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    by_number = listed is None or any(x.strip().isdecimal() for x in listed.split(","))
    if not by_number or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return []
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    names = dict.fromkeys(map(nvml.nvmlDeviceGetName, handles))
    if len(names) < 2:
        return []
    return [
        Problem(
            f"this machine has GPUs of several kinds, {' and '.join(names)}; CUDA puts "
            "the fastest first, where this report and vLLM take the order on the PCI "
            "bus",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    ]

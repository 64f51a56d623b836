# SPDX-License-Identifier: Apache-2.0
"""What is installed, what the GPU is, and which kernel can therefore run.

Facts come from package metadata and from NVML, so that asking creates no CUDA context.
The one thing that must be imported is cuDNN: what counts is the library that
cudnn-frontend loads, which `LD_LIBRARY_PATH` can make another than the installed wheel.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_flashinfer_vit.choices import lookup as choices_module
from vllm_flashinfer_vit.choices.lookup import (
    FP8_DTYPE,
    Choice,
    choices_for,
    fp8_choices_for,
    fp8_ranges,
    replaced,
    without,
)
from vllm_flashinfer_vit.settings import (
    ENV_KERNEL,
    FP8_KERNELS,
    KERNEL_NAMES,
    KernelName,
)

if TYPE_CHECKING:
    import torch

SUPPORTED_VLLM = ("0.22.1", "0.33.0")

FLASHINFER_RANGE = SpecifierSet(">=0.6.11,<0.8")
CUDNN_FRONTEND_RANGE = SpecifierSet(">=1.18")

# cudnn-frontend refuses fp16 and bf16 attention on 9.10.0 and 9.10.1 (known bugs), and
# head dims above 128 came with 9.10: sdpa_support_surface.h, TransformerEngine #1797.
MIN_CUDNN = 91002
# Ragged batches on Ampere, Ada and consumer Blackwell: sdpa_support_surface.h ("THD"),
# TransformerEngine #2693.
MIN_CUDNN_RAGGED_EVERYWHERE = 91801
_RAGGED_FIRST = (9, 10)
# The first with the FP8 forward pass for prefill: FlashInfer #2241, vLLM's own gate.
MIN_CUDNN_FP8 = 91701
# Packed FP8 batches by TransformerEngine's gate (#2994). On an H200, 9.19's kernel runs
# an illegal instruction, which no process survives: it must not even be tried.
MIN_CUDNN_FP8_HOPPER = 92300

# Prefill rows of the support matrix on docs.nvidia.com/cudnn/operations/Attention, and
# `supports_head_size` of vLLM's FlashAttention backend; both want multiples of 8.
HEAD_DIMS: Mapping[KernelName, tuple[int, int]] = MappingProxyType(
    {
        "cudnn": (8, 256),
        "cudnn_fp8": (8, 128),
        "flash_attn": (8, 256),
        "flash_attn_4": (64, 128),
        "hopper_fp8": (32, 80),
        "triton": (32, 128),
        "triton_fp8": (32, 128),
        "triton_window": (32, 128),
    }
)
_ON_CUDNN = frozenset({"cudnn", "cudnn_fp8"})
_HOPPER_ONLY = frozenset({"flash_attn_4", "hopper_fp8"})
# Kernels that run once before a layer is promised to them.
_TRIED = FP8_KERNELS | {"flash_attn_4"}
_IN_PLACE_OF: Mapping[KernelName, KernelName] = MappingProxyType(
    {
        "cudnn_fp8": "triton_fp8",
        "hopper_fp8": "triton_fp8",
        "reference_fp8": "triton_fp8",
    }
)
HALF_DTYPES = ("float16", "bfloat16")

_MODULES = {
    "vllm": "vllm",
    "torch": "torch",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "cudnn_frontend": "nvidia-cudnn-frontend",
}
_CUDNN_WHEELS = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_PINNED_BY_VLLM = ("flashinfer-python", "nvidia-cudnn-frontend")
_CHILD_TIMEOUT_S = 180
_CHILD_MARK = "vllm-flashinfer-vit-fact:"


class Problem(NamedTuple):
    """Something that is wrong on this machine.

    Attributes:
        what: What happened and where, one sentence without a full stop.
        remedy: The command or the change that mends it, or None if there is none.
        fatal: Whether FLASHINFER cannot serve because of it.
    """

    what: str
    remedy: str | None = None
    fatal: bool = False


class Verdict(NamedTuple):
    """Whether a kernel can run.

    Attributes:
        ok: Whether it can.
        reason: Why, or why not; no full stop.
        remedy: The command or the change that would make it run, if there is one.
    """

    ok: bool
    reason: str
    remedy: str | None = None


class Gpu(NamedTuple):
    """One GPU that this process may use.

    Attributes:
        name: Product name.
        capability: CUDA compute capability.
        memory_bytes: Total memory.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class Stack:
    """What is installed on this machine.

    Attributes:
        python: Python's version.
        vllm: Version from the package metadata, or None if it is not installed; the
            next five likewise.
        torch: See `vllm`.
        triton: See `vllm`.
        flashinfer: Of flashinfer-python.
        cudnn_frontend: Of nvidia-cudnn-frontend.
        quack: Of quack-kernels, without which MLPs run as other patches leave them.
        cudnn_wheels: Versions of the installed cuDNN wheels, by package name.
        cudnn_backend: The cuDNN that cudnn-frontend loads, as 91900 for 9.19.0; None
            if it was not or could not be loaded.
        cudnn_libraries: Paths of every libcudnn that is loaded then.
        torch_cudnn: The cuDNN that torch runs, as 91900.
        torch_cuda: The CUDA version that torch was built for.
        flash_attn: FlashAttention versions whose code vLLM brings.
        gpus: GPUs that this process may use.
        driver: Version of the NVIDIA driver.
        pins: What the installed vLLM requires of other packages, by package name.
        import_errors: Why a module failed to import, by module name.
        inspected: Whether cuDNN and FlashInfer were imported to fill this in; None if
            that waits for a kernel that needs them.
        problems: What is missing or broken.
    """

    python: str
    vllm: str | None = None
    torch: str | None = None
    triton: str | None = None
    flashinfer: str | None = None
    cudnn_frontend: str | None = None
    quack: str | None = None
    cudnn_wheels: Mapping[str, str] = field(default_factory=dict)
    cudnn_backend: int | None = None
    cudnn_libraries: tuple[str, ...] = ()
    torch_cudnn: int | None = None
    torch_cuda: str | None = None
    flash_attn: tuple[int, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    pins: Mapping[str, str] = field(default_factory=dict)
    import_errors: Mapping[str, str] = field(default_factory=dict)
    inspected: bool | None = False
    problems: tuple[Problem, ...] = ()

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the first GPU, or None without one."""
        return self.gpus[0].capability if self.gpus else None

    @property
    def cudnn_package(self) -> str:
        """Name of the cuDNN wheel that fits this torch."""
        if self.torch_cuda is not None:
            return f"nvidia-cudnn-cu{self.torch_cuda.partition('.')[0]}"
        return next(iter(self.cudnn_wheels), _CUDNN_WHEELS[0])


def check_vllm(version: str) -> str | None:
    """Say what is wrong with a vLLM version, or None if it is supported.

    A release candidate counts as its release, a patch release as its minor one. A
    development build after the newest supported release is refused: it may hold
    anything that is going to be in the next one.
    """
    first, last = (Version(bound) for bound in SUPPORTED_VLLM)
    wanted = f"vllm-flashinfer-vit supports vLLM {first} to {last}"
    try:
        found = Version(version)
    except InvalidVersion:
        return f"{wanted}; {version!r} is not a version."
    too_new = found.release[:2] > last.release[:2] or (
        found.is_devrelease and found.release > last.release
    )
    if found.release < first.release or too_new:
        return f"{wanted}; vLLM {version} is installed."
    return None


def format_cudnn(version: int | None) -> str:
    """Write a cuDNN version number, 91900, as people do: 9.19.0."""
    if version is None:
        return "none"
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def kernel_verdict(
    kernel: KernelName, stack: Stack, head_dim: int, dtype: "torch.dtype | str"
) -> Verdict:
    """Judge whether a kernel can run on a machine.

    Args:
        kernel: The kernel's name.
        stack: What the machine has.
        head_dim: Head dim in elements.
        dtype: A torch dtype or its name, `bfloat16`.

    Raises:
        ValueError: There is no kernel of this name.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    if kernel not in KERNEL_NAMES:
        raise ValueError(f"no kernel is named {kernel!r}")
    is_fp8 = kernel in FP8_KERNELS
    if is_fp8 and dtype_name != FP8_DTYPE:
        return Verdict(
            False,
            "it is FP8 attention, which must be asked for",
            "--mm-encoder-attn-dtype fp8",
        )
    if kernel in ("reference", "reference_fp8"):
        if stack.torch is None:
            return _missing(stack, "torch")
        return Verdict(True, "plain PyTorch runs everywhere")
    if not is_fp8 and dtype_name not in HALF_DTYPES:
        return Verdict(
            False,
            f"it takes {' and '.join(HALF_DTYPES)}, not {dtype_name}",
            "--dtype bfloat16",
        )
    smallest, largest = HEAD_DIMS[kernel]
    if head_dim % 8 or not smallest <= head_dim <= largest:
        return Verdict(
            False,
            f"head dim {head_dim} is no multiple of 8 from {smallest} to {largest}",
        )
    if stack.capability is None:
        return Verdict(False, "it needs an NVIDIA GPU and this process sees none")
    if stack.capability < (8, 0):
        return Verdict(
            False,
            f"it needs compute capability 8.0 (Ampere) or newer; {stack.gpus[0].name} "
            f"has {_dotted(stack.capability)}",
        )
    if is_fp8 and (refusal := _fp8_refusal(kernel, stack, stack.capability)):
        return refusal
    if kernel in _HOPPER_ONLY and stack.capability[0] != 9:
        return Verdict(
            False,
            f"it is for Hopper (9.0) only; {stack.gpus[0].name} has "
            f"{_dotted(stack.capability)}",
        )
    if kernel in ("hopper_fp8", "triton", "triton_fp8", "triton_window"):
        if stack.triton is None:
            return _missing(stack, "triton")
        return Verdict(True, f"Triton {stack.triton}")
    if kernel == "flash_attn":
        best = {9: 3, 10: 4}.get(stack.capability[0], 2)
        return _flash_attn_verdict(stack, best if best in stack.flash_attn else 2)
    if kernel == "flash_attn_4":
        return _flash_attn_verdict(stack, 4)
    return _cudnn_verdict(stack, stack.capability)


def usable_choices(
    stack: Stack,
    head_dim: int,
    dtype: "torch.dtype | str",
    forced: KernelName | None = None,
    tuned_dir: Path | None = None,
    *,
    fp8: bool = False,
    attempt: Callable[[KernelName], str | None] = lambda kernel: None,
) -> tuple[tuple[Choice, ...], dict[KernelName, str]]:
    """Drop from a GPU's table of choices what this machine cannot run.

    `triton_fp8` takes the place of another FP8 kernel that cannot run; where one of a
    class's two kernels cannot, the other serves all of it.

    Args:
        stack: What the machine has. If its libraries were left out, they are inspected
            where a choice runs on cuDNN.
        head_dim: Head dim in elements.
        dtype: A torch dtype or its name.
        forced: The kernel that the user forces, or None.
        tuned_dir: Folder of the user's measurements, or None to ignore them.
        fp8: The layer is one with FP8 attention. What is left may have no FP8 kernel.
        attempt: Runs a kernel of FP8, or one compiled by a library for this GPU, that
            should run by all that is known, and says what went wrong, or None.

    Returns:
        The choices that are left, none if nothing can serve, and by each kernel that
        was dropped a text that names it and says why, with its remedy.

    Raises:
        TableError: A file of measured choices cannot be used.
    """
    gpu_name = stack.gpus[0].name if stack.gpus else None
    look_up = fp8_choices_for if fp8 else choices_for
    choices = look_up(gpu_name, stack.capability, dtype, head_dim, tuned_dir)
    if forced is not None:
        choices = choices_module.forced(choices, forced)
    refusals: dict[KernelName, str] = {}
    kernels = [kernel for choice in choices for kernel in choice.kernels]
    if stack.inspected is None and not _ON_CUDNN.isdisjoint(kernels):
        stack = probe()
    for kernel in kernels:
        is_fp8 = fp8 and kernel in FP8_KERNELS
        verdict = kernel_verdict(
            kernel, stack, head_dim, FP8_DTYPE if is_fp8 else dtype
        )
        if verdict.ok and kernel in _TRIED and (error := attempt(kernel)):
            verdict = Verdict(False, error)
        if verdict.ok or not any(kernel in c.kernels for c in choices):
            continue
        remedy = f" ({verdict.remedy})" if verdict.remedy else ""
        refusals[kernel] = f"{kernel}: {verdict.reason}{remedy}"
        if kernel == forced:
            choices = ()
        elif other := _IN_PLACE_OF.get(kernel):
            choices = replaced(choices, kernel, other)
            kernels.append(other)
        else:
            choices = without(choices, kernel)
    return choices, refusals


def serves_fp8(choices: Sequence[Choice], refusals: Container[KernelName]) -> bool:
    """Whether FP8 layers can be had by what `usable_choices` returned for them.

    Choices without an FP8 kernel will do where FP8 pays nowhere, not where every FP8
    kernel was refused.
    """
    refused = any(kernel in refusals for kernel in FP8_KERNELS)
    return bool(fp8_ranges(choices) or (choices and not refused))


def probe(*, isolated: bool = False, libraries: bool = True) -> Stack:
    """Find out what this machine has; never raises and creates no CUDA context.

    Args:
        isolated: Import cuDNN and FlashInfer in a child process, which may crash, and
            do so even without a GPU. Otherwise they are imported here, as the cuDNN
            kernel will do anyway, and only if there is a GPU for it.
        libraries: Whether to import them at all, which takes seconds.
    """
    problems: list[Problem] = []
    wheels = {name: v for name in _CUDNN_WHEELS if (v := _version(name))}
    pins = _pins()
    gpus, driver = _read_gpus(problems)
    facts: dict[str, Any] = {}
    errors: dict[str, str] = {}
    if isolated:
        facts, error = run_isolated("report_libraries")
        errors = facts.pop("import_errors", {})
        if error is not None:
            problems.append(Problem(f"reading the versions of torch and cuDNN {error}"))
            errors.setdefault(facts.pop("importing", "torch"), error)
    elif libraries and gpus and gpus[0].capability >= (8, 0):
        report_libraries(facts.update)
        errors = facts.pop("import_errors", {})
    stack = Stack(
        python=platform.python_version(),
        vllm=_version("vllm"),
        torch=_version("torch"),
        triton=_version("triton"),
        flashinfer=_version(_MODULES["flashinfer"]),
        cudnn_frontend=_version(_MODULES["cudnn_frontend"]),
        quack=_version("quack-kernels"),
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


def stack_problems(stack: Stack) -> list[Problem]:
    """List what is missing, broken or contradictory in a stack."""
    problems = []
    for name, package in _MODULES.items():
        if getattr(stack, name) is None:
            verdict = _missing(stack, name)
            problems.append(
                Problem(f"{package} is not installed", verdict.remedy, name == "vllm")
            )
    if stack.vllm is not None and (text := check_vllm(stack.vllm)):
        first, last = SUPPORTED_VLLM
        problems.append(
            Problem(text.rstrip("."), f'pip install "vllm>={first},<={last}"', True)
        )
    for module, error in stack.import_errors.items():
        # A module that is not installed is reported as that already.
        if stack.inspected and getattr(stack, _package_field(module)) is not None:
            problems.append(
                Problem(
                    f"importing {module} fails: {error}",
                    _import_remedy(stack, module, error),
                )
            )
    if len(stack.cudnn_wheels) > 1:
        names = " and ".join(stack.cudnn_wheels)
        other = next(n for n in stack.cudnn_wheels if n != stack.cudnn_package)
        problems.append(
            Problem(
                f"{names} are both installed, and each overwrites the other's files",
                f"pip uninstall -y {other} && "
                f"pip install --force-reinstall --no-deps {stack.cudnn_package}",
            )
        )
    loaded = format_cudnn(stack.cudnn_backend)
    wheel = stack.cudnn_wheels.get(stack.cudnn_package)
    where = ", ".join(stack.cudnn_libraries) or "an unknown path"
    if stack.cudnn_backend and wheel and not f"{wheel}.".startswith(f"{loaded}."):
        problems.append(
            Problem(
                f"cudnn-frontend loads cuDNN {loaded} from {where}, not "
                f"{stack.cudnn_package} {wheel}",
                "unset LD_LIBRARY_PATH, or take the folder of the other cuDNN out",
            )
        )
    if stack.cudnn_backend and stack.torch_cudnn not in (None, stack.cudnn_backend):
        problems.append(
            Problem(
                f"one process runs two versions of cuDNN: torch "
                f"{format_cudnn(stack.torch_cudnn)}, cudnn-frontend {loaded} ({where})",
                "unset LD_LIBRARY_PATH, or take the folder of the other cuDNN out",
            )
        )
    if len({gpu.capability for gpu in stack.gpus}) > 1:
        problems.append(
            Problem(
                "the GPUs differ in compute capability; this report is about the first",
                "set CUDA_VISIBLE_DEVICES to GPUs of one kind",
            )
        )
    return problems


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
        paths = re.findall(r"/\S*/libcudnn\.so\S*", maps.read_text())
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


def run_isolated(
    report: str,
    *,
    module: str = __name__,
    env: Mapping[str, str] | None = None,
    timeout_s: float = _CHILD_TIMEOUT_S,
) -> tuple[dict[str, Any], str | None]:
    """Run `module.report(emit)` in a child process that may crash or hang.

    Args:
        report: Name of the function; it gets an `emit` that takes a dict of JSON data.
        module: Name of the module that has it.
        env: Environment of the child; this process's by default.
        timeout_s: Seconds until it is killed.

    Returns:
        All the facts that were emitted, even before a crash, merged; and what went
        wrong, or None.
    """
    code = "import sys, vllm_flashinfer_vit.machine.support as s; s._child(*sys.argv[1:])"
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", code, module, report],
            capture_output=True,
            text=True,
            errors="replace",
            env=env,
            timeout=timeout_s,
        )
        out, err, status = child.stdout, child.stderr, child.returncode
    except subprocess.TimeoutExpired as error:
        out, err, status = _text(error.stdout), _text(error.stderr), None
    facts: dict[str, Any] = {}
    for line in out.splitlines():
        _, mark, data = line.partition(_CHILD_MARK)
        if mark:
            facts.update(json.loads(data))
    if status == 0:
        return facts, None
    if status is None:
        return facts, f"did not finish in {timeout_s:.0f} s"
    if status < 0:
        return facts, f"crashed with signal {-status}"
    lines = err.strip().splitlines() or ["no message"]
    return facts, f"failed: {lines[-1].strip()}"


def _child(module: str, report: str) -> None:
    def emit(facts: dict[str, Any]) -> None:
        # A library's own unfinished line of output may stand before it.
        print(f"\n{_CHILD_MARK}{json.dumps(facts)}", flush=True)

    getattr(importlib.import_module(module), report)(emit)


def _text(output: bytes | str | None) -> str:
    return (
        output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
    spec = importlib.util.spec_from_file_location("_vllm_flashinfer_vit_nvml", copy)
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
            driver = _decoded(nvml.nvmlSystemGetDriverVersion())
            for handle in _visible(nvml):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
                capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
                name = _decoded(nvml.nvmlDeviceGetName(handle))
                gpus.append(Gpu(name, tuple(capability), int(memory)))
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


def _visible(nvml: ModuleType) -> list[Any]:
    """Return NVML handles in the order in which CUDA will number the GPUs."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [
            nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())
        ]
    handles = []
    for entry in (part.strip() for part in listed.split(",")):
        if entry.isdecimal():
            handles.append(nvml.nvmlDeviceGetHandleByIndex(int(entry)))
        elif entry.startswith(("GPU-", "MIG-")):
            handles.append(nvml.nvmlDeviceGetHandleByUUID(entry))
        else:
            # CUDA ignores everything from the first entry on that names no GPU.
            break
    return handles


def _decoded(text: bytes | str) -> str:
    return text.decode() if isinstance(text, bytes) else text


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _package_field(module: str) -> str:
    return {"cudnn": "cudnn_frontend", "flashinfer.cudnn": "flashinfer"}.get(
        module, module
    )


def _missing(stack: Stack, name: str) -> Verdict:
    package = _MODULES[name]
    first, last = SUPPORTED_VLLM
    specifier = {
        "vllm": f">={first},<={last}",
        "flashinfer": stack.pins.get(package, str(FLASHINFER_RANGE)),
        "cudnn_frontend": stack.pins.get(package, str(CUDNN_FRONTEND_RANGE)),
    }.get(name, "")
    command = f'pip install "{package}{specifier}"'
    if name in ("torch", "triton") and stack.vllm is not None:
        command = _reinstall_vllm(stack)
    return Verdict(False, f"{package} is not installed", command)


def _reinstall_vllm(stack: Stack) -> str:
    # A local version, as in 0.25.1+cu129, is on no public index.
    public = str(stack.vllm).partition("+")[0]
    return f'pip install --force-reinstall "vllm=={public}"'


def _import_remedy(stack: Stack, module: str, error: str) -> str:
    if "cuda.bindings" in error:
        # cuda-python below 12.8 and cuda-bindings install the same files.
        return "pip uninstall -y cuda-python cuda-bindings && pip install cuda-python"
    name = _package_field(module)
    return f'pip install --force-reinstall "{_MODULES[name]}=={getattr(stack, name)}"'


def _flash_attn_verdict(stack: Stack, version: int) -> Verdict:
    if stack.vllm is None:
        return _missing(stack, "vllm")
    if version not in stack.flash_attn:
        return Verdict(
            False,
            f"vLLM {stack.vllm} was built without FlashAttention {version}",
            _reinstall_vllm(stack),
        )
    return Verdict(True, f"FlashAttention {version} from vLLM {stack.vllm}")


def _fp8_refusal(
    kernel: KernelName, stack: Stack, capability: tuple[int, int]
) -> Verdict | None:
    name, found = stack.gpus[0].name, _dotted(capability)
    if capability < (8, 9):
        return Verdict(
            False,
            f"FP8 needs compute capability 8.9 (Ada) or newer; {name} has {found}",
            "leave --mm-encoder-attn-dtype out",
        )
    if kernel != "cudnn_fp8":
        return None
    if capability < (9, 0):
        return Verdict(
            False, f"cuDNN has no FP8 attention below Hopper (9.0); {name} has {found}"
        )
    loaded = stack.cudnn_backend
    if capability[0] == 9 and (loaded or MIN_CUDNN_FP8_HOPPER) < MIN_CUDNN_FP8_HOPPER:
        return Verdict(
            False,
            f"FP8 on Hopper needs cuDNN {format_cudnn(MIN_CUDNN_FP8_HOPPER)}; "
            f"{format_cudnn(loaded)} is loaded, and 9.19 runs an illegal instruction, "
            "which ends the CUDA context",
            f"{ENV_KERNEL}=hopper_fp8",
        )
    if (loaded or MIN_CUDNN_FP8) < MIN_CUDNN_FP8:
        return Verdict(
            False,
            f"FP8 needs cuDNN {format_cudnn(MIN_CUDNN_FP8)}; "
            f"{format_cudnn(loaded)} is loaded",
            f'pip install "{stack.cudnn_package}>={format_cudnn(MIN_CUDNN_FP8)}"',
        )
    return None


def _cudnn_verdict(stack: Stack, capability: tuple[int, int]) -> Verdict:
    for name, supported in (
        ("flashinfer", FLASHINFER_RANGE),
        ("cudnn_frontend", CUDNN_FRONTEND_RANGE),
    ):
        found = getattr(stack, name)
        if found is None:
            return _missing(stack, name)
        if not supported.contains(found, prereleases=True):
            return Verdict(
                False,
                f"{_MODULES[name]} {found} is not in the supported range {supported}",
                _missing(stack, name).remedy,
            )
    for module, error in stack.import_errors.items():
        if module in ("cudnn", "flashinfer.cudnn"):
            return Verdict(
                False,
                f"importing {module} fails: {error}",
                _import_remedy(stack, module, error),
            )
    needed = MIN_CUDNN
    if capability[0] not in _RAGGED_FIRST:
        needed = MIN_CUDNN_RAGGED_EVERYWHERE
    # 9.17.1 is what the extras of this package install.
    upgrade = f'pip install "{stack.cudnn_package}>={format_cudnn(max(needed, 91701))}"'
    if stack.cudnn_backend is None:
        return Verdict(False, "cudnn-frontend finds no cuDNN to load", upgrade)
    loaded = format_cudnn(stack.cudnn_backend)
    if stack.cudnn_backend < needed:
        return Verdict(
            False,
            f"ragged batches on compute capability {_dotted(capability)} need cuDNN "
            f"{format_cudnn(needed)}; {loaded} is loaded",
            upgrade,
        )
    return Verdict(True, f"FlashInfer {stack.flashinfer} on cuDNN {loaded}")

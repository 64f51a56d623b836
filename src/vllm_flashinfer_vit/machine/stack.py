# SPDX-License-Identifier: Apache-2.0
"""What a machine has, and what can be said of it: plain records."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_flashinfer_vit.machine.versions import format_cudnn

CUDNN_WHEELS = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


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
        memory_bytes: Total memory; None if the driver does not say, as of a GPU that
            shares the host's.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int | None


@dataclass(frozen=True)
class Stack:
    """What is installed on this machine.

    Attributes:
        python: Python's version.
        vllm: Version from the package metadata, or None if it is not installed; the
            next six likewise.
        torch: See `vllm`.
        triton: See `vllm`.
        flashinfer: Of flashinfer-python.
        cudnn_frontend: Of nvidia-cudnn-frontend.
        quack: Of quack-kernels, without which cuBLAS runs what QuACK would.
        cuda_bindings: Of cuda-bindings.
        damaged_bindings: Files of cuda-bindings that are missing, or that cuda-python
            overwrote; empty if nobody looked.
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
    cuda_bindings: str | None = None
    damaged_bindings: tuple[str, ...] = ()
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
    def versions(self) -> dict[str, str]:
        """Versions that kernels' times depend on, by library; only those known."""
        found = {
            "vllm": self.vllm,
            "torch": self.torch,
            "triton": self.triton,
            "flashinfer": self.flashinfer,
            "cudnn": self.cudnn_backend and format_cudnn(self.cudnn_backend),
            "quack": self.quack,
        }
        return {name: version for name, version in found.items() if version}

    @property
    def cudnn_package(self) -> str:
        """Name of the cuDNN wheel that fits this torch."""
        if self.torch_cuda is not None:
            return f"nvidia-cudnn-cu{self.torch_cuda.partition('.')[0]}"
        return next(iter(self.cudnn_wheels), CUDNN_WHEELS[0])

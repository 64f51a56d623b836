# SPDX-License-Identifier: Apache-2.0
"""What mends a missing or broken package: commands for people."""

from vllm_flashinfer_vit.machine.stack import Stack, Verdict
from vllm_flashinfer_vit.machine.versions import (
    CUDNN_FRONTEND_RANGE,
    FLASHINFER_RANGE,
    TESTED_VLLM,
    public,
)

# Packages by the module, or the field of `Stack`, that stands for them.
PACKAGES = {
    "vllm": "vllm",
    "torch": "torch",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "cudnn_frontend": "nvidia-cudnn-frontend",
}


def missing(stack: Stack, name: str) -> Verdict:
    """Return the verdict that a package is not installed; `name` is of `PACKAGES`."""
    package = PACKAGES[name]
    first, last = TESTED_VLLM
    specifier = {
        "vllm": f">={first},<={last}",
        "flashinfer": stack.pins.get(package, str(FLASHINFER_RANGE)),
        "cudnn_frontend": stack.pins.get(package, str(CUDNN_FRONTEND_RANGE)),
    }.get(name, "")
    command = f'pip install "{package}{specifier}"'
    if name in ("torch", "triton") and stack.vllm is not None:
        command = reinstall_vllm(stack)
    return Verdict(False, f"{package} is not installed", command)


def reinstall_vllm(stack: Stack) -> str:
    """Return the command that installs the vLLM that is there once more."""
    return _reinstall(stack, "vllm")


def restore_bindings(stack: Stack) -> str:
    """Return the command that brings the files of cuda-bindings back."""
    version = f"=={stack.cuda_bindings}" if stack.cuda_bindings else ""
    # cuda-python below 12.8 installs files of the same names.
    return (
        "pip uninstall -y cuda-python cuda-bindings && "
        f'pip install "cuda-bindings{version}" "cuda-python>=12.8"'
    )


def import_remedy(stack: Stack, module: str, error: str) -> str:
    """Return the command for a module of `PACKAGES` whose import fails."""
    if "cuda.bindings" in error:
        return restore_bindings(stack)
    return _reinstall(stack, package_field(module))


def _reinstall(stack: Stack, name: str) -> str:
    # A local version, as in 0.25.1+cu129, is on no public index.
    version = public(str(getattr(stack, name)))
    return f'pip install --force-reinstall "{PACKAGES[name]}=={version}"'


def package_field(module: str) -> str:
    """Return the field of `Stack` that has the version of an imported module."""
    return {"cudnn": "cudnn_frontend", "flashinfer.cudnn": "flashinfer"}.get(
        module, module
    )

# SPDX-License-Identifier: Apache-2.0
"""Whether a machine has what a kernel needs, and what would mend it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vllm_flashinfer_vit.machine.remedies import (
    PACKAGES,
    import_remedy,
    missing,
    reinstall_vllm,
)
from vllm_flashinfer_vit.machine.stack import Stack, Verdict
from vllm_flashinfer_vit.machine.versions import (
    CUDNN_FRONTEND_RANGE,
    FLASHINFER_RANGE,
    MIN_CUDNN,
    MIN_CUDNN_FP8,
    MIN_CUDNN_FP8_HOPPER,
    MIN_CUDNN_RAGGED_EVERYWHERE,
    RAGGED_FIRST,
    format_cudnn,
)

HALF_DTYPES = ("float16", "bfloat16")
FP8_DTYPE = "float8_e4m3fn"

# The least compute capability that multiplies matrices in FP8.
ADA = (8, 9)
_GENERATIONS = {(8, 0): "Ampere", ADA: "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}


@dataclass(frozen=True)
class Needs:
    """What a kernel needs of a machine and of a layer.

    Attributes:
        library: What it runs on, a key of `_LIBRARIES`: `torch`, `triton`, `flash_attn`
            for vLLM's choice of FlashAttention, `flash_attn_4`, `cudnn`, `cudnn_fp8`.
        dtypes: Names of the dtypes of q, k and v that it takes; None for any. FP8 is
            `(FP8_DTYPE,)`.
        head_dims: Least and largest head dim; it must be a multiple of 8, too. None
            for any.
        capability: The least CUDA compute capability; None for a kernel that needs no
            GPU.
        major: The only major compute capability that it is for, or None.
        instead: What to do where its library runs here, but not for it.
    """

    library: str
    dtypes: tuple[str, ...] | None = HALF_DTYPES
    head_dims: tuple[int, int] | None = None
    capability: tuple[int, int] | None = (8, 0)
    major: int | None = None
    instead: str | None = None

    @property
    def is_fp8(self) -> bool:
        """Whether q, k and v are e4m3."""
        return self.dtypes == (FP8_DTYPE,)

    @property
    def on_cudnn(self) -> bool:
        """Whether cuDNN must be imported to judge it."""
        return self.library in ("cudnn", "cudnn_fp8")


def judge(needs: Needs, stack: Stack, head_dim: int, dtype: str) -> Verdict:
    """Judge whether a machine and a layer meet a kernel's needs.

    Args:
        needs: The kernel's.
        stack: What the machine has; its first GPU counts.
        head_dim: Head dim in elements.
        dtype: Name of the dtype that is attended in: `bfloat16`, or `FP8_DTYPE`.

    Returns:
        The verdict. Its reason names neither kernel nor head dim, so that kernels and
        head dims can share it.
    """
    if needs.dtypes is not None and dtype not in needs.dtypes:
        if needs.is_fp8:
            reason = "it is FP8 attention, which must be asked for"
            return Verdict(False, reason, "--mm-encoder-attn-dtype fp8")
        reason = f"it takes {' and '.join(needs.dtypes)}, not {dtype}"
        return Verdict(False, reason, f"--dtype {needs.dtypes[-1]}")
    if needs.capability is None:
        return _LIBRARIES[needs.library](stack)
    if needs.head_dims is not None:
        least, most = needs.head_dims
        if head_dim % 8 or not least <= head_dim <= most:
            reason = f"it takes head dims of {least} to {most} that are multiples of 8"
            return Verdict(False, reason)
    if (refusal := _capability_refusal(needs, stack)) is not None:
        return refusal
    verdict = _LIBRARIES[needs.library](stack)
    if not verdict.ok and verdict.remedy is None:
        return verdict._replace(remedy=needs.instead)
    return verdict


def _capability_refusal(needs: Needs, stack: Stack) -> Verdict | None:
    assert needs.capability is not None
    if stack.capability is None:
        return Verdict(False, "it needs an NVIDIA GPU and this process sees none")
    has = f"{stack.gpus[0].name} has {_dotted(stack.capability)}"
    if needs.is_fp8 and stack.capability < ADA:
        return Verdict(
            False,
            f"FP8 needs compute capability {_generation(ADA)} or newer; {has}",
            "leave --mm-encoder-attn-dtype out",
        )
    if stack.capability < needs.capability:
        least = _generation(needs.capability)
        return Verdict(False, f"it needs compute capability {least} or newer; {has}")
    if needs.major not in (None, stack.capability[0]):
        only = _generation((needs.major, 0))
        return Verdict(False, f"it is for compute capability {only} only; {has}")
    return None


def _generation(capability: tuple[int, int]) -> str:
    name = _GENERATIONS.get(capability)
    return f"{_dotted(capability)} ({name})" if name else _dotted(capability)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _torch_verdict(stack: Stack) -> Verdict:
    if stack.torch is None:
        return missing(stack, "torch")
    return Verdict(True, "plain PyTorch runs everywhere")


def _triton_verdict(stack: Stack) -> Verdict:
    if stack.triton is None:
        return missing(stack, "triton")
    return Verdict(True, f"Triton {stack.triton}")


def _newest_flash_attn_verdict(stack: Stack) -> Verdict:
    assert stack.capability is not None
    best = {9: 3, 10: 4}.get(stack.capability[0], 2)
    return _flash_attn_verdict(stack, best if best in stack.flash_attn else 2)


def _flash_attn_4_verdict(stack: Stack) -> Verdict:
    return _flash_attn_verdict(stack, 4)


def _flash_attn_verdict(stack: Stack, version: int) -> Verdict:
    if stack.vllm is None:
        return missing(stack, "vllm")
    if version not in stack.flash_attn:
        return Verdict(
            False,
            f"vLLM {stack.vllm} was built without FlashAttention {version}",
            reinstall_vllm(stack),
        )
    return Verdict(True, f"FlashAttention {version} from vLLM {stack.vllm}")


def _cudnn_verdict(stack: Stack) -> Verdict:
    assert stack.capability is not None
    capability = stack.capability
    for name, supported in (
        ("flashinfer", FLASHINFER_RANGE),
        ("cudnn_frontend", CUDNN_FRONTEND_RANGE),
    ):
        found = getattr(stack, name)
        if found is None:
            return missing(stack, name)
        if not supported.contains(found, prereleases=True):
            return Verdict(
                False,
                f"{PACKAGES[name]} {found} is not in the supported range {supported}",
                missing(stack, name).remedy,
            )
    for module, error in stack.import_errors.items():
        if module in ("cudnn", "flashinfer.cudnn"):
            return Verdict(
                False,
                f"importing {module} fails: {error}",
                import_remedy(stack, module, error),
            )
    needed = MIN_CUDNN
    if capability[0] not in RAGGED_FIRST:
        needed = MIN_CUDNN_RAGGED_EVERYWHERE
    # What the extras of this package install.
    wanted = format_cudnn(max(needed, MIN_CUDNN_FP8))
    upgrade = f'pip install "{stack.cudnn_package}>={wanted}"'
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


def _cudnn_fp8_verdict(stack: Stack) -> Verdict:
    assert stack.capability is not None
    loaded = stack.cudnn_backend
    is_hopper = stack.capability[0] == 9
    if is_hopper and (loaded or MIN_CUDNN_FP8_HOPPER) < MIN_CUDNN_FP8_HOPPER:
        return Verdict(
            False,
            f"FP8 on Hopper needs cuDNN {format_cudnn(MIN_CUDNN_FP8_HOPPER)}; "
            f"{format_cudnn(loaded)} is loaded, and 9.19 runs an illegal instruction, "
            "which ends the CUDA context",
        )
    if (loaded or MIN_CUDNN_FP8) < MIN_CUDNN_FP8:
        return Verdict(
            False,
            f"FP8 needs cuDNN {format_cudnn(MIN_CUDNN_FP8)}; "
            f"{format_cudnn(loaded)} is loaded",
            f'pip install "{stack.cudnn_package}>={format_cudnn(MIN_CUDNN_FP8)}"',
        )
    return _cudnn_verdict(stack)


_LIBRARIES: Mapping[str, Callable[[Stack], Verdict]] = MappingProxyType(
    {
        "torch": _torch_verdict,
        "triton": _triton_verdict,
        "flash_attn": _newest_flash_attn_verdict,
        "flash_attn_4": _flash_attn_4_verdict,
        "cudnn": _cudnn_verdict,
        "cudnn_fp8": _cudnn_fp8_verdict,
    }
)

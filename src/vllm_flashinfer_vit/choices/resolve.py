# SPDX-License-Identifier: Apache-2.0
"""The choices of this process's layers: what its machine can run, and what it logs."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_flashinfer_vit.choices.gemms import GemmChoice, measured_gemms
from vllm_flashinfer_vit.choices.lookup import Choice, other_versions
from vllm_flashinfer_vit.choices.trial import attempt
from vllm_flashinfer_vit.choices.usable import (
    NotServedError,
    serves_fp8,
    usable_choices,
)
from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.machine.probe import probe
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE

logger = init_logger("vllm.plugins.flashinfer_vit")


def choices_here(
    head_dim: int,
    dtype: torch.dtype,
    forced: str | None,
    tuned_dir: Path | None,
    *,
    fp8: bool = False,
) -> tuple[Choice, ...]:
    """Return the choices that this machine can run; it may run kernels to find out.

    Where `VLLM_BATCH_INVARIANT` is set they are those of `usable_choices` for that.

    Args:
        head_dim: Head dim in elements.
        dtype: Activation dtype.
        forced: The kernel that the user forces, or None.
        tuned_dir: Folder of the user's measurements, or None to ignore them.
        fp8: The layers are those with FP8 attention. The choices have no FP8 kernel
            where FP8 was at no length faster when the GPU was measured.

    Raises:
        NotServedError: Nothing can serve; of FP8 layers, no FP8 kernel. The message
            says only why.
        TableError: A file of measured choices cannot be used.
    """
    stack = probe(libraries=False)
    if current_platform.is_cpu():
        # It may run there although there is a GPU, as in `encode --device cpu`.
        stack = replace(stack, gpus=())
    if forced is None and not stack.gpus and current_platform.is_cuda():
        # Plain PyTorch, which serves machines without a GPU, is no choice there.
        raise NotServedError(
            "vLLM runs on CUDA, but NVML shows this process no GPU; "
            "`vllm-flashinfer-vit doctor` says more"
        )
    choices, refusals = usable_choices(
        stack,
        head_dim,
        dtype,
        forced,
        tuned_dir,
        fp8=fp8,
        invariant=envs.VLLM_BATCH_INVARIANT,
        attempt=functools.partial(attempt, head_dim=head_dim, dtype=dtype),
    )
    if not (serves_fp8(choices, refusals) if fp8 else choices):
        raise NotServedError("; ".join(refusals.values()))
    for refusal in refusals.values():
        logger.warning_once("vllm-flashinfer-vit does not use the kernel %s", refusal)
    if forced or envs.VLLM_BATCH_INVARIANT:
        return choices
    names = {name for choice in choices for name in choice.kernels}
    if stack.inspected is None and any(KERNELS[n].needs.on_cudnn for n in names):
        # cuDNN's version counts here, too.
        stack = replace(probe(), gpus=stack.gpus)
    measured = FP8_DTYPE if fp8 else dtype
    if note := other_versions(stack, measured, head_dim, tuned_dir):
        logger.info_once("vllm-flashinfer-vit: %s", note)
    return choices


@functools.cache
def gemms_here(tuned_dir: Path | None) -> Mapping[str, GemmChoice]:
    """Return what is known of the GEMMs of this machine's GPU, by `GemmLayer.key`.

    The first call for a folder decides for the process.

    Args:
        tuned_dir: Folder of the user's measurements, or None to ignore them.

    Raises:
        TableError: A file of measured choices cannot be used.
    """
    return MappingProxyType(measured_gemms(probe(libraries=False), tuned_dir))

# SPDX-License-Identifier: Apache-2.0
"""Build vLLM's vision towers on a machine without a GPU.

vLLM's CUDA wheel finds no platform there, and its CPU platform expects operators that
only the CPU wheel has. Vision towers need none of them, once they run on plain PyTorch.
"""

import os
import sys
from typing import Any

import torch

_MODELS = "vllm.model_executor.models."


def use_cpu_platform(*, force: bool = False) -> None:
    """Make vLLM run models on the CPU; call it before vLLM's models are imported.

    Without `force`, nothing happens where vLLM has found a platform of its own.

    Args:
        force: Take the CPU even where vLLM sees a GPU.

    Raises:
        RuntimeError: A model has been imported for another platform already.
    """
    import vllm.platforms
    from vllm.platforms.interface import PlatformEnum

    platform = vllm.platforms.current_platform
    if platform._enum == PlatformEnum.CPU:
        return
    if platform._enum != PlatformEnum.UNSPECIFIED:
        if not force:
            return
        if loaded := sorted(name for name in sys.modules if name.startswith(_MODELS)):
            raise RuntimeError(
                f"{loaded[0]} was imported for {platform.device_name} before "
                "use_cpu_platform() was called; call it first in the process"
            )
    # Modules hold this very object and would not see another, so its class changes.
    platform.__class__ = _cpu_platform_class()
    _disable_pinned_memory()
    _replace_activations()
    _keep_weights_unpacked()
    _answer_for_memory()


def _cpu_platform_class() -> type:
    from vllm.platforms.cpu import CpuPlatform

    class VisionCpuPlatform(CpuPlatform):
        """vLLM's CPU platform for vision towers alone, from any vLLM wheel."""

        @classmethod
        def check_and_update_config(cls, vllm_config: object) -> None:
            """Leave the process alone: no engine is tuned, no thread is bound."""

        @classmethod
        def import_kernels(cls) -> None:
            """Load none: only the CPU wheel has them."""

    return VisionCpuPlatform


def _disable_pinned_memory() -> None:
    # Some modules import this one's PIN_MEMORY, so it must be there to be changed.
    import vllm.utils.torch_utils  # noqa: F401
    from vllm.utils.platform_utils import is_pin_memory_available

    is_pin_memory_available.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and hasattr(module, "PIN_MEMORY"):
            module.PIN_MEMORY = False  # type: ignore[attr-defined]


def _answer_for_memory() -> None:
    # Gemma 4's model asks how many images it may encode at once.
    if not torch.accelerator.is_available():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        torch.accelerator.get_memory_info = lambda device_index=None: (memory, memory)


def _replace_activations() -> None:
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.activation import QuickGELU, SiluAndMul

    def plain(self: Any, **options: bool) -> None:
        CustomOp.__init__(self, **options)

    # They look for compiled operators, SiluAndMul in vLLM 0.30, and do without here.
    for activation in (QuickGELU, SiluAndMul):
        name = activation.__name__
        if name not in op_registry_oot:
            without = type(f"Plain{name}", (activation,), {"__init__": plain})
            activation.register_oot(without)


def _keep_weights_unpacked() -> None:
    import vllm.model_executor.layers.utils as linear

    # On a CPU with AMX, small layers ask for an operator that only the CPU wheel has.
    if not hasattr(torch.ops._C, "convert_weight_packed"):
        linear.check_cpu_sgl_kernel = lambda *shape_and_dtype: False

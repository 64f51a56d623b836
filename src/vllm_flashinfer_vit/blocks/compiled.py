# SPDX-License-Identifier: Apache-2.0
"""vLLM's own compiled activations and norms, where the engine would not run them.

The engine's default turns them off for the language model, which it compiles; encoders
are left uncompiled, so that each op would run as several kernels.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def has_compiled(*names: str) -> bool:
    """Whether this process has ops of these names in vLLM's library, and runs CUDA."""
    from vllm.platforms import current_platform

    return current_platform.is_cuda() and all(
        hasattr(torch.ops._C, name) for name in names
    )


def can_run_compiled() -> bool:
    """Whether `compiled_ops` may be entered."""
    from vllm import envs

    return not envs.VLLM_BATCH_INVARIANT and has_compiled(
        "rms_norm", "fused_add_rms_norm", "silu_and_mul"
    )


@contextmanager
def compiled_ops(act: Any) -> Iterator[None]:
    """Run RMSNorms, and an activation if it is SwiGLU, by vLLM's compiled kernels.

    Args:
        act: The MLPs' activation, which all blocks share with any other model of this
            process.
    """
    from vllm import ir
    from vllm.model_executor.layers.activation import SiluAndMul

    with ExitStack() as stack:
        for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
            # Anything but `native` is a choice that the user or the platform made.
            if op.get_priority() in ([], ["native"]):
                stack.enter_context(op.set_priority(["vllm_c", "native"]))
        if isinstance(act, SiluAndMul):
            stack.callback(setattr, act, "_forward_method", act._forward_method)
            act._forward_method = act.forward_cuda
        yield

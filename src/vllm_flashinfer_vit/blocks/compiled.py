# SPDX-License-Identifier: Apache-2.0
"""vLLM's own compiled RMSNorm, where the engine would not run it.

The engine's default turns it off for the language model, which it compiles; encoders
are left uncompiled, so that each norm would run as several kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def can_run_compiled() -> bool:
    """Whether `compiled_norms` may be entered: on CUDA, with vLLM's library loaded."""
    from vllm import envs
    from vllm.platforms import current_platform

    return (
        not envs.VLLM_BATCH_INVARIANT
        and current_platform.is_cuda()
        and hasattr(torch.ops._C, "rms_norm")
    )


@contextmanager
def compiled_norms() -> Iterator[None]:
    """Run RMSNorms by vLLM's compiled kernel while the context lasts."""
    from vllm import ir

    op = ir.ops.rms_norm
    # Anything but `native` is a choice that the user or the platform made.
    if op.get_priority() not in ([], ["native"]):
        yield
        return
    with op.set_priority(["vllm_c", "native"]):
        yield

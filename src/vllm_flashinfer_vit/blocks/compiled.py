# SPDX-License-Identifier: Apache-2.0
"""vLLM's own compiled norms and activations, where the engine would not run them.

The engine's default turns them off for the language model, which it compiles; encoders
are left uncompiled, so that each op would run as several kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_flashinfer_vit.kernels._vllm_ops import compiled_op


def can_run_compiled() -> bool:
    """Whether `compiled_norms` may be entered."""
    from vllm import envs

    return not envs.VLLM_BATCH_INVARIANT and compiled_op("rms_norm") is not None


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

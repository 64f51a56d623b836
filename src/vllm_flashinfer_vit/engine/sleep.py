# SPDX-License-Identifier: Apache-2.0
"""What vLLM's sleep mode asks of this package.

An engine that sleeps has no memory at the addresses that were allocated while its model
was loaded. Test runs are then, too.
"""

from typing import Any

import torch


def may_sleep(vllm_config: Any) -> bool:
    """Whether vLLM may take the memory away that the model was loaded into.

    Args:
        vllm_config: vLLM's `VllmConfig`.
    """
    # The allocator alone is enough: a worker then sleeps when it is asked to.
    return any(
        getattr(vllm_config.model_config, name, False)
        for name in ("enable_sleep_mode", "enable_cumem_allocator")
    )


def forget_blas_workspaces() -> None:
    """Have PyTorch allocate cuBLAS's workspaces anew at their next use.

    It keeps one for each stream as long as the process. One that a test run's GEMM made
    would be without memory while the engine sleeps: a trainer's GEMMs, in a process
    that both share, would write there. Call it before any CUDA graph is captured, which
    holds the address.
    """
    torch._C._cuda_clearCublasWorkspaces()

# SPDX-License-Identifier: Apache-2.0
"""What serves attention in the benchmarks of the op: stock vLLM and this package."""

from typing import Any

import torch


def layer_plan(
    head_dim: int, dtype: torch.dtype, forced: str | None, *, is_fp8: bool
) -> Any:
    """Return the plan of a layer on this machine.

    Args:
        head_dim: D, in elements.
        dtype: Activation dtype.
        forced: A kernel's name, or None for the package's own choice.
        is_fp8: Whether the layer attends in FP8.
    """
    from vllm_flashinfer_vit.choices.lookup import plan_of
    from vllm_flashinfer_vit.engine.selection import resolve
    from vllm_flashinfer_vit.fp8.policy import resolve_fp8
    from vllm_flashinfer_vit.settings import Settings

    look_up = resolve_fp8 if is_fp8 else resolve
    return plan_of(look_up(head_dim, dtype, forced, Settings.from_env().tuned_dir))

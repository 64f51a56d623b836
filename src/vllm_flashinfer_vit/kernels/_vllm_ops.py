# SPDX-License-Identifier: Apache-2.0
"""Ops of vLLM's compiled library, as they are launched without its layers."""

from collections.abc import Callable
from typing import Any

import torch


def compiled_op(name: str) -> Callable[..., Any] | None:
    """Return an op of vLLM's library, None without it in this process or CUDA."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    return getattr(getattr(torch.ops._C, name, None), "default", None)

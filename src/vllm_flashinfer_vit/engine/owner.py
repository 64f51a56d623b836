# SPDX-License-Identifier: Apache-2.0
"""What the module that a layer belongs to does for it, and leaves to it."""

from collections.abc import Callable
from typing import Any

# Attribute of a function, which `functools.wraps` copies.
_LEAVES_ROTARY = "vllm_flashinfer_vit_leaves_rotary"


def leaves_rotary(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a `forward` that hands q and k to its layer unturned, with cos and sin."""
    vars(forward)[_LEAVES_ROTARY] = True
    return forward


def gets_rotary(owner: type | None) -> bool:
    """Whether a layer turns q and k itself.

    Args:
        owner: The class of the module that the layer belongs to, or None.
    """
    return hasattr(getattr(owner, "forward", None), _LEAVES_ROTARY)

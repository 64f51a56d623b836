# SPDX-License-Identifier: Apache-2.0
"""What the module that a layer belongs to does for it, and leaves to it."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

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


class OwnerSearch:
    """Waits until a layer becomes a part of a module, whose class it then knows.

    torch asks for every submodule of the process, so `end` it once the model is built.

    Attributes:
        owner: The class of the module, or None so far.
    """

    def __init__(self, layer: nn.Module) -> None:
        """Begin; it ends with the layer, too."""
        self.owner: type | None = None
        wanted = weakref.ref(layer)

        def note(module: nn.Module, name: str, child: object) -> None:
            if self.owner is None and child is wanted():
                self.owner = type(module)

        handle = register_module_module_registration_hook(note)
        self.end = weakref.finalize(layer, handle.remove)

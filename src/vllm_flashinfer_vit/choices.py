# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves which class of calls: the one table, and its encoding.

A class is a range of longest-sequence lengths. A layer resolves its table once, and
hands it to the custom op as a string, so that compiled graphs hold no Python object.
"""

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from vllm_flashinfer_vit.config import ENV_KERNEL, KernelName


class Choice(NamedTuple):
    """One class of calls and the kernel that serves it.

    Attributes:
        kernel: The kernel's name.
        max_len: Longest sequence of the class, in tokens; None for any length.
        reason: Why this kernel, with the measurement's origin.
    """

    kernel: KernelName
    max_len: int | None
    reason: str


# Longest sequence, in tokens, that a kernel takes; the others take any.
SERVES_UP_TO: Mapping[KernelName, int] = MappingProxyType({"triton_window": 128})

_UNMEASURED = "unmeasured by this project on this GPU"

_NO_GPU = (Choice("reference", None, "no GPU: plain PyTorch serves every length"),)

_HOPPER = (
    Choice("triton_window", 128, "placeholder until measured"),
    Choice("flash_attn", None, "placeholder until measured"),
)

_BLACKWELL = (
    Choice("triton_window", 128, f"{_UNMEASURED}; one pass from the projection"),
    Choice("cudnn", None, f"{_UNMEASURED}; cuDNN leads in published figures"),
)

_OTHER = (
    Choice("triton_window", 128, f"{_UNMEASURED}; one pass from the projection"),
    Choice("flash_attn", None, f"{_UNMEASURED}; vLLM's own default kernel"),
)


def choices_for(capability: tuple[int, int] | None) -> tuple[Choice, ...]:
    """Return the table for a GPU, classes ascending, the last one unbounded.

    Args:
        capability: CUDA compute capability, or None for a machine without a GPU.
    """
    if capability is None:
        return _NO_GPU
    return {9: _HOPPER, 10: _BLACKWELL, 12: _BLACKWELL}.get(capability[0], _OTHER)


def forced(choices: Iterable[Choice], kernel: KernelName) -> tuple[Choice, ...]:
    """Give a kernel every class that it takes; longer ones keep their choice."""
    bound = SERVES_UP_TO.get(kernel)
    first = Choice(kernel, bound, f"forced by {ENV_KERNEL}")
    if bound is None:
        return (first,)
    longer = (c for c in choices if c.max_len is None or c.max_len > bound)
    return (first, *longer)


def without(choices: Iterable[Choice], kernel: KernelName) -> tuple[Choice, ...]:
    """Drop a kernel that cannot run; its classes go to the class above or below."""
    kept = [choice for choice in choices if choice.kernel != kernel]
    if kept:
        kept[-1] = kept[-1]._replace(max_len=None)
    return tuple(kept)


def encode(choices: Iterable[Choice]) -> str:
    """Write choices as the op's `plan` argument, e.g. `128:cudnn,*:flash_attn`."""
    return ",".join(
        f"{'*' if choice.max_len is None else choice.max_len}:{choice.kernel}"
        for choice in choices
    )


@functools.cache
def _decode(plan: str) -> tuple[tuple[int | None, str], ...]:
    entries = (entry.split(":") for entry in plan.split(","))
    return tuple((None if n == "*" else int(n), kernel) for n, kernel in entries)


def select(plan: str, max_len: int) -> str:
    """Return the kernel's name for sequences of up to `max_len` tokens."""
    for bound, kernel in _decode(plan):
        if bound is None or max_len <= bound:
            return kernel
    raise ValueError(f"plan {plan!r} has no class for {max_len} tokens")

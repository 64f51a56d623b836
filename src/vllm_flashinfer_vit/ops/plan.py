# SPDX-License-Identifier: Apache-2.0
"""A layer's plan: which kernel serves which batches.

A plan is a string only where a compiled graph holds it, since that holds no object.
"""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple, Self

# Batches with fewer rows to a sequence, empty ones included, are of many sequences.
LEAST_MEAN_LEN = 512


class Class(NamedTuple):
    """A range of longest sequences, and the kernels that serve it.

    Attributes:
        max_len: Longest sequence of the class, in tokens; None for any length.
        kernel: The kernel's name.
        many: The kernel for batches of many sequences, most of which may be empty; None
            if `kernel` serves them too.
    """

    max_len: int | None
    kernel: str
    many: str | None = None

    def kernel_for(self, mean_len: float) -> str:
        """Return the kernel of a batch with so many rows to a sequence."""
        return self.many if self.many and mean_len < LEAST_MEAN_LEN else self.kernel


@dataclass(frozen=True)
class Plan:
    """Classes of calls, ascending, the last one unbounded.

    Attributes:
        classes: The classes.
        text: The same as `128:triton_window,*:flash_attn_4/flash_attn`; the kernel for
            many sequences stands after a slash.
    """

    classes: tuple[Class, ...]
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Write the text once: compiled code reads it as a constant."""
        entries = (
            f"{'*' if max_len is None else max_len}:"
            + "/".join(filter(None, (kernel, many)))
            for max_len, kernel, many in self.classes
        )
        object.__setattr__(self, "text", ",".join(entries))

    @classmethod
    def of(cls, kernel: str) -> Self:
        """Return the plan that runs one kernel for every batch."""
        return cls((Class(None, kernel),))

    @classmethod
    @functools.cache
    def decode(cls, text: str) -> "Plan":
        """Return the plan of a text.

        Raises:
            ValueError: It is no such text.
        """
        classes = []
        for entry in text.split(","):
            bound, colon, kernels = entry.partition(":")
            kernel, _, many = kernels.partition("/")
            if not (colon and kernel and (bound == "*" or bound.isdecimal())):
                raise ValueError(f"{entry!r} is no class of a plan such as 128:triton")
            max_len = None if bound == "*" else int(bound)
            classes.append(Class(max_len, kernel, many or None))
        return cls(tuple(classes))

    @property
    def kernels(self) -> frozenset[str]:
        """The names of its kernels."""
        return frozenset(
            name for c in self.classes for name in (c.kernel, c.many) if name
        )

    @property
    def bounds(self) -> tuple[int, ...]:
        """The longest lengths of the bounded classes, in tokens, ascending."""
        return tuple(c.max_len for c in self.classes if c.max_len is not None)

    def kernel_for(self, max_len: int, mean_len: float | None = None) -> str:
        """Return the name of a batch's kernel.

        Args:
            max_len: An upper bound of the sequence lengths, in tokens.
            mean_len: Rows of the batch for each of its sequences, in a CUDA graph of
                those that it was captured for. None for sequences that all have the
                length.

        Raises:
            ValueError: The plan has no class for the length.
        """
        return self.class_for(max_len).kernel_for(
            max_len if mean_len is None else mean_len
        )

    def class_for(self, max_len: int) -> Class:
        """Return the class of batches whose sequences have at most `max_len` tokens.

        Raises:
            ValueError: The plan has none.
        """
        for found in self.classes:
            if found.max_len is None or max_len <= found.max_len:
                return found
        raise ValueError(f"plan {self.text!r} has no class for {max_len} tokens")

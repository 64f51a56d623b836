# SPDX-License-Identifier: Apache-2.0
"""A patch: one attribute of one vLLM class, why it is wrapped, and how to undo it."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class PatchError(RuntimeError):
    """A patch does not fit the vLLM that is installed."""


@dataclass
class Patch:
    """Replaces `target` by `replace(original)`, and can put the original back.

    Attributes:
        name: The name that settings and `doctor` use.
        target: `module:Class.attribute`, a plain function or a class method.
        why: What is wrong or slow without it.
        vllm_range: The vLLM releases that it was checked with, first and last.
        remove_when: The upstream state that makes it superfluous.
        parameters: Parameter names that the original must have, in order.
        replace: Takes the original function and returns the new one.
    """

    name: str
    target: str
    why: str
    vllm_range: tuple[str, str]
    remove_when: str
    parameters: tuple[str, ...]
    replace: Callable[[Callable[..., Any]], Callable[..., Any]]
    _original: Any = field(default=None, init=False, repr=False)

    @property
    def applied(self) -> bool:
        """Whether the replacement is in place."""
        return self._original is not None

    @property
    def loaded(self) -> bool:
        """Whether the target's module is imported; other modules are left alone."""
        return self.target.partition(":")[0] in sys.modules

    def _owner(self) -> tuple[type, str]:
        module, _, path = self.target.partition(":")
        class_name, _, attribute = path.partition(".")
        return getattr(sys.modules[module], class_name), attribute

    def check(self) -> None:
        """Compare the target with what the patch was written for.

        Raises:
            PatchError: The target is missing or has other parameters.
        """
        try:
            owner, attribute = self._owner()
            raw = owner.__dict__[attribute]
        except (AttributeError, KeyError) as error:
            raise PatchError(f"patch {self.name}: no {self.target} in vLLM") from error
        function = raw.__func__ if isinstance(raw, classmethod) else raw
        found = tuple(inspect.signature(function).parameters)
        if found != self.parameters:
            raise PatchError(
                f"patch {self.name}: {self.target} takes {', '.join(found)}; "
                f"the patch was written for {', '.join(self.parameters)}"
            )

    def apply(self) -> None:
        """Put the replacement in place; nothing happens if it is there already."""
        if self.applied:
            return
        owner, attribute = self._owner()
        raw = owner.__dict__[attribute]
        if isinstance(raw, classmethod):
            new: Any = classmethod(self.replace(raw.__func__))
        else:
            new = self.replace(raw)
        setattr(owner, attribute, new)
        self._original = raw

    def revert(self) -> None:
        """Put the original object back."""
        if not self.applied:
            return
        owner, attribute = self._owner()
        setattr(owner, attribute, self._original)
        self._original = None

    def state(self, disabled: frozenset[str] = frozenset()) -> str:
        """Describe the patch's state in this process, for `doctor`."""
        if self.applied:
            return "applied"
        if self.name in disabled:
            return "disabled"
        if not self.loaded:
            return "not applied: its module is not loaded"
        try:
            self.check()
        except PatchError as error:
            return f"unavailable: {error}"
        return "not applied"

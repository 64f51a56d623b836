# SPDX-License-Identifier: Apache-2.0
"""A patch: one attribute of one vLLM class, why it is wrapped, and how to undo it."""

import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_flashinfer_vit.patches.fingerprints import difference, left_out
from vllm_flashinfer_vit.patches.source import is_there, parameters


class PatchError(ValueError):
    """A patch does not fit the vLLM that is installed."""


@dataclass
class Patch:
    """Replaces `target` by `replace(original)`, and can put the original back.

    Attributes:
        name: The name that settings and `doctor` use.
        target: `module:Class.attribute`, a plain function or a class method.
        why: What is wrong or slow without it.
        remove_when: The upstream state that makes it superfluous.
        parameters: Parameter names that the original must have, in order.
        stands_for: The methods whose work the replacement does, or on whose inner
            workings it counts, each `module:Class.method` or `module:function`; they
            must be as in a vLLM that they were read in. Empty if it only adds to the
            original, or answers in its place without counting on it.
        helpers: Functions that those call for their work, each as in a vLLM that it was
            read in, where there is one: not every release has it.
        replace: Takes the original function and returns the new one.
        compiled: Whether vLLM may compile what is replaced, or calls of it, into code
            that it caches; False only where the replacement never runs in such code.
        inherited_from: `module:Class` that defines the target's method, where its class
            inherits that; the replacement is of that class alone.
    """

    name: str
    target: str
    why: str
    remove_when: str
    parameters: tuple[str, ...]
    stands_for: tuple[str, ...]
    replace: Callable[[Callable[..., Any]], Callable[..., Any]]
    helpers: tuple[str, ...] = ()
    compiled: bool = True
    inherited_from: str = ""
    _original: Any = field(default=None, init=False, repr=False)
    _replacement: Any = field(default=None, init=False, repr=False)

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

    def _raw(self) -> Any:
        owner, attribute = self._owner()
        if self.inherited_from:
            module, _, base = self.inherited_from.partition(":")
            raw = getattr(sys.modules[module], base).__dict__[attribute]
            if (
                attribute in owner.__dict__
                or inspect.getattr_static(owner, attribute) is not raw
            ):
                raise LookupError(f"{self.target} is not inherited")
            return raw
        return owner.__dict__[attribute]

    def _found(self) -> tuple[str, ...]:
        if not self.loaded:
            return parameters(self.target, inherited_from=self.inherited_from)
        raw = self._raw()
        function = raw.__func__ if isinstance(raw, classmethod) else raw
        return tuple(inspect.signature(function).parameters)

    def check(self) -> None:
        """Compare vLLM with what the patch was written for.

        Where the target's module is not imported, its source is read instead.

        Raises:
            PatchError: The target is missing or has other parameters, or a method that
                the patch stands for is not as in any vLLM that it was read in.
        """
        if problem := self._misfit():
            raise PatchError(
                f"patch {self.name} does not fit this vLLM: {problem}. Without it: "
                f"{self.why}"
            )

    def _misfit(self) -> str | None:
        try:
            found = self._found()
        except (AttributeError, LookupError):
            base = self.inherited_from
            return f"there is no {self.target}" + (f" from {base}" if base else "")
        except (TypeError, ValueError):
            return f"what {self.target} takes cannot be told: it is no Python function"
        if found != self.parameters:
            return (
                f"{self.target} takes {', '.join(found)}; the patch was written for "
                f"{', '.join(self.parameters)}"
            )
        wanted = *self.stands_for, *filter(is_there, self.helpers)
        return "; ".join(filter(None, map(difference, wanted))) or None

    def apply(self) -> None:
        """Put the replacement in place; nothing happens if it is there already."""
        if self.applied:
            return
        owner, attribute = self._owner()
        raw = self._raw()
        if isinstance(raw, classmethod):
            new: Any = classmethod(self.replace(raw.__func__))
        else:
            new = self.replace(raw)
        setattr(owner, attribute, new)
        self._original, self._replacement = raw, new

    def revert(self) -> None:
        """Put the original object back.

        Raises:
            PatchError: Something else wraps the target since then.
        """
        if not self.applied:
            return
        owner, attribute = self._owner()
        if owner.__dict__[attribute] is not self._replacement:
            raise PatchError(
                f"patch {self.name}: {self.target} was wrapped once more; put that "
                "back first"
            )
        if self.inherited_from:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, self._original)
        self._original = self._replacement = None

    def state(self, disabled: frozenset[str] = frozenset()) -> str:
        """Describe the patch's state in this process, for `doctor`."""
        # Some are in place all the same, and ask each time whether they are.
        if self.name in disabled:
            return "disabled"
        if self.applied:
            return "applied"
        if self.name in left_out():
            return "not for this vLLM"
        try:
            self.check()
        except PatchError as error:
            return f"unavailable: {error}"
        return "not applied"


def apply_fitting(
    patches: Iterable[Patch], disabled: Collection[str] = ()
) -> tuple[PatchError, ...]:
    """Apply the patches that fit, of those whose modules are loaded.

    Each leaves the rest as it finds it; one that needs another asks whether that is
    applied. Those that are known not to be for this vLLM are passed over.

    Args:
        patches: No two of one target.
        disabled: Names of those that are not to be applied.

    Returns:
        Why others do not fit.
    """
    errors = []
    skipped = {*disabled, *left_out()}
    for patch in patches:
        if patch.applied or not patch.loaded or patch.name in skipped:
            continue
        try:
            patch.check()
        except PatchError as error:
            errors.append(error)
        else:
            patch.apply()
    return tuple(errors)


def revert_group(patches: Iterable[Patch]) -> None:
    """Put every original object back."""
    for patch in patches:
        patch.revert()

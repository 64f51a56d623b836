# SPDX-License-Identifier: Apache-2.0
"""A patch: one attribute of one vLLM class, why it is wrapped, and how to undo it."""

import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from vllm_flashinfer_vit.patches.source import parameters


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
        after: Names of the patches that this one wraps, if they are applied. Patches of
            one target must be in an order.
    """

    name: str
    target: str
    why: str
    vllm_range: tuple[str, str]
    remove_when: str
    parameters: tuple[str, ...]
    replace: Callable[[Callable[..., Any]], Callable[..., Any]]
    after: tuple[str, ...] = ()
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

    def _found(self) -> tuple[str, ...]:
        owner, attribute = self._owner()
        raw = owner.__dict__[attribute]
        function = raw.__func__ if isinstance(raw, classmethod) else raw
        return tuple(inspect.signature(function).parameters)

    def check(self) -> None:
        """Compare the target with what the patch was written for.

        Where its module is not imported, its source is read instead.

        Raises:
            PatchError: The target is missing or has other parameters.
        """
        try:
            found = self._found() if self.loaded else parameters(self.target)
        except (AttributeError, LookupError) as error:
            raise PatchError(f"patch {self.name}: no {self.target} in vLLM") from error
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
        setattr(owner, attribute, self._original)
        self._original = self._replacement = None

    def state(self, disabled: frozenset[str] = frozenset()) -> str:
        """Describe the patch's state in this process, for `doctor`."""
        if self.applied:
            return "applied"
        if self.name in disabled:
            return "disabled"
        try:
            self.check()
        except PatchError as error:
            return f"unavailable: {error}"
        return "not applied"


def in_order(patches: Iterable[Patch]) -> tuple[Patch, ...]:
    """Return patches such that each one comes after those that it names in `after`.

    Raises:
        ValueError: Names are not unique, unknown or in a circle, or patches of one
            target are in no order.
    """
    patches = tuple(patches)
    by_name = {patch.name: patch for patch in patches}
    if len(by_name) < len(patches):
        raise ValueError("two patches have one name")
    for patch in patches:
        for name in patch.after:
            if name not in by_name:
                raise ValueError(f"patch {patch.name} is after {name}, which is none")
    try:
        # By name, so that one set of patches has one order.
        order = tuple(
            TopologicalSorter(
                {name: sorted(by_name[name].after) for name in sorted(by_name)}
            ).static_order()
        )
    except CycleError as error:
        raise ValueError(f"patches are after each other: {error.args[1]}") from None
    wrapped = _wrapped(by_name[name] for name in order)
    by_target: dict[str, list[str]] = {}
    for name in order:
        by_target.setdefault(by_name[name].target, []).append(name)
    for target, names in by_target.items():
        for first, second in pairwise(names):
            if first not in wrapped[second]:
                raise ValueError(
                    f"patches {first} and {second} both replace {target}; name one of "
                    "them in the other's `after`"
                )
    return tuple(by_name[name] for name in order)


def _wrapped(ordered: Iterable[Patch]) -> dict[str, set[str]]:
    """Return by name all patches that must be applied before one, directly or not."""
    before: dict[str, set[str]] = {}
    for patch in ordered:
        nested = (before[name] for name in patch.after)
        before[patch.name] = set(patch.after).union(*nested)
    return before


def apply_group(patches: Iterable[Patch], left_out: Collection[str] = ()) -> None:
    """Apply the patches of a group whose modules are loaded: all of them, or none.

    What an earlier call applied stays, and is put on top of new patches where it has to
    be after them.

    Args:
        patches: The whole group, in any order.
        left_out: Names of those that are not to be applied.

    Raises:
        PatchError: One of them does not fit.
        ValueError: See `in_order`.
    """
    ordered = in_order(patches)
    pending = [
        patch
        for patch in ordered
        if patch.loaded and not patch.applied and patch.name not in left_out
    ]
    for patch in pending:
        patch.check()
    new, wrapped = {patch.name for patch in pending}, _wrapped(ordered)
    on_top = [p for p in ordered if p.applied and wrapped[p.name] & new]
    for patch in reversed(on_top):
        patch.revert()
    new.update(patch.name for patch in on_top)
    for patch in ordered:
        if patch.name in new:
            patch.apply()


def revert_group(patches: Iterable[Patch]) -> None:
    """Put every original object back, in the reverse order."""
    for patch in reversed(in_order(patches)):
        patch.revert()

# SPDX-License-Identifier: Apache-2.0
"""A patch applies once, refuses another vLLM, and reverts by identity."""

import sys
import types

import pytest

from vllm_flashinfer_vit.patches.patch import Patch, PatchError


@pytest.fixture
def target(monkeypatch):
    class Target:
        def method(self, x):
            return x

        @classmethod
        def make(cls, x):
            return (cls, x)

    module = types.ModuleType("patch_target")
    module.Target = Target
    monkeypatch.setitem(sys.modules, "patch_target", module)
    return Target


def plus_one(original):
    def method(self, x):
        return original(self, x) + 1

    return method


def doubled(original):
    def make(cls, x):
        return original(cls, 2 * x)

    return make


def make_patch(attribute="method", parameters=("self", "x"), replace=plus_one):
    return Patch(
        name="test",
        target=f"patch_target:Target.{attribute}",
        why="test",
        vllm_range=("0", "1"),
        remove_when="never",
        parameters=parameters,
        replace=replace,
    )


def test_method_is_wrapped_once_and_comes_back_by_identity(target):
    original = target.__dict__["method"]
    patch = make_patch()
    patch.check()
    patch.apply()
    patch.apply()
    assert target().method(1) == 2
    assert patch.state() == "applied"
    patch.revert()
    patch.revert()
    assert target.__dict__["method"] is original
    assert patch.state() == "not applied"


def test_classmethod_stays_a_classmethod(target):
    original = target.__dict__["make"]
    patch = make_patch("make", ("cls", "x"), doubled)
    patch.check()
    patch.apply()
    assert target.make(2) == (target, 4)
    patch.revert()
    assert target.__dict__["make"] is original


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (make_patch(parameters=("self", "y")), "takes self, x; .* written for self, y"),
        (make_patch("gone"), "no patch_target:Target.gone in vLLM"),
    ],
)
def test_another_vllm_is_refused(target, patch, message):
    with pytest.raises(PatchError, match=message):
        patch.check()
    assert patch.state().startswith("unavailable: ")


def test_modules_that_are_not_loaded_are_left_alone():
    patch = make_patch()
    assert not patch.loaded
    assert patch.state() == "not applied: its module is not loaded"
    assert patch.state(frozenset({"test"})) == "disabled"

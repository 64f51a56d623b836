# SPDX-License-Identifier: Apache-2.0
"""A patch applies once, in its order, refuses another vLLM, reverts by identity."""

import itertools
import sys
import types

import pytest

from vllm_flashinfer_vit import plugin
from vllm_flashinfer_vit.patches.patch import (
    Patch,
    PatchError,
    apply_group,
    in_order,
    revert_group,
)


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


def make_patch(
    attribute="method",
    parameters=("self", "x"),
    replace=plus_one,
    name="test",
    after=(),
):
    return Patch(
        name=name,
        after=after,
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
    assert patch.state(frozenset({"test"})) == "disabled"
    apply_group([patch])
    assert not patch.applied
    # Nothing has that name, as its source says.
    assert patch.state().startswith("unavailable: ")


def test_sources_are_read_where_modules_are_not_loaded(monkeypatch, tmp_path):
    (tmp_path / "patch_package").mkdir()
    (tmp_path / "patch_package" / "models.py").write_text(
        "class Target:\n    def method(self, x, *, flag=False): ...\n", "utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    patch = make_patch(parameters=("self", "x", "flag"))
    patch.target = "patch_package.models:Target.method"
    assert patch.state() == "not applied"
    patch.parameters = ("self", "x")
    assert "takes self, x, flag" in patch.state()
    patch.target = "patch_package.models:Target.gone"
    assert "no patch_package.models:Target.gone" in patch.state()
    assert "patch_package.models" not in sys.modules


def appending(letter):
    def replace(original):
        def method(self, x):
            return original(self, x) + letter

        return method

    return replace


def make_group():
    """Three patches of one target; their names say nothing about the order."""
    return [
        make_patch(name="z", replace=appending("1")),
        make_patch(name="m", replace=appending("2"), after=("z",)),
        make_patch(name="a", replace=appending("3"), after=("m",)),
    ]


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
class TestOrder:
    def test_is_that_of_the_patches(self, target, order):
        group = make_group()
        original = target.__dict__["method"]
        apply_group(group[i] for i in order)
        assert target().method("") == "123"
        revert_group(group[i] for i in order)
        assert target.__dict__["method"] is original

    def test_one_that_comes_later_goes_below(self, target, order):
        group = make_group()
        original = target.__dict__["method"]
        shuffled = [group[i] for i in order]
        apply_group(shuffled, left_out=("z",))
        assert target().method("") == "23"
        apply_group(shuffled)
        assert target().method("") == "123"
        revert_group(shuffled)
        assert target.__dict__["method"] is original


def test_a_group_that_does_not_fit_is_left_out_whole(target):
    group = [*make_group(), make_patch("make", ("cls", "y"), name="bad")]
    with pytest.raises(PatchError, match="patch bad"):
        apply_group(group)
    assert not any(patch.applied for patch in group)
    apply_group(group, left_out=("bad",))
    assert target().method("") == "123"


@pytest.mark.parametrize(
    ("patches", "message"),
    [
        ([make_patch(name="a"), make_patch("make", name="a")], "one name"),
        ([make_patch(after=("gone",))], "test is after gone"),
        (
            [
                make_patch(name="a", after=("b",)),
                make_patch("make", name="b", after=("a",)),
            ],
            "after each other",
        ),
        ([make_patch(name="a"), make_patch(name="b")], "a and b both replace"),
    ],
)
def test_orders_that_are_none(patches, message):
    with pytest.raises(ValueError, match=message):
        in_order(patches)


def test_every_patch_of_the_plugin_has_its_place():
    patches = plugin.all_patches()
    assert sorted(p.name for p in in_order(patches)) == sorted(p.name for p in patches)
    assert in_order(patches) == in_order(reversed(patches))

# SPDX-License-Identifier: Apache-2.0
"""A patch applies once, refuses another vLLM by itself, reverts by identity."""

import sys
import types

import pytest

from vllm_flashinfer_vit import plugin
from vllm_flashinfer_vit.patches import fingerprints
from vllm_flashinfer_vit.patches import patch as patch_module
from vllm_flashinfer_vit.patches.patch import (
    Patch,
    PatchError,
    apply_fitting,
    revert_group,
)
from vllm_flashinfer_vit.settings import Settings


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
    stands_for=(),
):
    return Patch(
        name=name,
        target=f"patch_target:Target.{attribute}",
        why="it is slow",
        remove_when="never",
        parameters=parameters,
        stands_for=stands_for,
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
    assert patch.state(frozenset({"test"})) == "disabled"
    patch.revert()
    patch.revert()
    assert target.__dict__["method"] is original
    assert patch.state() == "not applied"


def test_what_others_have_wrapped_since_stays(target):
    patch = make_patch()
    patch.apply()
    ours = target.__dict__["method"]
    target.method = theirs = plus_one(ours)
    with pytest.raises(PatchError, match="Target.method was wrapped once more"):
        patch.revert()
    assert patch.applied and target.__dict__["method"] is theirs
    target.method = ours
    patch.revert()
    assert target().method(1) == 1


def test_classmethod_stays_a_classmethod(target):
    original = target.__dict__["make"]
    patch = make_patch("make", ("cls", "x"), doubled)
    patch.check()
    patch.apply()
    assert target.make(2) == (target, 4)
    patch.revert()
    assert target.__dict__["make"] is original


def test_an_inherited_method_is_replaced_in_one_class(target, monkeypatch):
    class Child(target):
        pass

    class Other(target):
        def method(self, x):
            return -x

    class Grandchild(Other):
        pass

    module = sys.modules["patch_target"]
    module.Child, module.Other, module.Grandchild = Child, Other, Grandchild
    patch = make_patch()
    patch.target = "patch_target:Child.method"
    assert "no patch_target:Child.method" in patch.state()
    patch.inherited_from = "patch_target:Target"
    patch.check()
    patch.apply()
    assert (Child().method(1), target().method(1)) == (2, 1)
    patch.revert()
    assert "method" not in vars(Child) and Child().method(1) == 1
    # Of a vLLM whose class has its own or inherits another, or has another base.
    for name in ("Other", "Grandchild"):
        patch.target = f"patch_target:{name}.method"
        text = f"no patch_target:{name}.method from patch_target:Target"
        assert text in patch.state()
    patch.target, patch.inherited_from = "patch_target:Child.method", "patch_target:Not"
    assert patch.state().startswith("unavailable")


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (make_patch(parameters=("self", "y")), "takes self, x; .* written for self, y"),
        (make_patch("gone"), "there is no patch_target:Target.gone"),
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
    assert apply_fitting([patch]) == ()
    assert not patch.applied
    # Nothing has that name, as its source says.
    assert patch.state().startswith("unavailable: ")


def test_sources_are_read_where_modules_are_not_loaded(monkeypatch, tmp_path):
    (tmp_path / "patch_package").mkdir()
    (tmp_path / "patch_package" / "models.py").write_text(
        "class Target:\n    def method(self, x, *, flag=False): ...\n"
        "class Child(Target): ...\n",
        "utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    patch = make_patch(parameters=("self", "x", "flag"))
    patch.target = "patch_package.models:Target.method"
    assert patch.state() == "not applied"
    patch.parameters = ("self", "x")
    assert "takes self, x, flag" in patch.state()
    patch.target = "patch_package.models:Target.gone"
    assert "no patch_package.models:Target.gone" in patch.state()
    patch.inherited_from = "patch_package.models:Target"
    patch.parameters = ("self", "x", "flag")
    patch.target = "patch_package.models:Child.method"
    assert patch.state() == "not applied"
    patch.target = "patch_package.models:Target.method"
    assert "no patch_package.models:Target.method from" in patch.state()
    assert "patch_package.models" not in sys.modules


def test_what_it_stands_for_must_be_known(
    target: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = "vllm.one:One.first", "vllm.two:Two.second"
    patch = make_patch(stands_for=(first, second))
    told = {first: None, second: f"{second} is another one"}
    monkeypatch.setattr(patch_module, "difference", told.pop)
    assert patch.state() == (
        "unavailable: patch test does not fit this vLLM: vllm.two:Two.second is "
        "another one. Without it: it is slow"
    )
    # Both were asked for.
    assert not told


def test_a_helper_must_be_known_where_there_is_one(
    target: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "patch_target"
    patch = make_patch()
    patch.helpers = (f"{module}:gone", f"{module}:helper")
    monkeypatch.setattr(patch_module, "is_there", lambda name: name.endswith("helper"))
    monkeypatch.setattr(patch_module, "difference", lambda name: f"{name} is another")
    with pytest.raises(PatchError, match=f"vLLM: {module}:helper is another. Without"):
        patch.check()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_that_does_not_fit_is_left_out_alone(target: type, bad: int) -> None:
    group = [
        make_patch(name="first"),
        make_patch("make", ("cls", "x"), doubled, name="second"),
        make_patch("__init_subclass__", ("cls",), name="third"),
    ]
    target.__init_subclass__ = classmethod(lambda cls: None)
    group[bad].parameters = ("self", "y")
    (error,) = apply_fitting(group)
    assert f"patch {group[bad].name} does not fit" in str(error)
    assert [patch.applied for patch in group] == [at != bad for at in range(3)]
    # It is told again, and nothing is applied twice.
    assert len(apply_fitting(group)) == 1
    revert_group(group)
    assert not any(patch.applied for patch in group)


def test_names_that_are_left_out(target: type) -> None:
    group = [make_patch(), make_patch("make", ("cls", "y"), name="bad")]
    assert apply_fitting(group, disabled=("bad",)) == ()
    assert [patch.applied for patch in group] == [True, False]
    revert_group(group)


def test_what_is_known_not_to_be_for_this_vllm(
    target: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_module, "left_out", lambda: frozenset({"bad"}))
    group = [make_patch(), make_patch("make", ("cls", "y"), name="bad")]
    assert apply_fitting(group) == ()
    assert [patch.applied for patch in group] == [True, False]
    assert [patch.state() for patch in group] == ["applied", "not for this vLLM"]
    revert_group(group)


@pytest.mark.parametrize(
    "release, expected",
    [
        ("0.28.0", True),
        ("0.28.0+cu129", True),
        ("0.28.0rc1", True),
        ("99.0", False),
        # That is for `check_vllm` to say.
        ("no-version", False),
    ],
)
def test_releases_say_what_is_not_for_them(
    release: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "vllm_version", lambda: release)
    assert ("pixtral-blocks" in fingerprints.left_out()) is expected


def test_a_target_that_is_no_function(target: type) -> None:
    target.method = 7
    assert "it is no Python function" in make_patch().state()


def test_patches_have_names_and_targets_of_their_own() -> None:
    patches = plugin.all_patches()
    assert len({patch.name for patch in patches}) == len(patches)
    assert len({patch.target for patch in patches}) == len(patches)


def test_compiled_code_meets_all_patches_of_a_forward() -> None:
    unmet = {patch.target for patch in plugin.all_patches() if not patch.compiled}
    # vLLM compiles a module's `forward`, and what that calls.
    assert unmet and not any(target.endswith(".forward") for target in unmet)


def test_patches_that_no_compiled_code_meets_are_not_in_its_cache_key(
    monkeypatch: pytest.MonkeyPatch, target: type
) -> None:
    group = (make_patch(name="met"), make_patch("make", ("cls", "x"), doubled, "unmet"))
    group[1].compiled = False
    monkeypatch.setattr(plugin, "_MODEL_PATCHES", group)
    monkeypatch.setattr(plugin, "newer_note", lambda vllm: None)
    assert plugin.apply_model_patches(Settings()) == ("met",)
    assert all(patch.applied for patch in group)
    revert_group(group)


@pytest.mark.parametrize("names", [(), ("encoder-graphs",)])
def test_graphs_whose_module_is_missing(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, target: type
) -> None:
    said: list[str] = []
    group = (make_patch(), make_patch("make", ("cls", "x"), doubled, "encoder-graphs"))
    monkeypatch.setattr(plugin.encoder_graphs, "MODULE", "vllm.v1.no_such_module")
    monkeypatch.setattr(plugin, "_MODEL_PATCHES", group)
    monkeypatch.setattr(plugin, "newer_note", lambda vllm: None)
    monkeypatch.setattr(plugin, "_warn_once", said.append)
    plugin.apply_model_patches(Settings(disabled_patches=frozenset(names)))
    assert group[0].applied
    assert len(said) == 1 - len(names)
    told = "patch encoder-graphs does not fit this vLLM: No module named"
    assert all(told in line for line in said)
    with pytest.raises(PatchError, match=told):
        plugin.apply_model_patches(Settings(strict=True))
    # Asked for without FLASHINFER.
    with pytest.raises(PatchError, match=told):
        plugin.apply_graph_patches()
    revert_group(group)

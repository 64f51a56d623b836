# SPDX-License-Identifier: Apache-2.0
"""Files of FP8 scales: forms, refusals, merging, and several writers at once."""

import json
import math
import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_flashinfer_vit.fp8 import scale_files as scales
from vllm_flashinfer_vit.fp8.scale_files import (
    QKV,
    SCHEMA,
    ScaleError,
    ScaleFile,
    from_amax,
)
from vllm_flashinfer_vit.machine import files
from vllm_flashinfer_vit.machine.files import FileError

MADE_BY = {
    "command": "test",
    "version": "0",
    "vllm": "0.25.1",
    "model": "some/model",
    "method": "abs-max of 16 passes",
}
FIRST, SECOND = "visual.blocks.0.attn.attn", "visual.blocks.1.attn.attn"
AMAX = {FIRST: (QKV(448.0, 224.0, 112.0), 72), SECOND: (QKV(1.0, 2.0, 3.0), 72)}


def made(amax: dict[str, tuple[QKV, int]] = AMAX, margin: float = 1.5) -> ScaleFile:
    return from_amax(amax, margin, MADE_BY)


def put(folder: Path, document: Any) -> Path:
    path = folder / "scales.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def own() -> dict[str, Any]:
    return json.loads(scales.dumps(made()))


@pytest.mark.parametrize(
    "margin", [1e300, math.inf, math.nan, 0.0, -1.5, 1e-300, 448.1, 0.0022]
)
def test_a_margin_that_e4m3_cannot_hold(margin: float) -> None:
    with pytest.raises(ScaleError, match=rf"^--margin is {re.escape(f'{margin:g}')}:"):
        scales.check_margin(margin, "--margin")


@pytest.mark.parametrize("margin", [1 / 448, 0.5, 1.0, 1.5, 448])
def test_a_margin_of_use(margin: float) -> None:
    scales.check_margin(margin, "--margin")


def test_a_scale_is_the_margin_above_the_abs_max() -> None:
    assert made().layers[FIRST].scale == (1.5, 0.75, 0.375)


def test_nothing_but_zeros_gets_a_scale_that_can_be_divided_by() -> None:
    file = made({FIRST: (QKV(0.0, 1.0, 1.0), 72)})
    assert file.layers[FIRST].scale.q == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_an_impossible_abs_max_names_the_layer(bad: float) -> None:
    with pytest.raises(ScaleError, match=FIRST):
        made({FIRST: (QKV(1.0, bad, 1.0), 72)})


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    scales.write(made(), path)
    assert scales.read(path) == made()
    assert [one.name for one in tmp_path.iterdir()] == ["scales.json"]


def test_scales_may_be_rounded_by_hand(tmp_path: Path) -> None:
    document = own()
    document["layers"][SECOND] |= {"q": 0.00335, "k": 0.0067}
    assert scales.read(put(tmp_path, document)).layers[SECOND].scale.k == 0.0067


UPSTREAM = {
    "simple": {FIRST: {"q": 2.0, "k": 1, "v": 0.5}},
    "simple-with-comment": {"note": "by hand", FIRST: {"q": 2.0, "k": 1, "v": 0.5}},
    "q_scale": {FIRST: {"q_scale": 2.0, "k_scale": 1.0, "v_scale": 0.5}},
    "nested": {"version": 1, "layers": {FIRST: {"q": 2.0, "k": 1.0, "v": 0.5}}},
}


@pytest.mark.parametrize("form", UPSTREAM)
def test_each_form_of_vllm_is_read(form: str, tmp_path: Path) -> None:
    file = scales.read(put(tmp_path, UPSTREAM[form]))
    assert file.is_upstream
    assert file.layers[FIRST].scale == (2.0, 1.0, 0.5)
    assert file.layers[FIRST].amax == (896.0, 448.0, 224.0)


def test_vllm_reads_what_is_written(tmp_path: Path) -> None:
    loader = pytest.importorskip(
        "vllm.model_executor.layers.attention.mm_encoder_attention"
    )
    path = tmp_path / "scales.json"
    scales.write(made(), path)
    read = loader._load_fp8_scales_file(str(path))
    assert read == {
        name: layer.scale._asdict() for name, layer in made().layers.items()
    }


def _layer(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        row = document["layers"][SECOND]
        for name, value in changes.items():
            if value is None:
                del row[name]
            else:
                row[name] = value

    return change


def _top(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update({name: value})


def _made_by(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["made_by"].update({name: value})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_layer(q=None), f"layers['{SECOND}'].q is missing"),
        (_layer(k=0), f"layers['{SECOND}'].k is 0"),
        (_layer(k=-1.0), f"layers['{SECOND}'].k is -1"),
        (_layer(k=1e-60), f"layers['{SECOND}'].k is 1e-60"),
        (_layer(v=math.nan), f"layers['{SECOND}'].v is nan"),
        (_layer(v=math.inf), f"layers['{SECOND}'].v is inf"),
        # Finite in fp64 alone.
        (_layer(v=4e38), "it must be positive and finite, in fp32 too"),
        (_layer(v=10**400), f"layers['{SECOND}'].v is 10"),
        (_layer(v="1"), f"layers['{SECOND}'].v is '1', not a number"),
        (_layer(v=True), f"layers['{SECOND}'].v is True, not a number"),
        (_layer(amax=None), f"layers['{SECOND}'].amax is missing"),
        (
            _layer(amax={"q": -1, "k": 1, "v": 1}),
            f"layers['{SECOND}'].amax.q is -1",
        ),
        (_layer(head_dim=0), f"layers['{SECOND}'].head_dim is 0"),
        (_layer(k=0.0607), f"layers['{SECOND}'].k is 0.0607, where amax.k times"),
        (
            _layer(amax={"q": 1.0, "k": 2.0, "v": 30.0}),
            "margin over 448 is 0.100446; a number was changed",
        ),
        (_top("schema", "vllm-flashinfer-vit/fp8-scales/2"), "schema is"),
        (_top("schema", None), "schema is None, not"),
        (_top("layers", []), "layers is [], not an object"),
        (_top("layers", {}), "it holds no layer"),
        (_top("layers", {FIRST: 1.0}), f"layers['{FIRST}'] is 1.0, not an object"),
        (_top("made_by", None), "made_by is None, not an object"),
        (_made_by("model", 1), "made_by.model is 1, not a string"),
        (_made_by("margin", 0), "made_by.margin is 0"),
        (_made_by("margin", 2.5), f"layers['{FIRST}'].q is 1.5, where amax.q"),
    ],
)
def test_a_file_that_breaks_the_schema_is_refused(
    change: Callable[[dict[str, Any]], None], what: str, tmp_path: Path
) -> None:
    document = own()
    change(document)
    path = put(tmp_path, document)
    with pytest.raises(ScaleError) as caught:
        scales.read(path)
    assert what in str(caught.value)
    assert str(path) in str(caught.value)
    assert "calibrate" in str(caught.value)


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ("", "Expecting value"),
        ("[]", "the document is [], not an object"),
        ("{}", "holds no layer"),
        ('{"a": 1}', "holds no layer"),
        (scales.dumps(made())[:-40], ""),
        ("[" * 200_000, "too deeply nested"),
        ({FIRST: {"q": 1.0, "v": 1.0}}, f"['{FIRST}'].k is missing"),
        ({"schema": SCHEMA.replace("fp8-scales", "choices")}, "schema is"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(
    document: Any, what: str, tmp_path: Path
) -> None:
    path = put(tmp_path, document)
    with pytest.raises(ScaleError) as caught:
        scales.read(path)
    assert what in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScaleError, match="nothing.json"):
        scales.read(tmp_path / "nothing.json")


class TestLookUp:
    path = Path("the-file.json")

    def test_a_layer(self) -> None:
        found = scales.scales_for(made(), self.path, FIRST, 72)
        assert found == made().layers[FIRST]

    def test_a_missing_layer(self) -> None:
        told = rf"'other'.*the-file.json.*{FIRST}.*; make another by"
        with pytest.raises(ScaleError, match=told):
            scales.scales_for(made(), self.path, "other", 72)

    def test_another_head_dim(self) -> None:
        told = rf"'{FIRST}' has head dim 80, but 72.*; make another by"
        with pytest.raises(ScaleError, match=told):
            scales.scales_for(made(), self.path, FIRST, 80)

    def test_a_layer_that_the_model_lacks(self) -> None:
        with pytest.raises(ScaleError, match=rf"'{SECOND}'.*the-file.json"):
            scales.check_no_others(made(), self.path, [FIRST])
        scales.check_no_others(made(), self.path, [FIRST, SECOND, "third"])

    @pytest.mark.parametrize(
        ("layers", "named"), [("abc", "a, b, c"), ("abcd", "a, b, c and 1 more")]
    )
    def test_no_more_than_three_layers_are_named(self, layers: str, named: str) -> None:
        with pytest.raises(ScaleError, match=f"model's layers: {named}; make"):
            scales.check_no_others(made(), self.path, list(layers))


class TestMerging:
    def test_takes_the_largest_of_each(self) -> None:
        other = made({FIRST: (QKV(1.0, 300.0, 1.0), 72)}, margin=2.0)
        merged = scales.merge(made(), other)
        assert merged.layers[FIRST].amax == (448.0, 300.0, 112.0)
        assert merged.layers[FIRST].scale.q == 2.0
        assert merged.layers[SECOND].amax == (1.0, 2.0, 3.0)
        assert merged.margin == 2.0

    @given(st.permutations(range(4)))
    def test_the_order_does_not_matter(self, order: list[int]) -> None:
        files = [
            made({FIRST: (QKV(float(7 * i % 5), 1.0 + i, 9.0 - i), 72)})
            for i in range(4)
        ]
        merged = files[order[0]]
        for i in order[1:]:
            merged = scales.merge(merged, files[i])
        assert merged.layers[FIRST].amax == (4.0, 4.0, 9.0)

    def test_a_file_of_another_model(self, tmp_path: Path) -> None:
        with pytest.raises(ScaleError, match=r"old\.json .*'some/model', not of 'ano"):
            scales.check_model(made(), Path("old.json"), "another")
        scales.check_model(made(), Path("old.json"), "some/model")
        upstream = scales.read(put(tmp_path, UPSTREAM["simple"]))
        scales.check_model(upstream, Path("old.json"), "another")

    def test_two_head_dims(self) -> None:
        other = made({FIRST: (QKV(1.0, 1.0, 1.0), 80)})
        with pytest.raises(ScaleError, match=rf"'{FIRST}' has head dims \[72, 80\]"):
            scales.merge(made(), other)

    def test_a_file_of_vllm(self, tmp_path: Path) -> None:
        old = scales.read(put(tmp_path, {FIRST: {"q": 2.0, "k": 0.1, "v": 0.1}}))
        merged = scales.merge(old, made())
        assert merged.layers[FIRST].amax == (896.0, 224.0, 112.0)
        assert not merged.is_upstream
        again = scales.merge(merged, made())
        for file, passes in ((merged, 16), (again, 32)):
            method = f"vLLM's signed maxima + abs-max of {passes} passes"
            assert file.made_by["method"] == method
            assert file.has_signed_maxima
        assert old.has_signed_maxima
        assert not made().has_signed_maxima

    def test_names_both_origins(self) -> None:
        def of(method: str) -> ScaleFile:
            return from_amax(AMAX, 1.5, {**MADE_BY, "method": method})

        merged = of("abs-max of 100 images")
        for method in ("abs-max of 1 images", "by hand", "abs-max of 16 passes"):
            merged = scales.merge(merged, of(method))
        merged = scales.merge(merged, of("by hand"))
        assert merged.made_by["method"] == (
            "abs-max of 101 images + by hand + abs-max of 16 passes"
        )

    def test_a_file_of_vllm_of_another_model(self, tmp_path: Path) -> None:
        old = scales.read(put(tmp_path, {"other": {"q": 1.0, "k": 1.0, "v": 1.0}}))
        with pytest.raises(ScaleError, match="'other' is not a layer of this model"):
            scales.merge(old, made())


class TestSaving:
    def test_adds_to_what_is_there(self, tmp_path: Path) -> None:
        path = tmp_path / "scales.json"
        scales.save(made(), path)
        scales.save(made({FIRST: (QKV(900.0, 1.0, 1.0), 72)}), path)
        assert scales.read(path).layers[FIRST].amax == (900.0, 224.0, 112.0)

    @pytest.mark.parametrize(
        ("document", "what"),
        [
            ({FIRST: {"q": 1.0, "k": 1.0, "v": 1.0}}, "not written by this package"),
            ("{", "cannot be used"),
        ],
    )
    def test_keeps_a_file_that_is_not_its_own(
        self, document: Any, what: str, tmp_path: Path
    ) -> None:
        path = put(tmp_path, document)
        before = path.read_bytes()
        with pytest.raises(ScaleError, match=what):
            scales.save(made(), path)
        assert path.read_bytes() == before

    def test_keeps_a_file_of_another_model(self, tmp_path: Path) -> None:
        path = tmp_path / "scales.json"
        scales.save(from_amax(AMAX, 1.5, {**MADE_BY, "model": "another"}), path)
        with pytest.raises(ScaleError, match="model 'another', not of 'some/model'"):
            scales.check_mergeable(path, "some/model")

    def test_says_that_another_process_makes_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "scales.json"
        monkeypatch.setattr(scales, "_SAVE_TIMEOUT_S", 0.0)
        with (
            files.locked(path),
            pytest.raises(FileError, match=r"scales\.json is being made by another"),
        ):
            scales.save(made(), path)

    def test_what_cannot_be_written_is_said_before(self, tmp_path: Path) -> None:
        with pytest.raises(FileError, match="it is a folder"):
            scales.check_mergeable(tmp_path, "some/model")

    def test_a_failure_keeps_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "scales.json"
        scales.save(made(), path)

        def fail(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(FileError, match=r"scales\.json .*No space"):
            scales.save(made({"third": AMAX[FIRST]}), path)
        assert scales.read(path) == made()
        assert [one.name for one in tmp_path.iterdir()] == ["scales.json"]

    def test_scales_that_would_be_refused_are_not_written(self, tmp_path: Path) -> None:
        path = tmp_path / "scales.json"
        wide = made({FIRST: (QKV(1e38, 1.0, 1.0), 72)}, margin=1e30)
        with pytest.raises(ScaleError, match=rf"scales\.json .*'{FIRST}'\]\.q is 2"):
            scales.write(wide, path)
        assert not path.exists()

    def test_many_processes_lose_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "scales.json"
        context = multiprocessing.get_context("spawn")
        # None starts before all are there: else one may have ended by then.
        barrier = context.Barrier(4)
        children = [
            context.Process(target=_save_some, args=(path, index, barrier))
            for index in range(4)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(120)
        assert [child.exitcode for child in children] == [0] * 4
        layers = scales.read(path).layers
        assert layers["shared"].amax == (40.0, 1.0, 1.0)
        assert {f"own.{index}.{n}" for index in range(4) for n in range(SAVES)} < set(
            layers
        )


SAVES = 20


def _save_some(path: Path, index: int, barrier: Any) -> None:
    one = QKV(1.0, 1.0, 1.0)
    barrier.wait(120)
    for n in range(SAVES):
        shared = QKV(10.0 * (index + 1), 1.0, 1.0)
        scales.save(made({"shared": (shared, 72), f"own.{index}.{n}": (one, 72)}), path)

# SPDX-License-Identifier: Apache-2.0
"""The command `calibrate`: what it hands over, and what it says of an older file."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm")

from vllm_flashinfer_vit.commands import calibrate  # noqa: E402
from vllm_flashinfer_vit.commands.calibrate import LayerReport, Options, Report  # noqa: E402
from vllm_flashinfer_vit.commands.calibrate_plot import draw, import_figure  # noqa: E402
from vllm_flashinfer_vit.commands.cli import main  # noqa: E402
from vllm_flashinfer_vit.fp8 import scale_files as scales  # noqa: E402
from vllm_flashinfer_vit.fp8.scale_files import QKV  # noqa: E402
from vllm_flashinfer_vit.machine.files import FileError  # noqa: E402

REPORT = Report(
    model="some/[b]model",
    weights="checkpoint weights",
    max_pixels=None,
    failures=["Left out: [b].png."],
    depth=1,
    full_depth=2,
    dtype="bfloat16",
    device="GPU",
    kernel="triton_fp8",
    images=3,
    margin=1.5,
    layers=[LayerReport("a.layer", QKV(1, 2, 3), QKV(1, 1, 1), 1e-6, 0.05)],
    notes=["A note of [/a]."],
    versions={"vllm": "0.25.1"},
    output="scales.json",
    plot=None,
)
MADE_BY = {
    "command": "test",
    "version": "0",
    "vllm": "0.25.1",
    "model": "some/model",
    "method": "abs-max of 7 images",
}


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    calls: list[Options] = []

    def run(options: Options, console: Any) -> Report:
        calls.append(options)
        if options.margin < 0:
            raise ValueError("margin is negative")
        return REPORT

    monkeypatch.setattr(calibrate, "run", run)
    return calls


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["calibrate", "a.png", "--model", "m", *arguments])


def test_defaults(handed_over: list[Options]) -> None:
    result = invoke()
    assert handed_over == [Options(images=[Path("a.png")], model="m")]
    for expected in ("a.layer", "1.0e-06", "5.0e-02", "saved to scales"):
        assert expected in result.stdout
    # Not taken for markup.
    for expected in ("some/[b]model", "A note of [/a].", "Left out: [b].png."):
        assert expected in result.stdout
    assert result.exit_code == 1


def test_every_option(handed_over: list[Options]) -> None:
    result = invoke(
        *("--output", "o.json", "--margin", "2", "--merge", "m.json"),
        *("--plot", "p.svg", "--random-weights", "--depth", "3", "--dtype", "fp16"),
        *("--device", "cpu", "--max-pixels", "5", "--json"),
    )
    assert handed_over == [
        Options(
            images=[Path("a.png")],
            model="m",
            random_weights=True,
            depth=3,
            dtype="fp16",
            device="cpu",
            max_pixels=5,
            output=Path("o.json"),
            margin=2.0,
            merge=Path("m.json"),
            plot=Path("p.svg"),
        )
    ]
    assert json.loads(result.stdout)["layers"][0]["amax"] == [1, 2, 3]


def test_an_error_is_one_line(handed_over: list[Options]) -> None:
    result = invoke("--margin", "-1")
    assert (result.exit_code, result.stderr) == (2, "error: margin is negative\n")


def test_a_report_without_failures_is_a_success() -> None:
    assert replace(REPORT, failures=[]).exit_status == 0


def file(amax: QKV) -> scales.ScaleFile:
    return scales.from_amax({"a.layer": (amax, 72)}, 1.0, MADE_BY)


def test_an_older_file_that_is_wide_enough() -> None:
    notes = calibrate._differences(
        file(QKV(5, 5, 5)), Path("old.json"), file(QKV(1, 2, 5))
    )
    assert notes == ["old.json is taken into account: abs-max of 7 images."]


def test_an_older_file_with_scales_of_vllms_own() -> None:
    upstream = scales.ScaleFile({"a.layer": file(QKV(5, 5, 5)).layers["a.layer"]})
    merged = scales.merge(upstream, file(QKV(1, 1, 1)))
    for old, origin in (
        (upstream, "was written by vLLM itself. vLLM's scales come from signed maxima"),
        (merged, "taken into account: vLLM's signed maxima + abs-max of 7 images. vLL"),
    ):
        (note,) = calibrate._differences(old, Path("old.json"), file(QKV(1, 1, 1)))
        assert origin in note


def test_an_older_file_that_is_too_narrow() -> None:
    notes = calibrate._differences(
        file(QKV(5, 1, 1)), Path("old.json"), file(QKV(1, 2, 5))
    )
    assert notes[1] == (
        "Its scales cut off 2 of 3 tensors here; the worst is v of a.layer, 5 times "
        "beyond."
    )


@pytest.mark.parametrize("name", ["a$b_{$c", "m\udce4l", "a\x01b", "a\nb"])
def test_a_plot_takes_any_name_of_a_model(name: str) -> None:
    pytest.importorskip("matplotlib")
    figure = import_figure(Path("plot.svg"))
    svg = draw(figure, f"/models/{name}, 3 images", [QKV(1, 2, 3)])
    ElementTree.fromstring(svg)
    shown = "".join(c if c.isprintable() else "?" for c in name)
    assert f"/models/{shown}, 3 images" in svg.decode()


def test_a_plot_that_fails_in_the_end_does_not_hide_the_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, plot = tmp_path / "scales.json", tmp_path / "plot" / "p.svg"
    plot.parent.mkdir()
    made = scales.from_amax({"a.layer": (QKV(1, 2, 3), 64)}, 1.5, MADE_BY)

    def compute(*_: Any) -> Any:
        # Hours later.
        plot.parent.rmdir()
        return REPORT, made

    monkeypatch.setattr(calibrate, "prepare", lambda _: SimpleNamespace(reads=[]))
    monkeypatch.setattr(calibrate, "import_figure", lambda _: object())
    monkeypatch.setattr(calibrate, "draw", lambda *_: b"<svg/>")
    monkeypatch.setattr(calibrate, "_calibrate", compute)
    options = Options(images=[], model="m", output=output, plot=plot)
    with pytest.raises(FileError, match=r"p\.svg cannot be written: .*") as caught:
        calibrate.run(options)
    assert str(caught.value).endswith(f"the scales were saved to {output}")
    assert scales.read(output).layers.keys() == {"a.layer"}

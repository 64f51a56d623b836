# SPDX-License-Identifier: Apache-2.0
"""The `calibrate` job: images in, scales, plot and report out, and what is refused."""

import gc
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _towers import cpu_only
from PIL import Image
from rich.console import Console

from vllm_flashinfer_vit import plugin
from vllm_flashinfer_vit.choices.usable import NotServedError
from vllm_flashinfer_vit.commands import calibrate
from vllm_flashinfer_vit.commands.images import JobError
from vllm_flashinfer_vit.engine import selection
from vllm_flashinfer_vit.fp8 import scale_files as scales
from vllm_flashinfer_vit.fp8.scale_files import QKV, ScaleError
from vllm_flashinfer_vit.fp8.state import made_by_engine
from vllm_flashinfer_vit.machine import files
from vllm_flashinfer_vit.machine.files import FileError
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES
from vllm_flashinfer_vit.towers import spec as tower_spec
from vllm_flashinfer_vit.towers import tower as towers
from vllm_flashinfer_vit.towers.spec import resolve_spec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

NAME = "visual.blocks.0.attn.attn"
MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image.png"
    values = np.random.default_rng(0).integers(0, 256, (224, 168, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


def options(image: Path, **changes: Any) -> calibrate.Options:
    values: dict[str, Any] = {
        "images": [image],
        "model": MODEL,
        "random_weights": True,
        "depth": 2,
        "dtype": "fp32",
        "device": "cpu",
        "output": image.with_name("scales.json"),
    }
    return calibrate.Options(**{**values, **changes})


@cpu_only
@pytest.mark.usefixtures("narrow")
class TestCalibrate:
    def test_writes_scales_that_a_tower_runs_with(self, image: Path) -> None:
        pytest.importorskip("matplotlib")
        plot = image.with_name("plot.svg")
        report = calibrate.run(options(image, plot=plot))
        assert [layer.name for layer in report.layers] == [
            f"visual.blocks.{i}.attn.attn" for i in range(2)
        ]
        assert all(layer.clip_rate == 0 for layer in report.layers)
        assert all(1e-3 < layer.relative_error < 0.1 for layer in report.layers)
        assert "<svg" in plot.read_text()
        json.dumps(report.to_json())
        shown = io.StringIO()
        calibrate.render(report, Console(file=shown, width=200))
        assert "visual.blocks.1.attn.attn" in shown.getvalue()

        path = Path(report.output)
        file = scales.read(path)
        assert file.layers[NAME].head_dim == 16
        spec = resolve_spec(MODEL, random_weights=True, depth=2)
        built = build_tower(
            spec,
            backend="FLASHINFER",
            dtype=torch.float32,
            device="cpu",
            attn_dtype="fp8",
            fp8_scale_path=path,
        )
        layer = next(iter(built.attention_layers().values()))
        assert layer._fp8_state.scales.tolist() == pytest.approx(
            file.layers[NAME].scale
        )
        # A tower of fewer blocks lacks layers of the file, once the other one is gone.
        del built, layer
        gc.collect()
        with pytest.raises(ValueError, match=r"blocks.1.attn.*none of this model"):
            build_tower(
                resolve_spec(MODEL, random_weights=True, depth=1),
                backend="FLASHINFER",
                dtype=torch.float32,
                device="cpu",
                attn_dtype="fp8",
                fp8_scale_path=path,
            )

    def test_clips_below_a_margin_of_1(self, image: Path) -> None:
        report = calibrate.run(options(image, margin=0.5))
        assert all(layer.clip_rate > 0 for layer in report.layers)

    def test_merges_vllms_own_file_and_says_how_it_differs(self, image: Path) -> None:
        old = image.with_name("vllm.json")
        names = [f"visual.blocks.{i}.attn.attn" for i in range(2)]
        one = {"q": 1e-4, "k": 1e3, "v": 1e3}
        old.write_text(json.dumps(dict.fromkeys(names, one)))
        report = calibrate.run(options(image, merge=old))
        assert report.layers[0].amax.k == 448e3
        assert report.layers[0].amax.q < 100
        notes = "\n".join(report.notes)
        assert "signed maxima" in notes
        assert "cut off 2 of 6 tensors here; the worst is q of visual.blocks" in notes

    def test_merges_its_own_file(self, image: Path) -> None:
        first = calibrate.run(options(image))
        path = Path(first.output)
        file = scales.read(path)
        wider = {
            name: (QKV(1000.0, *layer.amax[1:]), 16)
            for name, layer in file.layers.items()
        }
        scales.write(scales.from_amax(wider, 1.5, file.made_by), path)
        report = calibrate.run(options(image, merge=path))
        assert report.layers[0].amax == (1000.0, *first.layers[0].amax[1:])

    def test_another_models_file_is_refused_before_any_image(
        self, image: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Tower, "encode", None)
        one = QKV(1.0, 1.0, 1.0)
        made_by = made_by_engine(resolve_spec(MODEL, random_weights=True).name)
        for name, head_dim, made in (
            ("head_dim.json", 32, made_by),
            ("model.json", 16, {**made_by, "model": "another"}),
        ):
            file = scales.from_amax({NAME: (one, head_dim)}, 1.5, made)
            scales.write(file, image.with_name(name))
        old = image.with_name("vllm.json")
        old.write_text(json.dumps({"another.layer": one._asdict()}))
        with pytest.raises(ScaleError, match=r"vllm\.json .*'another\.layer' is not a"):
            calibrate.run(options(image, merge=old))
        with pytest.raises(ScaleError, match=r"head_dim\.json .* \[16, 32\]"):
            calibrate.run(options(image, merge=image.with_name("head_dim.json")))
        # Said before the tower is built.
        monkeypatch.setattr(calibrate, "build", None)
        with pytest.raises(ScaleError, match=r"model\.json .*'another', not of 'Qwen"):
            calibrate.run(options(image, merge=image.with_name("model.json")))

    def test_merges_no_layer_that_the_tower_does_not_have(
        self, image: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        family, config = tower_spec.NAMED_MODELS[MODEL]
        short = {MODEL: (family, {**config, "depth": 2})}
        monkeypatch.setattr(tower_spec, "NAMED_MODELS", short)
        old = Path(calibrate.run(options(image)).output)
        file = scales.read(old)
        renamed = {"old.name": (QKV(1.0, 1.0, 1.0), 16)}
        wider = scales.merge(file, scales.from_amax(renamed, 1.5, file.made_by))
        scales.write(wider, old)
        with pytest.raises(ScaleError, match=r"'old\.name' .* none of this model's"):
            calibrate.run(options(image, merge=old))
        # Files of more blocks than are built are no others'.
        assert len(calibrate.run(options(image, merge=old, depth=1)).layers) == 1

    @pytest.mark.parametrize(
        ("changes", "what"),
        [
            ({"margin": 1e300}, r"--margin is 1e\+300: use a number from 1/448 to 448"),
            ({"margin": 0.0}, "--margin is 0: use a number"),
            ({"margin": float("nan")}, "--margin is nan: use a number"),
            ({"merge": Path("/nowhere/old.json")}, "/nowhere/old.json"),
        ],
    )
    def test_bad_options(
        self,
        changes: dict[str, Any],
        what: str,
        image: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(calibrate, "build", None)
        with pytest.raises(ValueError, match=what):
            calibrate.run(options(image, **changes))

    @pytest.mark.parametrize("name", ["scales.svg", "image.svg", "merge.svg"])
    def test_a_plot_on_another_file(self, name: str, image: Path) -> None:
        pytest.importorskip("matplotlib")
        image = image.rename(image.with_name("image.svg"))
        output, merge = (image.with_name(f"{stem}.svg") for stem in ("scales", "merge"))
        merge.write_text(json.dumps({NAME: {"q": 1, "k": 1, "v": 1}}))
        plot = image.with_name(name)
        before = {one.name: one.read_bytes() for one in image.parent.iterdir()}
        with pytest.raises(FileError, match=rf"{name} cannot be written: .*also uses"):
            calibrate.run(options(image, plot=plot, merge=merge, output=output))
        after = {one.name: one.read_bytes() for one in image.parent.iterdir()}
        assert after == before

    def test_output_on_an_image(self, image: Path) -> None:
        before = image.read_bytes()
        with pytest.raises(FileError, match="also uses it as"):
            calibrate.run(options(image, output=image))
        assert image.read_bytes() == before

    @pytest.mark.parametrize(
        ("what", "name"), [("output", "config.json"), ("plot", "drawing.svg")]
    )
    def test_a_file_of_the_checkpoint(self, what: str, name: str, image: Path) -> None:
        pytest.importorskip("matplotlib")
        folder = image.with_name("checkpoint")
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
        (folder / "drawing.svg").write_text("<svg/>")
        with pytest.raises(FileError, match="also uses it as"):
            calibrate.run(options(image, model=str(folder), **{what: folder / name}))

    @pytest.mark.parametrize("name", ["plot.png", "plot", "svg"])
    def test_a_plot_of_another_format(
        self, name: str, image: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Said before the options are looked at further.
        monkeypatch.setattr(calibrate, "prepare", None)
        with pytest.raises(JobError, match=rf"{name} cannot be the plot, .*\.svg"):
            calibrate.run(options(image, plot=image.with_name(name)))

    @pytest.mark.parametrize("text", ["notes", "{}", '{"model_type": "qwen2_5_vl"}'])
    def test_a_file_of_another_kind_is_not_replaced(
        self, text: str, image: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(calibrate, "build", None)
        output = image.with_name("scales.json")
        output.write_text(text)
        with pytest.raises(FileError, match=r"holds no FP8 scales .*; delete it, or"):
            calibrate.run(options(image))
        assert output.read_text() == text

    def test_replaces_scales_and_an_empty_file(self, image: Path) -> None:
        output = image.with_name("scales.json")
        output.touch()
        calibrate.run(options(image))
        first = output.read_text()
        calibrate.run(options(image, margin=2.0))
        assert scales.read(output).margin == 2.0 and output.read_text() != first

    def test_output_in_no_folder(self, image: Path) -> None:
        with pytest.raises(FileError, match="/nowhere/scales.json"):
            calibrate.run(options(image, output=Path("/nowhere/scales.json")))

    def test_a_file_that_another_run_makes(
        self, image: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output = image.with_name("scales.json")
        with (
            files.locked(output),
            monkeypatch.context() as patched,
            pytest.raises(FileError, match="is being made by another process"),
        ):
            # Said before the tower is built.
            patched.setattr(calibrate, "build", None)
            calibrate.run(options(image))
        assert not output.exists()

    def test_holds_the_file_while_it_runs(
        self, image: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output = image.with_name("scales.json")
        seen = []

        def encode(self: Tower, pixel_values: Any, grid_thw: Any) -> torch.Tensor:
            with pytest.raises(FileError, match="is being made"), files.locked(output):
                pass
            seen.append(output.exists())
            return real(self, pixel_values, grid_thw)

        real = Tower.encode
        monkeypatch.setattr(Tower, "encode", encode)
        calibrate.run(options(image))
        assert seen == [False, False]
        names = sorted(one.name for one in image.parent.iterdir())
        assert names == ["image.png", "scales.json"]

    def test_a_bad_file_in_a_folder_is_left_out(self, image: Path) -> None:
        image.with_name("bad.png").write_text("no image")
        report = calibrate.run(options(image.parent))
        assert report.images == 1
        (failure,) = report.failures
        assert failure.startswith("Left out: ")
        assert "bad.png" in failure
        assert report.exit_status == 1
        method = scales.read(Path(report.output)).made_by["method"]
        assert method == "abs-max of 1 images"

    def test_nothing_but_bad_files(self, image: Path) -> None:
        image.write_text("no image")
        with pytest.raises(JobError, match=r"no image can be used\. Left out: .*image"):
            calibrate.run(options(image.parent))
        with pytest.raises(JobError, match="cannot be read as an image"):
            calibrate.run(options(image))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_activations_that_are_not_finite(
        self, bad: float, image: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fill(visual: torch.nn.Module, seed: int) -> None:
            real(visual, seed)
            weights = dict(visual.named_parameters())
            weights["blocks.1.attn.qkv.weight"].data[0, 0] = bad

        real = towers.fill_with_random_weights
        monkeypatch.setattr(towers, "fill_with_random_weights", fill)
        with pytest.raises(JobError, match=r"image\.png: .*blocks\.1\.attn.*NaN"):
            calibrate.run(options(image))
        assert not image.with_name("scales.json").exists()

    def test_a_tower_that_flashinfer_does_not_serve(
        self, image: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As a GPU without a kernel for the dtype.
        def refuse(*_: Any) -> None:
            raise NotServedError("why")

        monkeypatch.setattr(selection, "resolve", refuse)
        with pytest.raises(NotServedError, match=r"no layer of Qwen.* in float32"):
            calibrate.run(options(image))
        assert not image.with_name("scales.json").exists()

    def test_without_block_programs(
        self, image: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        in_programs = calibrate.run(options(image))
        names = [p.name for p in plugin.all_patches() if p.name.endswith("-blocks")]
        assert names
        monkeypatch.setenv(ENV_DISABLE_PATCHES, ",".join(names))
        plugin.revert_all()
        report = calibrate.run(options(image))
        assert not any(p.applied for p in plugin.all_patches() if p.name in names)
        for one, other in zip(report.layers, in_programs.layers, strict=True):
            assert one.amax == pytest.approx(other.amax)
            assert one.relative_error == pytest.approx(other.relative_error, rel=1e-2)

    def test_a_dense_batch(self, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Layers that are called without `cu_seqlens`, as CLIP's are."""
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 150, 4, 16, generator=generator) for _ in range(3))

        def encode(self: Tower, pixel_values: Any, grid_thw: Any) -> torch.Tensor:
            with self.running():
                for layer in self.attention_layers().values():
                    out = layer(q, k, v)
            return out

        monkeypatch.setattr(Tower, "encode", encode)
        report = calibrate.run(options(image))
        assert report.layers
        for layer in report.layers:
            assert layer.amax == tuple(x.abs().max().item() for x in (q, k, v))
            assert 1e-3 < layer.relative_error < 0.1

    def test_no_matplotlib(self, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
        with pytest.raises(JobError, match=r'pip install "matplotlib>=3\.8"'):
            calibrate.run(options(image, plot=image.with_name("plot.svg")))

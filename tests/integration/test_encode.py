# SPDX-License-Identifier: Apache-2.0
"""The `encode` job: images in, table, JSON and embeddings out, and bad input."""

import io
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _encode import MODEL, options, save_image
from _towers import cpu_only
from PIL import Image
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file

from vllm_flashinfer_vit.commands import calibrate, images, job
from vllm_flashinfer_vit.commands.encode import Options, render, run
from vllm_flashinfer_vit.commands.images import ImageFile, JobError
from vllm_flashinfer_vit.machine.files import FileError
from vllm_flashinfer_vit.towers import spec as tower_spec
from vllm_flashinfer_vit.towers.spec import TowerError
from vllm_flashinfer_vit.towers.tower import Tower

EXAMPLES = Path(__file__).parents[2] / "examples" / "images"


def scales_of_model(path: Path, model: str) -> Path:
    document = json.loads(path.read_text())
    document["made_by"]["model"] = model
    copy = path.with_name(f"{model}.json")
    copy.write_text(json.dumps(document))
    return copy


@cpu_only
class TestRun:
    def test_examples_on_two_backends(self, tmp_path: Path) -> None:
        output = tmp_path / "embeddings.safetensors"
        report = run(
            options(EXAMPLES, backends=["flashinfer", "TORCH_SDPA"], output=output)
        )
        names = ["astronaut.jpg", "cat.jpg", "coffee.jpg", "page.png", "rocket.jpg"]
        assert [image.name for image in report.images] == names
        saved = load_file(output)
        for image in report.images:
            frames, rows, columns = image.grid
            assert image.patches == frames * rows * columns <= 64
            assert image.tokens * 4 == image.patches
            ours = image.results["FLASHINFER"]
            assert ours.kernels == {"full": "reference"}
            assert 0 < ours.relative_error < 1e-5
            assert ours.milliseconds > 0
            stock = image.results["TORCH_SDPA"]
            assert stock.kernels == {"full": "in-tree torch_sdpa"}
            assert stock.relative_error == 0
            for backend in ("FLASHINFER", "TORCH_SDPA"):
                embedding = saved[f"{backend}/{image.name}"]
                assert embedding.shape == (image.tokens, 2048)
                assert embedding.isfinite().all()
        page = report.images[3]
        assert (page.width, page.height) == (1240, 1753)
        assert page.grid[1] > page.grid[2]

    @pytest.mark.usefixtures("narrow")
    def test_output_describes_itself(self, tmp_path: Path) -> None:
        image = save_image(tmp_path / "a.png", 100, 60)
        output = tmp_path / "embeddings.safetensors"
        report = run(options(image, output=output, dtype="bf16"))
        with safe_open(output, framework="pt") as file:
            metadata = file.metadata()
            assert list(file.keys()) == [str(image)]
            assert file.get_tensor(str(image)).dtype == torch.bfloat16
        assert metadata["model"] == MODEL
        assert metadata["depth"] == "1 of 32"
        assert metadata["backends"] == "FLASHINFER"
        assert metadata["dtype"] == metadata["attn_dtype"] == "bfloat16"
        assert metadata["weights"] == "random weights of seed 0"
        assert metadata["max_pixels"] == "12544"
        grid = report.images[0].grid
        assert metadata[f"grid_thw {image}"] == " ".join(map(str, grid))
        assert f"vllm=={report.versions['vllm']}" in metadata["versions"]

    @pytest.mark.usefixtures("narrow")
    def test_random_weights_on_a_cpu_are_announced(self, tmp_path: Path) -> None:
        image = save_image(tmp_path / "a.png", 700, 700)
        report = run(options(image, depth=None, max_pixels=None))
        assert report.depth == job.CPU_DEPTH
        assert report.images[0].patches <= job.CPU_MAX_PIXELS // 14**2
        notes = " ".join(report.notes)
        assert "only 4 of 32 blocks run; --depth 32 runs all" in notes
        assert "shrunk to 262,144 pixels; --max-pixels" in notes
        assert "Weights are random" in notes

    @pytest.mark.usefixtures("narrow")
    def test_the_table_has_every_part(self, tmp_path: Path) -> None:
        image = save_image(tmp_path / "a.png", 100, 60)
        report = run(options(image, depth=2, backends=["FLASHINFER", "TORCH_SDPA"]))
        console = Console(file=io.StringIO(), width=160)
        render(report, console)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        for part in (
            MODEL,
            "random weights of seed 0, 2 of 32 blocks",
            "100 x 60",
            "reference",
            "in-tree torch_sdpa",
        ):
            assert part in text
        assert report.to_json()["images"][0]["results"]["FLASHINFER"]["kernels"] == {
            "windows": "reference",
            "full": "reference",
        }

    @pytest.mark.usefixtures("narrow")
    def test_transparency_is_white(self, tmp_path: Path) -> None:
        transparent = np.zeros((60, 60, 4), dtype=np.uint8)
        Image.fromarray(transparent, "RGBA").save(tmp_path / "a.png")
        Image.new("RGB", (60, 60), "white").save(tmp_path / "b.png")
        output = tmp_path / "out.safetensors"
        run(options(tmp_path, output=output))
        saved = load_file(output)
        assert torch.equal(saved["a.png"], saved["b.png"])

    @pytest.mark.usefixtures("narrow")
    def test_orientation_of_the_camera_counts(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.new("RGB", (112, 56), "red").save(tmp_path / "a.jpg", exif=exif)
        report = run(options(tmp_path / "a.jpg"))
        assert report.images[0].grid == (1, 8, 4)

    @pytest.mark.usefixtures("narrow")
    def test_same_names_in_two_folders(self, tmp_path: Path) -> None:
        for name in ("x", "y"):
            (tmp_path / name).mkdir()
            save_image(tmp_path / name / "a.png", 60, 60)
        report = run(options(tmp_path / "x", tmp_path / "y"))
        assert [image.name for image in report.images] == [
            str(tmp_path / "x" / "a.png"),
            str(tmp_path / "y" / "a.png"),
        ]

    @pytest.mark.usefixtures("narrow")
    def test_a_bad_file_in_a_folder_is_left_out(self, tmp_path: Path) -> None:
        save_image(tmp_path / "a.png", 60, 60)
        (tmp_path / "b.png").write_text("no image")
        save_image(tmp_path / "c.png", 2010, 10)
        output = tmp_path / "out.safetensors"
        report = run(options(tmp_path, output=output))
        assert [image.name for image in report.images] == ["a.png"]
        assert len(report.failures) == 2
        for failure, name in zip(report.failures, ("b.png", "c.png"), strict=True):
            assert failure.startswith("Left out: ")
            assert name in failure
        assert report.exit_status == 1
        assert list(load_file(output)) == ["a.png"]

    @pytest.mark.usefixtures("narrow")
    def test_kinds_of_files_in_a_folder(self, tmp_path: Path) -> None:
        names = ["a.bmp", "b.gif", "c.TIF", "d.jfif"]
        for name in (*names, "e.ico", "f.tga"):
            Image.new("RGB", (60, 60)).save(tmp_path / name)
        for name in ("sub", ".hidden"):
            (tmp_path / name).mkdir()
        (tmp_path / "notes.txt").write_text("no image")
        report = run(options(tmp_path))
        assert [image.name for image in report.images] == names
        assert report.notes[-1] == (
            f"Not looked at in {tmp_path}: 2 image files of other kinds (.ico, .tga) "
            "and 1 folders. Give them by name."
        )
        assert report.exit_status == 0

    @pytest.mark.usefixtures("narrow")
    def test_an_image_is_cut_before_the_next_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("a.png", "b.png", "c.png"):
            save_image(tmp_path / name, 60, 60)
        pictures: list[weakref.ref[Image.Image]] = []

        def read(path: Path) -> Image.Image:
            assert not any(picture() for picture in pictures)
            picture = real(path)
            pictures.append(weakref.ref(picture))
            return picture

        real = images._read_image
        monkeypatch.setattr(images, "_read_image", read)
        assert len(run(options(tmp_path)).images) == len(pictures) == 3

    @pytest.mark.usefixtures("narrow")
    def test_no_cast_is_timed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dtypes = []

        def encode_(
            self: Tower, pixel_values: torch.Tensor, grid_thw: Any
        ) -> torch.Tensor:
            dtypes.append((pixel_values.dtype, self.pixel_dtype))
            return real(self, pixel_values, grid_thw)

        real = Tower.encode
        monkeypatch.setattr(Tower, "encode", encode_)
        run(options(save_image(tmp_path / "a.png", 60, 60), dtype="bf16"))
        assert all(given == taken for given, taken in dtypes)

    @pytest.mark.usefixtures("narrow")
    def test_embeddings_that_are_not_finite(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("bad.png", "good.png"):
            save_image(tmp_path / name, 60 if name[0] == "g" else 120, 60)
        real = Tower.encode

        def overflow(self: Tower, pixel_values: Any, grid_thw: Any) -> torch.Tensor:
            out = real(self, pixel_values, grid_thw)
            # Only FLASHINFER's, and only for the wider of the two images.
            if self.backend == "FLASHINFER" and grid_thw[0][1] != grid_thw[0][2]:
                out = out.index_fill(0, torch.tensor([0]), float("inf"))
            return out

        monkeypatch.setattr(Tower, "encode", overflow)
        output = tmp_path / "out.safetensors"
        backends = ["FLASHINFER", "TORCH_SDPA"]
        report = run(options(tmp_path, output=output, backends=backends))
        assert report.images[0].results["FLASHINFER"].relative_error is None
        assert set(load_file(output)) == {
            "FLASHINFER/good.png",
            "TORCH_SDPA/good.png",
            "TORCH_SDPA/bad.png",
        }
        (failure,) = report.failures
        assert failure.startswith("bad.png with FLASHINFER: NaN or infinite values")
        assert report.exit_status == 1
        json.dumps(report.to_json(), allow_nan=False)
        console = Console(file=io.StringIO(), width=160)
        render(report, console)
        assert "not finite" in console.file.getvalue()  # type: ignore[attr-defined]
        output.unlink()
        with pytest.raises(JobError, match=r"nothing was saved .*bad\.png with FLASHI"):
            run(options(tmp_path / "bad.png", output=output))
        # A file that was left out is not why.
        (tmp_path / "good.png").write_text("no image")
        with pytest.raises(JobError, match=r"nothing was saved .*bad\.png with FLASHI"):
            run(options(tmp_path, output=output))
        assert not output.exists()

    @pytest.mark.usefixtures("narrow")
    def test_names_are_no_markup(self, tmp_path: Path) -> None:
        (tmp_path / "[").mkdir()
        names = ["[/foo].png", "[final] :cat: .png", "[b].png"]
        for name in names[:2]:
            save_image(tmp_path / "[" / name.replace("/", "\u2044"), 60, 60)
        (tmp_path / "[" / names[2]).write_text("no image")
        path = save_image(tmp_path / "foo].png", 60, 60)
        # The path of the second argument ends in `[/../foo].png`, as a tag does.
        report = run(options(tmp_path / "[", Path(f"{tmp_path}/[/../foo].png")))
        out = io.StringIO()
        render(report, Console(file=out, width=300))
        for name in ("[final] :cat: .png", "[b].png", "[/../foo].png"):
            assert name in out.getvalue()
        assert path.exists()
        for shown in (True, False):
            progress = io.StringIO()
            with job.progress_bar(Console(file=progress, force_terminal=shown)) as bar:
                bar.add_task("read [/foo].png")
            # A log gets not even an empty line.
            text = progress.getvalue()
            assert ("read [/foo].png" in text) == bool(text) == shown

    @pytest.mark.usefixtures("narrow")
    def test_fp8(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        save_image(tmp_path / "a.png", 60, 60)
        save_image(tmp_path / "b.png", 300, 280)
        scales = tmp_path / "scales.json"
        calibrate.run(
            calibrate.Options(
                images=[tmp_path],
                model=MODEL,
                random_weights=True,
                depth=1,
                device="cpu",
                output=scales,
            )
        )
        output = tmp_path / "out.safetensors"
        fp8 = {"attn_dtype": "fp8", "fp8_scale_path": scales, "max_pixels": None}
        # Some vLLM hand nothing on to the root logger, which pytest reads.
        logger = logging.getLogger("vllm.plugins.flashinfer_vit")
        logger.addHandler(caplog.handler)
        report = run(options(tmp_path, output=output, **fp8))
        other = scales_of_model(scales, "another")
        run(options(tmp_path, **{**fp8, "fp8_scale_path": other}))
        logger.removeHandler(caplog.handler)
        # Said of the other model's file alone.
        (warning,) = {m for m in caplog.messages if "were made with model" in m}
        assert "another.json were made with model another, this one is" in warning
        assert report.notes[-1].startswith("FP8 attention ran for 1 of 2 images. For")
        with safe_open(output, framework="pt") as file:
            metadata = file.metadata()
        assert metadata["attn_dtype"] == "fp8"
        with pytest.raises(FileError, match=r"also uses it as .*scales\.json"):
            run(options(tmp_path, output=scales, **fp8))


@cpu_only
class TestProcessor:
    def test_checkpoint_folder(self, tmp_path: Path) -> None:
        import transformers

        # What the table of the named models gives, but for the sizes.
        transformers.Qwen2VLImageProcessor(
            min_pixels=28 * 28, max_pixels=60 * 60
        ).save_pretrained(tmp_path)
        vision = {"depth": 1, "hidden_size": 1280, "out_hidden_size": 64}
        transformers.Qwen2_5_VLConfig(vision_config=vision).save_pretrained(tmp_path)
        image = save_image(tmp_path / "a.png", 300, 300)
        report = run(options(image, model=str(tmp_path), depth=None, max_pixels=None))
        assert report.images[0].grid == (1, 4, 4)

    def test_checkpoint_folder_without_one(self, tmp_path: Path) -> None:
        import transformers

        transformers.Qwen2_5_VLConfig().save_pretrained(tmp_path)
        image = save_image(tmp_path / "a.png", 60, 60)
        with pytest.raises(JobError, match=r"preprocessor_config\.json"):
            run(options(image, model=str(tmp_path)))

    @pytest.mark.parametrize(
        # Empty: what Transformers says differs between its releases.
        ("changes", "message"),
        [
            (None, ""),
            ({"image_processor_type": "CLIPImageProcessor"}, "its patch_size is None"),
            ({"image_processor_type": 5}, ""),
            ({"size": 448}, ""),
            ({"min_pixels": "abc"}, ""),
            ({"max_pixels": -5}, ""),
            ({"patch_size": 0}, "its patch_size is 0, and the tower's 14"),
            ({"merge_size": 1}, "its merge_size is 1, and the tower's 2"),
            ({"temporal_patch_size": 1}, "its temporal_patch_size is 1"),
            ({"do_resize": False}, ""),
            ({"resample": 99}, ""),
        ],
    )
    def test_a_foreign_or_damaged_one(
        self, tmp_path: Path, changes: dict[str, Any] | None, message: str
    ) -> None:
        document = {"image_processor_type": "Qwen2VLImageProcessor", **(changes or {})}
        path = tmp_path / "preprocessor_config.json"
        path.write_text(json.dumps([] if changes is None else document))
        (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
        spec = tower_spec.resolve_spec(str(tmp_path), random_weights=True)
        with pytest.raises(JobError) as refused:
            images.image_processor(spec, None)
        text = str(refused.value)
        assert text.startswith(f"{tmp_path}: its preprocessor_config.json, or ")
        assert message in text
        assert text.endswith("; copy the file from the model's repository")

    @pytest.mark.parametrize(
        ("model", "patch", "black"),
        [
            ("Qwen/Qwen2-VL-2B-Instruct", 14, -0.48145466 / 0.26862954),
            ("Qwen/Qwen3-VL-2B-Instruct", 16, -1.0),
        ],
    )
    def test_named_models(
        self, tmp_path: Path, model: str, patch: int, black: float
    ) -> None:
        Image.new("RGB", (320, 320), "black").save(tmp_path / "a.png")
        spec = tower_spec.resolve_spec(model, random_weights=True)
        processor = images.image_processor(spec, None)
        file = ImageFile(tmp_path / "a.png", "a", from_folder=False)
        patches = images.read_patches(file, processor, {}, [])
        assert patches is not None
        side = round(320 / patch / 2) * 2
        assert patches.grid == (1, side, side)
        assert patches.pixel_values.shape == (side * side, 3 * 2 * patch * patch)
        red = patches.pixel_values[:, : 2 * patch * patch]
        torch.testing.assert_close(red, torch.full_like(red, black))

    def test_bytes_where_the_tower_takes_none(self, tmp_path: Path) -> None:
        path = save_image(tmp_path / "a.png", 60, 60)
        spec = tower_spec.resolve_spec(MODEL, random_weights=True)
        processor = images.image_processor(spec, None)
        processor.do_rescale = processor.do_normalize = False
        file = ImageFile(path, "a.png", from_folder=False)
        with pytest.raises(JobError, match=r"makes torch\.uint8 .*takes normalised"):
            images.read_patches(file, processor, {}, [])


@cpu_only
def test_quantising_needs_a_gpu(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.png", 60, 60)
    with pytest.raises(TowerError, match="needs a GPU"):
        run(options(path, quantization="fp8"))


@pytest.mark.gpu
def test_quantised_layers_on_a_gpu() -> None:
    plain, quantized = (
        run(
            Options(
                images=[EXAMPLES],
                model=MODEL,
                random_weights=True,
                depth=4,
                backends=["FLASHINFER", "FLASH_ATTN"],
                quantization=method,
            )
        )
        for method in (None, "fp8")
    )
    for exact, image in zip(plain.images, quantized.images, strict=True):
        ours, stock = (image.results[name] for name in quantized.backends)
        assert ours.relative_error <= 1.05 * stock.relative_error
        assert ours.relative_error > 2 * exact.results["FLASHINFER"].relative_error


@pytest.mark.gpu
def test_examples_on_a_gpu(tmp_path: Path) -> None:
    report = run(
        Options(
            images=[EXAMPLES],
            model=MODEL,
            random_weights=True,
            backends=["FLASHINFER", "FLASH_ATTN"],
            output=tmp_path / "out.safetensors",
        )
    )
    assert (report.depth, report.dtype) == (32, "bfloat16")
    for image in report.images:
        ours, stock = (image.results[name] for name in report.backends)
        assert ours.relative_error <= 2 * stock.relative_error

# SPDX-License-Identifier: Apache-2.0
"""The `encode` job: images in, table, JSON and embeddings out, and bad input."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file

from vllm_flashinfer_vit.commands import encode, job
from vllm_flashinfer_vit.commands.encode import Options, render, run
from vllm_flashinfer_vit.commands.job import JobError
from vllm_flashinfer_vit.towers import tower
from vllm_flashinfer_vit.towers.tower import TowerError

MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
EXAMPLES = Path(__file__).parents[2] / "examples" / "images"

cpu_only = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="vLLM has one platform per process, and here it is the GPU",
)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the named model narrow; what these tests look at is not its width."""
    family, config = tower.NAMED_MODELS[MODEL]
    config = {**config, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96}
    monkeypatch.setattr(tower, "NAMED_MODELS", {MODEL: (family, config)})


def options(*images: Path, **changes: Any) -> Options:
    values: dict[str, Any] = {
        "images": images,
        "model": MODEL,
        "random_weights": True,
        "depth": 1,
        "dtype": "fp32",
        "device": "cpu",
        "max_pixels": 112 * 112,
    }
    return Options(**(values | changes))


def save_image(path: Path, width: int, height: int, mode: str = "RGB") -> Path:
    generator = np.random.default_rng(0)
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = generator.integers(0, 256, (height, width, channels), dtype=np.uint8)
    Image.fromarray(values.squeeze(), mode).save(path)
    return path


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
        assert metadata["dtype"] == "bfloat16"
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
    def test_table(self, tmp_path: Path) -> None:
        image = save_image(tmp_path / "a.png", 100, 60)
        report = run(options(image, depth=2, backends=["FLASHINFER", "TORCH_SDPA"]))
        console = Console(file=io.StringIO(), width=160)
        render(report, console)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        for part in (
            MODEL,
            "2 of 32 blocks",
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
        spec = tower.resolve_spec(model, random_weights=True)
        processor = job.image_processor(spec, None)
        patches = job.read_patches(tmp_path / "a.png", "a", processor)
        side = round(320 / patch / 2) * 2
        assert patches.grid == (1, side, side)
        assert patches.pixel_values.shape == (side * side, 3 * 2 * patch * patch)
        red = patches.pixel_values[:, : 2 * patch * patch]
        torch.testing.assert_close(red, torch.full_like(red, black))


class TestBadInput:
    def refused(self, message: str, *images: Path, **changes: Any) -> None:
        with pytest.raises(TowerError, match=message):
            run(options(*images, **changes))

    def test_no_image(self) -> None:
        self.refused("no image was given")

    def test_missing_image(self, tmp_path: Path) -> None:
        self.refused(r"none\.png does not exist", tmp_path / "none.png")

    def test_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("no image")
        self.refused(r"holds no image \(\.jpeg, \.jpg, \.png, \.webp\)", tmp_path)

    def test_no_image_inside(self, tmp_path: Path) -> None:
        path = tmp_path / "a.png"
        path.write_text("no image")
        self.refused(r"a\.png cannot be read as an image", path)

    @pytest.mark.parametrize("name", ["a.png", "a.jpg"])
    def test_truncated_image(self, tmp_path: Path, name: str) -> None:
        path = save_image(tmp_path / name, 200, 200)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        self.refused(r"cannot be read as an image .* damaged", path)

    def test_deep_pixels(self, tmp_path: Path) -> None:
        path = tmp_path / "a.tiff"
        Image.fromarray(np.full((60, 60), np.nan, dtype=np.float32)).save(path)
        self.refused(r"more than 8 bits; convert it", path)

    def test_aspect_ratio(self, tmp_path: Path) -> None:
        path = save_image(tmp_path / "a.png", 2010, 10)
        self.refused(r"processor refuses .*a\.png, 2010 x 10 pixels .* crop", path)

    def test_nan_after_the_processor(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def processor(images: Any, return_tensors: str) -> dict[str, torch.Tensor]:
            return {"pixel_values": torch.tensor([[float("nan")]])}

        monkeypatch.setattr(encode, "image_processor", lambda spec, limit: processor)
        path = save_image(tmp_path / "a.png", 60, 60)
        self.refused(r"a\.png holds NaN or infinite pixels", path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model": "Qwen/Qwen9"}, r"neither a folder nor a known model"),
            ({"random_weights": False}, r"no weights are downloaded"),
            ({"depth": 0}, r"depth 0 is out of range; .* 1 to 32"),
            ({"depth": 33}, r"depth 33 is out of range"),
            ({"backends": []}, r"no backend was given"),
            ({"dtype": "int4"}, r"use auto, bf16, fp16, fp32"),
            ({"device": "gpu"}, r"device 'gpu' is unknown"),
            ({"max_pixels": 0}, r"max_pixels is 0"),
            ({"max_pixels": 100}, r"one token of this model takes 784 pixels"),
            ({"output": Path("no/such/folder/a")}, r"a folder that exists"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_options(
        self, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        path = save_image(tmp_path / "a.png", 60, 60)
        self.refused(message, path, **change)

    @cpu_only
    def test_backend_is_checked_before_any_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(encode, "build_tower", None)
        path = save_image(tmp_path / "a.png", 60, 60)
        self.refused(r"'NONE_SUCH' is unknown", path, backends=["NONE_SUCH"])
        self.refused(r"FLASH_ATTN does not run", path, backends=["FLASH_ATTN"])


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

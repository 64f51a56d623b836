# SPDX-License-Identifier: Apache-2.0
"""What the `encode` job refuses, and what it says."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _encode import MODEL, options, save_image
from _towers import cpu_only
from PIL import Image
from safetensors.torch import save_file

from vllm_flashinfer_vit.commands import calibrate, encode, images
from vllm_flashinfer_vit.commands.encode import run
from vllm_flashinfer_vit.commands.job import Inputs, memory_hint, prepare
from vllm_flashinfer_vit.fp8.scale_files import ScaleError
from vllm_flashinfer_vit.machine.files import FileError
from vllm_flashinfer_vit.towers import model_tower
from vllm_flashinfer_vit.towers.spec import TowerError


@cpu_only
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
        self.refused(r"holds no image \(\.avif, \.bmp, .*\.webp\)", tmp_path)

    def test_no_image_inside(self, tmp_path: Path) -> None:
        path = tmp_path / "a.png"
        path.write_text("no image")
        self.refused(r"a\.png cannot be read as an image", path)

    def test_a_pipe_and_a_folder_inside(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Of a pipe it would wait for a writer.
        monkeypatch.setattr(Image, "open", None)
        os.mkfifo(tmp_path / "a.png")
        self.refused(r"a\.png is no file, or leads to none; give", tmp_path)
        (tmp_path / "a.png").unlink()
        (tmp_path / "a.png").mkdir()
        self.refused(r"a\.png is no file, or leads to none; give", tmp_path)

    def test_image_that_may_not_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        # Root may read anything.
        monkeypatch.setattr(Image, "open", refuse)
        path = save_image(tmp_path / "a.png", 60, 60)
        self.refused(r"a\.png may not be read by this user; change its perm", path)

    def test_decoder_that_fails(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(path: Path) -> None:
            raise RuntimeError("Failed to decode image")

        # As some damaged AVIF make Pillow's decoder do.
        monkeypatch.setattr(Image, "open", fail)
        path = save_image(tmp_path / "a.png", 60, 60)
        message = r"a\.png cannot be read as an image \(RuntimeError: Failed to decode"
        self.refused(message, path)
        self.refused(rf"^no image can be used\. Left out: .*{message}", tmp_path)

    @pytest.mark.parametrize("name", ["a.png", "a.jpg"])
    def test_truncated_image(self, tmp_path: Path, name: str) -> None:
        path = save_image(tmp_path / name, 200, 200)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        self.refused(r"cannot be read as an image .* damaged", path)

    def test_more_pixels_than_pillow_decodes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = save_image(tmp_path / "a.png", 60, 60)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        self.refused(r"a\.png has more pixels than .*3600.*; shrink the image", path)

    def test_deep_pixels(self, tmp_path: Path) -> None:
        path = tmp_path / "a.tiff"
        Image.fromarray(np.full((60, 60), np.nan, dtype=np.float32)).save(path)
        self.refused(r"more than 8 bits; convert it", path)

    def test_aspect_ratio(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Said before any tower is built.
        monkeypatch.setattr(encode, "build", None)
        path = save_image(tmp_path / "a.png", 2010, 10)
        self.refused(r"processor refuses .*a\.png, 2010 x 10 pixels .* crop", path)

    def test_nan_after_the_processor(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def processor(*args: Any) -> Any:
            made = images.image_processor(*args)
            made.image_mean = [float("nan")] * 3
            return made

        monkeypatch.setattr(encode, "image_processor", processor)
        path = save_image(tmp_path / "a.png", 60, 60)
        self.refused(r"NaN or infinite.*; check .*mean and std", path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model": "Qwen/Qwen9"}, r"neither a folder nor a known model"),
            ({"random_weights": False}, r"no weights are .* \(--random-weights, or "),
            ({"depth": 0}, r"depth 0 is out of range; .* 1 to 32"),
            ({"depth": 33}, r"depth 33 is out of range"),
            ({"backends": []}, r"no backend was given"),
            ({"dtype": "int4"}, r"use auto, bf16, fp16, fp32"),
            ({"device": "gpu"}, r"device 'gpu' is unknown"),
            ({"max_pixels": 0}, r"--max-pixels is 0: use 1 or more"),
            ({"max_pixels": 100}, r"--max-pixels is 100: .* 784; use 784 or more"),
            ({"attn_dtype": "nonsense"}, r"--attn-dtype is 'nonsense': use fp8"),
            (
                {"attn_dtype": "fp8", "backends": ["TORCH_SDPA"]},
                r"--attn-dtype fp8 needs --backend FLASHINFER: add it",
            ),
            ({"fp8_scale_path": Path("a")}, r"--fp8-scale-path needs --attn-dtype fp8"),
            ({"quantization": "fp9"}, r"'fp9' quantises no 16-bit weights: use fp8,"),
            ({"unquantized": ["a"]}, r"--unquantized needs --quantization"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_options(
        self, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        path = save_image(tmp_path / "a.png", 60, 60)
        self.refused(message, path, **change)

    def test_nothing_but_unusable_files_in_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_text("no image")
        self.refused(r"no image can be used\. Left out: .*a\.png cannot", tmp_path)

    @pytest.mark.parametrize("through", ["itself", "link"])
    def test_output_that_is_an_input(self, tmp_path: Path, through: str) -> None:
        path = save_image(tmp_path / "a.png", 60, 60)
        before = path.read_bytes()
        (tmp_path / "link").symlink_to(path)
        output = path if through == "itself" else tmp_path / "link"
        with pytest.raises(FileError, match="also uses it as"):
            run(options(tmp_path, output=output))
        assert path.read_bytes() == before

    @pytest.mark.parametrize("random_weights", [False, True])
    def test_output_in_the_checkpoint(
        self, tmp_path: Path, random_weights: bool
    ) -> None:
        path = save_image(tmp_path / "a.png", 60, 60)
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
        wanted = options(
            path,
            model=str(folder),
            random_weights=random_weights,
            output=folder / "config.json",
        )
        with pytest.raises(FileError, match="also uses it as"):
            run(wanted)

    def test_an_output_of_another_kind_is_not_replaced(self, tmp_path: Path) -> None:
        path = save_image(tmp_path / "a.png", 60, 60)
        output = tmp_path / "model.safetensors"
        save_file({"visual.weight": torch.zeros(2)}, output, {"format": "pt"})
        before = output.read_bytes()
        with pytest.raises(FileError, match=r"holds no embeddings .*; delete it, or"):
            run(options(path, output=output))
        assert output.read_bytes() == before

    def test_an_output_that_cannot_hold_a_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save_image(tmp_path / "a.png", 60, 60).rename(tmp_path / "\udcff.png")
        # Said before any work.
        monkeypatch.setattr(encode, "image_processor", None)
        message = r"the name '\\udcff\.png', which is not UTF-8; rename"
        self.refused(message, tmp_path, output=tmp_path / "out.safetensors")

    def test_output_that_cannot_be_written(self, tmp_path: Path) -> None:
        path = save_image(tmp_path / "a.png", 60, 60)
        with pytest.raises(FileError, match="in a folder that exists"):
            run(options(path, output=Path("no/such/folder/a")))

    def test_scales_are_read_before_any_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(encode, "build", None)
        path = save_image(tmp_path / "a.png", 60, 60)
        bad = tmp_path / "bad.json"
        bad.write_text("{")
        with pytest.raises(ScaleError, match=r"bad\.json cannot be used"):
            run(options(path, attn_dtype="fp8", fp8_scale_path=bad))

    def test_backend_is_checked_before_any_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(encode, "build", None)
        path = save_image(tmp_path / "a.png", 60, 60)
        self.refused(r"'NONE_SUCH' is unknown", path, backends=["NONE_SUCH"])
        self.refused(r"FLASH_ATTN does not run", path, backends=["FLASH_ATTN"])

    @pytest.mark.parametrize("command", ["encode", "calibrate"])
    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_no_memory_for_the_tower(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, device: str
    ) -> None:
        def build(*args: Any, **how: Any) -> None:
            if device == "cuda":
                raise torch.OutOfMemoryError("CUDA out of memory")
            # The CPU's allocator has no error class of its own.
            torch.empty(2**60, dtype=torch.uint8)

        monkeypatch.setattr(model_tower, "build_tower", build)
        path = save_image(tmp_path / "a.png", 60, 60)
        with pytest.raises(TowerError, match=r"too little memory .*; free it .* cpu"):
            if command == "encode":
                run(options(path))
            else:
                inputs = vars(Inputs(images=[path], model=MODEL, random_weights=True))
                output = tmp_path / "scales.json"
                calibrate.run(calibrate.Options(**inputs, output=output))

    def test_no_memory_for_an_image(self) -> None:
        with (
            pytest.raises(TowerError, match=r"too little memory .*; use .* --max-pix"),
            memory_hint(torch.device("cpu")),
        ):
            torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.parametrize(("depth", "cut"), [(4, False), (5, True)])
def test_blocks_that_do_not_run_are_said(tmp_path: Path, depth: int, cut: bool) -> None:
    image = save_image(tmp_path / "a.png", 60, 60)
    document = {"model_type": "qwen2_5_vl", "vision_config": {"depth": depth}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    notes = prepare(options(image, model=str(tmp_path), depth=None)).notes
    assert any("4 of 5 blocks run" in note for note in notes) is cut
    assert any("blocks run" in note for note in notes) is cut

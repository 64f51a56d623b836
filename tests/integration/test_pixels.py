# SPDX-License-Identifier: Apache-2.0
"""Who normalises pixels: the image processor, or the tower on the device.

vLLM decides by `mm_device_do_normalize`. Either way the embeddings are the same.
"""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from _towers import (
    FAMILIES,
    cpu_only,
    pixels,
    small_spec,
    small_tower,
    tower_of_bytes,
)
from packaging.version import Version
from PIL import Image
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from vllm_flashinfer_vit.commands import calibrate, encode  # noqa: E402
from vllm_flashinfer_vit.commands.images import (  # noqa: E402
    JobError,
    Patches,
    image_processor,
)
from vllm_flashinfer_vit.towers import config, spec  # noqa: E402
from vllm_flashinfer_vit.towers.spec import TowerError  # noqa: E402
from vllm_flashinfer_vit.towers.tower import Tower  # noqa: E402

MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
OFF = "VLLM_USE_RUST_FRONTEND"

pytestmark = cpu_only


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    values = np.random.default_rng(0).integers(0, 256, (168, 112, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with config, tokenizer and processor, as an engine reads it."""
    from make_checkpoint import make_checkpoint

    folder = tmp_path / "checkpoint"
    make_checkpoint(folder, MODEL)
    return folder


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tower, torch.Tensor]]:
    """Each tower that encodes, and its pixels."""
    calls = []
    original = Tower.encode

    def noting(self: Tower, pixel_values: torch.Tensor, grid_thw: Any) -> torch.Tensor:
        calls.append((self, pixel_values))
        return original(self, pixel_values, grid_thw)

    monkeypatch.setattr(Tower, "encode", noting)
    return calls


def cut(family: str, path: Path, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    processor = image_processor(small_spec(family), 112 * 112)
    found = processor(images=[Image.open(path)], return_tensors="pt", **kwargs)
    return found["pixel_values"], found["image_grid_thw"].tolist()


def options(path: Path, model: str = MODEL, **changes: Any) -> dict[str, Any]:
    values = {
        "images": [path],
        "model": model,
        "random_weights": True,
        "depth": 1,
        "dtype": "fp32",
        "device": "cpu",
        "max_pixels": 112 * 112,
    }
    return values | changes


def use(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    """Have vLLM decide for bytes, as by default, or against them."""
    monkeypatch.setenv(OFF, "0" if on else "1")


@pytest.mark.parametrize("backend", ["FLASHINFER", "TORCH_SDPA"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_of_bytes_gives_the_same(
    family: str, backend: str, picture: Path
) -> None:
    tower = tower_of_bytes(family, backend)
    values, grids = cut(family, picture, **tower.processor_kwargs)
    assert values.dtype == torch.uint8
    expected = small_tower(family, "TORCH_SDPA").encode(*cut(family, picture))
    got = tower.encode(values, grids)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class TestWrongPixels:
    def test_bytes_where_nothing_normalises_them(self) -> None:
        tower = small_tower("qwen2_vl")
        assert tower.processor_kwargs.get("do_normalize", True)
        values = pixels(tower.spec, [[1, 4, 4]]).to(torch.uint8)
        with pytest.raises(TowerError, match=r"are torch\.uint8, .*takes torch\.float"):
            tower.encode(values, [[1, 4, 4]])

    def test_normalised_values_where_bytes_belong(self) -> None:
        tower = tower_of_bytes("qwen2_vl")
        values = pixels(tower.spec, [[1, 4, 4]])
        with pytest.raises(TowerError, match=r"float32, .*torch\.uint8; .*do_rescale"):
            tower.encode(values, [[1, 4, 4]])

    @pytest.mark.parametrize(
        ("std", "message"),
        [
            ([0.0] * 3, "zero"),
            ([1.0], "lengths"),
            ([float("nan")] * 3, "infinite"),
            (0.5, "no len"),
        ],
    )
    def test_a_processor_that_cannot_normalise(
        self, std: list[float] | float, message: str
    ) -> None:
        tower_of_bytes("qwen2_vl")
        processor = image_processor(small_spec("qwen2_vl"), None)
        processor.image_std = std
        with pytest.raises(TowerError, match=rf"{message}.*; check its\s+mean and std"):
            small_tower("qwen2_vl", image_processor=processor)

    @pytest.mark.parametrize("job", [encode, calibrate])
    def test_a_processor_that_normalises_all_the_same(
        self, job: Any, picture: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tower_of_bytes("qwen2_5_vl")

        def deaf(*args: Any) -> Any:
            made = image_processor(*args)
            cls = type(made)

            def call(self: Any, images: Any, return_tensors: str, **kwargs: Any) -> Any:
                return cls.__call__(self, images=images, return_tensors=return_tensors)

            made.__class__ = type("Deaf", (cls,), {"__call__": call})
            return made

        monkeypatch.setattr(job, "image_processor", deaf)
        arguments = options(picture, output=picture.with_name("output"))
        message = r"Deaf makes torch\.float32 pixels of .*a\.png, .*bytes; use the"
        with pytest.raises(JobError, match=message):
            job.run(job.Options(**arguments))

    def test_encode_makes_no_bytes_of_values(self) -> None:
        tower = tower_of_bytes("qwen2_vl")
        image = Patches(
            "a.png",
            56,
            56,
            (1, 4, 4),
            {"pixel_values": pixels(tower.spec, [[1, 4, 4]]), "grid_thw": [(1, 4, 4)]},
        )
        with pytest.raises(TowerError, match=r"float32, .*takes torch\.uint8"):
            encode._encode(tower, image)


def test_a_processor_is_saved_only_for_a_vllm_that_reads_it() -> None:
    processor = image_processor(small_spec("qwen2_vl"), None)
    cls = type(processor)
    with mock.patch.object(
        cls, "save_pretrained", autospec=True, side_effect=cls.save_pretrained
    ) as save:
        small_tower("qwen2_vl", image_processor=processor)
        assert save.called == (Version(version("vllm")) >= Version("0.31"))


@pytest.mark.parametrize("on", [True, False])
def test_encode_takes_what_an_engine_takes(
    on: bool,
    picture: Path,
    checkpoint: Path,
    given: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tower_of_bytes("qwen2_5_vl")
    use(monkeypatch, on)
    arguments = options(picture, str(checkpoint), max_pixels=None)
    encode.run(encode.Options(**arguments))
    tower, values = given[-1]

    from vllm.config import ModelConfig
    from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm
    from vllm.multimodal.processing.context import InputProcessingContext
    from vllm.tokenizers import get_tokenizer

    name = spec.FAMILIES["qwen2_5_vl"].model
    model_cls = getattr(spec.model_module("qwen2_5_vl"), name)
    with config._inspected_here(name, model_cls):
        of_engine = ModelConfig(model=str(checkpoint), dtype=torch.float32)
    context = InputProcessingContext(of_engine, get_tokenizer(str(checkpoint)))
    prompt = "<|vision_start|><|image_pad|><|vision_end|>"
    inputs = context.call_hf_processor(
        context.get_hf_processor(), {"text": prompt, "images": [Image.open(picture)]}
    )
    assert values.dtype == (torch.uint8 if on else torch.float32)
    assert torch.equal(values, inputs["pixel_values"])
    with config.current_config(tower.vllm_config):
        norm = build_mm_input_norm(of_engine)
    assert type(tower.visual.input_norm) is type(norm)
    for found, expected in zip(
        tower.visual.input_norm.buffers(), norm.buffers(), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("normalises", "narrow")
class TestOnAndOff:
    @pytest.fixture
    def normalises(self) -> None:
        tower_of_bytes("qwen2_5_vl")

    def test_embeddings(
        self, picture: Path, given: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = []
        for on in (True, False):
            use(monkeypatch, on)
            output = picture.with_name("out.safetensors")
            backends = ["FLASHINFER", "TORCH_SDPA"]
            report = encode.run(
                encode.Options(**options(picture, backends=backends, output=output))
            )
            assert given[-1][0].pixel_dtype == (torch.uint8 if on else torch.float32)
            (image,) = report.images
            assert image.results["FLASHINFER"].relative_error < 1e-5
            assert image.results["TORCH_SDPA"].relative_error == 0
            found.append(load_file(output))
        for backend, embedding in found[0].items():
            torch.testing.assert_close(
                embedding, found[1][backend], rtol=1e-4, atol=1e-5
            )

    def test_calibrated_scales(
        self, picture: Path, given: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reports = []
        for on in (True, False):
            use(monkeypatch, on)
            output = picture.with_name("scales.json")
            arguments = options(picture, output=output, depth=2)
            reports.append(calibrate.run(calibrate.Options(**arguments)))
            assert given[-1][1].is_floating_point() != on
        for one, other in zip(reports[0].layers, reports[1].layers, strict=True):
            assert one.amax == pytest.approx(other.amax, rel=1e-5)
            assert one.relative_error == pytest.approx(other.relative_error, rel=1e-2)

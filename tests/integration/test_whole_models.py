# SPDX-License-Identifier: Apache-2.0
"""Models that vLLM builds whole: `encode` and `calibrate` by name, and what is refused.

One block of each tower, of its true width, and its true projector.
"""

import dataclasses
import math
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from _encode import options, save_image
from _towers import cpu_only
from safetensors.torch import load_file

from vllm_flashinfer_vit.commands import calibrate
from vllm_flashinfer_vit.commands.encode import run
from vllm_flashinfer_vit.engine import layer
from vllm_flashinfer_vit.fp8 import scale_files as scales
from vllm_flashinfer_vit.towers import resolve as resolving
from vllm_flashinfer_vit.towers import whole
from vllm_flashinfer_vit.towers.model_tower import ModelTower, build, build_model
from vllm_flashinfer_vit.towers.resolve import resolve
from vllm_flashinfer_vit.towers.spec import NAMED_MODELS, TowerError
from vllm_flashinfer_vit.towers.whole import ModelSpec
from vllm_flashinfer_vit.towers.whole_models import NOT_BUILT, WHOLE_MODELS

# Of the language model: what the projector returns.
WIDTHS = {
    "PaddlePaddle/PaddleOCR-VL": 1024,
    "zai-org/GLM-OCR": 1536,
    "rednote-hilab/dots.ocr": 1536,
    "mistral-community/pixtral-12b": 5120,
    "google/gemma-3-4b-it": 2560,
    "google/paligemma-3b-pt-224": 2048,
    "llava-hf/llava-onevision-qwen2-7b-ov-hf": 3584,
    "baidu/ERNIE-4.5-VL-28B-A3B-PT": 2560,
    "OpenGVLab/InternVL3-8B": 3584,
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": 2048,
    "moonshotai/Kimi-K2.5": 7168,
    "moonshotai/Kimi-K3": 7168,
    "google/gemma-4-31B-it": 5376,
}
# Tokens that end lines: of one image's crops, one for each row.
ENDS = {"llava-hf/llava-onevision-qwen2-7b-ov-hf": 27}


# Their processors make every image as large, in thousands of patches.
SLOW = {"google/gemma-3-4b-it", "google/gemma-4-31B-it"}
MODELS = [
    pytest.param(name, marks=pytest.mark.extended if name in SLOW else ())
    for name in WHOLE_MODELS
]


# What the oldest vLLM lacks, or Transformers beside it. Of others only canaries know.
LACKING = {
    "0.25.1": {
        "mistral-community/pixtral-12b",
        "google/gemma-3-4b-it",
        "google/paligemma-3b-pt-224",
        "llava-hf/llava-onevision-qwen2-7b-ov-hf",
        "OpenGVLab/InternVL3-8B",
        "moonshotai/Kimi-K2.5",
        "moonshotai/Kimi-K3",
        "google/gemma-4-31B-it",
    },
    "0.33.0": set(),
}


def skip_if_missing(name: str, error: TowerError) -> None:
    """Skip where this vLLM or Transformers lacks a model, and the error says so."""
    is_said = re.search(r"lack|cannot be built with", str(error))
    if is_said and name in LACKING.get(version("vllm"), WHOLE_MODELS):
        pytest.skip(str(error))
    raise error


@cpu_only
@pytest.mark.parametrize("name", MODELS)
def test_encode_by_name(name: str, tmp_path: Path) -> None:
    image = save_image(tmp_path / "a.png", 120, 120)
    output = tmp_path / "out.safetensors"
    try:
        # The reference is vLLM's TORCH_SDPA in fp32.
        report = run(options(image, model=name, output=output))
    except TowerError as error:
        skip_if_missing(name, error)
    (one,) = report.images
    assert one.results["FLASHINFER"].kernels == {"all": "reference"}
    assert 0 < one.results["FLASHINFER"].relative_error < 1e-5
    embedding = load_file(output)[str(image)]
    assert embedding.shape == (one.tokens, WIDTHS[name])
    assert one.patches == math.prod(one.grid) >= one.tokens - ENDS.get(name, 0)
    assert report.depth == 1 < report.full_depth


@cpu_only
def test_no_checkpoint_is_asked_for_a_head() -> None:
    """vLLM asks where embeddings are tied, and a name may be no checkpoint's."""
    name = "google/paligemma-3b-pt-224"
    spec = resolve(name, random_weights=True, depth=1)
    try:
        tower = build(spec, backend="FLASHINFER", dtype=torch.float32, device="cpu")
    except TowerError as error:
        skip_if_missing(name, error)
    assert not tower.vllm_config.model_config.hf_config.tie_word_embeddings


@cpu_only
def test_kimi_k3_has_the_shapes_of_its_published_weights() -> None:
    """Another model's class of vLLM builds it."""
    spec = resolve("moonshotai/Kimi-K3", random_weights=True, depth=1)
    try:
        tower = build(spec, backend="FLASHINFER", dtype=torch.float32, device="cpu")
    except TowerError as error:
        skip_if_missing("moonshotai/Kimi-K3", error)
    shapes = {
        name: list(parameter.shape)
        for name, parameter in tower.visual.named_parameters()
        if not name.startswith("language_model")
    }
    block = "vision_tower.encoder.blocks.0"
    assert shapes == {
        "vision_tower.patch_embed.proj.weight": [1024, 3, 14, 14],
        "vision_tower.patch_embed.pos_emb.weight": [64, 64, 1024],
        f"{block}.norm0.weight": [1024],
        f"{block}.norm1.weight": [1024],
        f"{block}.wqkv.weight": [4608, 1024],
        f"{block}.wo.weight": [1024, 1536],
        f"{block}.mlp.fc0.weight": [4096, 1024],
        f"{block}.mlp.fc1.weight": [1024, 4096],
        "vision_tower.encoder.final_layernorm.weight": [1024],
        "mm_projector.linear_1.weight": [4096, 4096],
        "mm_projector.linear_2.weight": [7168, 4096],
        "mm_projector.post_norm.weight": [7168],
    }


@cpu_only
@pytest.mark.parametrize("keeps", [True, False])
def test_counts_are_where_the_installed_vllm_has_them(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ERNIE-4.5-VL attends on the device of its grids."""
    source = "keep_on_cpu=True" if keeps else "batched('image')"
    monkeypatch.setattr(whole.inspect, "getsource", lambda module: source)
    for name, follows in (
        ("baidu/ERNIE-4.5-VL-28B-A3B-PT", True),
        ("zai-org/GLM-OCR", False),
    ):
        spec = resolve(name, random_weights=True, depth=1)
        assert isinstance(spec, ModelSpec)
        tower = ModelTower(
            spec, "", torch.nn.Identity(), None, torch.float16, torch.device("meta")
        )
        inputs = {
            "pixel_values": torch.zeros(4, 8),
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
        }
        placed = tower.placed(inputs)
        assert placed["pixel_values"].device.type == "meta"
        expected = "meta" if follows and not keeps else "cpu"
        assert placed["image_grid_thw"].device.type == expected


@cpu_only
def test_an_error_of_this_package_is_not_said_to_be_of_other_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer, "flashinfer_requested", None)
    spec = resolve("zai-org/GLM-OCR", random_weights=True, depth=1)
    with pytest.raises(TypeError, match="NoneType"):
        build_model(spec, backend="FLASHINFER", dtype=torch.float32, device="cpu")


@cpu_only
class TestRun:
    """With one of the families; the others differ in what describes them."""

    NAME = "zai-org/GLM-OCR"

    def test_two_backends_stand_side_by_side(self, tmp_path: Path) -> None:
        image = save_image(tmp_path / "a.png", 400, 300)
        given = options(
            image, model=self.NAME, backends=["FLASHINFER", "TORCH_SDPA"], dtype="bf16"
        )
        (one,) = run(given).images
        assert one.results["TORCH_SDPA"].kernels == {"all": "in-tree torch_sdpa"}
        for backend in given.backends:
            assert 1e-4 < one.results[backend].relative_error < 0.1
        # Shrunk, as max_pixels says, in the image's own shape.
        assert one.patches * 14**2 <= given.max_pixels
        assert one.grid[1] < one.grid[2]

    def test_attention_matters(self) -> None:
        """What attends decides more of the embeddings than rounding does."""
        spec = resolve(self.NAME, random_weights=True, depth=1)
        tower = build(spec, backend="FLASHINFER", dtype=torch.float32, device="cpu")
        inputs = {
            "pixel_values": torch.randn(
                64, 1176, generator=torch.Generator().manual_seed(0)
            ),
            "image_grid_thw": torch.tensor([[1, 8, 8]]),
        }
        whole = tower.encode(**inputs)
        (layer,) = tower.attention_layers().values()

        def average(layer: Any, attend: Any, batch: Any) -> torch.Tensor:
            return attend(batch) * 0 + batch.v.mean(0)

        with layer.watched(average):
            averaged = tower.encode(**inputs)
        assert (whole - averaged).norm() > 1e-2 * whole.norm()

    def test_calibrate(self, tmp_path: Path) -> None:
        image = save_image(tmp_path / "a.png", 120, 120)
        report = calibrate.run(
            calibrate.Options(
                images=[image],
                model=self.NAME,
                random_weights=True,
                depth=2,
                dtype="fp32",
                device="cpu",
                output=tmp_path / "scales.json",
            )
        )
        # The names that an engine gives its layers.
        names = [f"visual.blocks.{i}.attn.attn" for i in range(2)]
        assert [layer.name for layer in report.layers] == names
        assert all(1e-3 < layer.relative_error < 0.1 for layer in report.layers)
        file = scales.read(tmp_path / "scales.json")
        assert {layer.head_dim for layer in file.layers.values()} == {64}
        assert file.made_by["model"] == f"{self.NAME} (random weights)"
        spec = resolve(self.NAME, random_weights=True, depth=2)
        tower = build(
            spec,
            backend="FLASHINFER",
            dtype=torch.float32,
            device="cpu",
            attn_dtype="fp8",
            fp8_scale_path=tmp_path / "scales.json",
        )
        layer = tower.attention_layers()[names[0]]
        expected = pytest.approx(file.layers[names[0]].scale)
        assert layer._fp8_state.scales.tolist() == expected

    def test_layers_are_not_quantised(self) -> None:
        spec = resolve(self.NAME, random_weights=True, depth=1)
        with pytest.raises(TowerError, match="leave --quantization"):
            build_model(
                spec,
                backend="FLASHINFER",
                dtype=torch.float32,
                device="cpu",
                quantization="fp8",
            )


class TestResolve:
    NAME = "zai-org/GLM-OCR"

    def test_unknown_names_are_answered_with_all_known_ones(self) -> None:
        with pytest.raises(TowerError, match="neither a folder nor a known") as caught:
            resolve("zai-org/GLM-9", random_weights=True)
        for name in (*NAMED_MODELS, *WHOLE_MODELS):
            assert name in str(caught.value)

    def test_no_name_has_two_descriptions(self) -> None:
        assert not {*NAMED_MODELS} & {*WHOLE_MODELS}
        assert not {*NAMED_MODELS, *WHOLE_MODELS} & {*NOT_BUILT}

    @pytest.mark.parametrize("name", NOT_BUILT)
    def test_what_is_not_built_says_why(self, name: str) -> None:
        with pytest.raises(TowerError, match="only an engine runs it") as caught:
            resolve(name, random_weights=True)
        assert "known are Qwen/" in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "other"),
        [
            (NAME, "engine only"),
            ("Qwen/Qwen2-VL-2B-Instruct", "or give the folder of a local checkpoint"),
        ],
    )
    def test_weights_of_names_are_random(self, name: str, other: str) -> None:
        message = rf"--random-weights, or random_weights=True\).* {other}"
        with pytest.raises(TowerError, match=message):
            resolve(name)

    @pytest.mark.parametrize("depth", [0, 25])
    def test_depth(self, depth: int) -> None:
        with pytest.raises(TowerError, match="out of range; this tower has 1 to 24"):
            resolve(self.NAME, random_weights=True, depth=depth)

    def test_features_of_blocks_that_are_left_out_are_not_tapped(self) -> None:
        name = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
        spec = resolve(name, random_weights=True, depth=10)
        assert spec.vision_config["deepstack_visual_indexes"] == [8]

    @cpu_only
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"processor": "transformers:No"}, "needs No of transformers, which"),
            ({"config": "no_package:Config"}, "needs Config of no_package, which"),
            ({"model": "NoModel"}, r"needs NoModel of vllm\..*, which"),
            ({"vision": {"depth": 24, "num_heads": "a"}}, "cannot be built with"),
        ],
    )
    def test_what_the_installed_packages_lack(
        self,
        changes: dict[str, Any],
        message: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        changed = dataclasses.replace(WHOLE_MODELS[self.NAME], **changes)
        monkeypatch.setattr(resolving, "WHOLE_MODELS", {self.NAME: changed})
        image = save_image(tmp_path / "a.png", 60, 60)
        with pytest.raises(TowerError, match=message) as caught:
            run(options(image, model=self.NAME))
        assert f"vllm {version('vllm')} and transformers" in str(caught.value)

# SPDX-License-Identifier: Apache-2.0
"""vLLM's vision towers outside an engine: weights, results, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _towers import FAMILIES, SMALL, cpu_only, pixels, small_spec, small_tower
from safetensors.torch import load_file, save_file

from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform
from vllm_flashinfer_vit.towers.spec import (
    NAMED_MODELS,
    CheckpointError,
    TowerError,
    TowerSpec,
    resolve_spec,
)
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

# A wide image with cut windows, one token, a square image, a video of two frames.
GRIDS = [[1, 12, 20], [1, 2, 2], [1, 8, 8], [2, 6, 4]]


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    reference = reference.double()
    return ((value.double() - reference).norm() / reference.norm()).item()


def split(values: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(values.split(sizes))


@cpu_only
@pytest.mark.parametrize("family", FAMILIES)
class TestResults:
    def test_agrees_with_torch_sdpa(self, family: str) -> None:
        tower = small_tower(family)
        values = pixels(tower.spec, GRIDS)
        expected = small_tower(family, "TORCH_SDPA").encode(values, GRIDS)
        assert relative_error(tower.encode(values, GRIDS), expected) < 1e-5

    def test_bf16_is_as_exact_as_torch_sdpa(self, family: str) -> None:
        spec = small_spec(family)
        values = pixels(spec, GRIDS)
        exact = small_tower(family, "TORCH_SDPA").encode(values, GRIDS)
        stock = small_tower(family, "TORCH_SDPA", torch.bfloat16).encode(values, GRIDS)
        ours = small_tower(family, "FLASHINFER", torch.bfloat16).encode(values, GRIDS)
        assert ours.dtype == torch.bfloat16
        assert relative_error(ours, exact) <= 2 * relative_error(stock, exact)

    def test_images_do_not_see_each_other(self, family: str) -> None:
        tower = small_tower(family)
        patches = [t * h * w for t, h, w in GRIDS]
        images = split(pixels(tower.spec, GRIDS), patches)
        alone = [
            tower.encode(image, [grid])
            for image, grid in zip(images, GRIDS, strict=True)
        ]
        for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 2, 1]):
            together = tower.encode(
                torch.cat([images[i] for i in order]), [GRIDS[i] for i in order]
            )
            tokens = [alone[i].shape[0] for i in order]
            for i, got in zip(order, split(together, tokens), strict=True):
                # One fp32 matrix product in another shape sums in another order.
                torch.testing.assert_close(got, alone[i], rtol=1e-4, atol=1e-5)

    def test_layers_are_the_plugins(self, family: str) -> None:
        layers = small_tower(family).attention_layers()
        assert list(layers) == ["blocks.0.attn.attn", "blocks.1.attn.attn"]
        assert {type(layer).__name__ for layer in layers.values()} == {
            "FlashInferViTAttention"
        }
        stock = small_tower(family, "TORCH_SDPA").attention_layers()
        assert {type(layer).__name__ for layer in stock.values()} == {
            "MMEncoderAttention"
        }


@cpu_only
class TestWeights:
    def test_same_for_backends_dtypes_and_depths(self) -> None:
        exact = dict(small_tower("qwen2_5_vl").visual.named_parameters())
        half = small_tower("qwen2_5_vl", "TORCH_SDPA", torch.bfloat16).visual
        for name, parameter in half.named_parameters():
            assert torch.equal(parameter.float(), exact[name]), name
        config = {**SMALL["qwen2_5_vl"], "depth": 1, "fullatt_block_indexes": [0]}
        spec = TowerSpec("qwen2_5_vl", config, "cut", None, 2)
        cut = build_tower(
            spec, backend="FLASHINFER", dtype=torch.float32, device="cpu"
        ).visual
        for name, parameter in cut.named_parameters():
            assert torch.equal(parameter, exact[name]), name

    def test_seed_changes_them(self) -> None:
        towers = [
            build_tower(
                small_spec("qwen3_vl"),
                backend="FLASHINFER",
                dtype=torch.float32,
                device="cpu",
                seed=seed,
            )
            for seed in (0, 1)
        ]
        first, second = (tower.visual.blocks[0].attn.qkv.weight for tower in towers)
        assert not torch.equal(first, second)


def _hf_config(family: str) -> Any:
    import transformers

    vision = SMALL[family]
    text = {
        "vocab_size": 32,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2]},
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    stem = {
        "qwen2_vl": "Qwen2VL",
        "qwen2_5_vl": "Qwen2_5_VL",
        "qwen3_vl": "Qwen3VL",
        "glm4v": "Glm4v",
    }
    config_cls = getattr(transformers, f"{stem[family]}Config")
    model_cls = getattr(transformers, f"{stem[family]}ForConditionalGeneration")
    config = config_cls(text_config=text, vision_config=dict(vision))
    return model_cls, config


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A sharded checkpoint folder and the transformers model that it holds."""
    model_cls, config = _hf_config(request.param)
    torch.manual_seed(0)
    model = model_cls(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder, model


def _hf_embeddings(model: Any, values: torch.Tensor, grids: Any) -> torch.Tensor:
    if "Glm" in type(model).__name__:
        # Transformers' class wants the frames of a video as images.
        grids = [[1, h, w] for t, h, w in grids for _ in range(t)]
    with torch.inference_mode():
        out = model.model.visual(values, grid_thw=torch.tensor(grids))
    if isinstance(out, torch.Tensor):
        return out
    if isinstance(out, tuple):
        embeddings, taps = out
    else:
        embeddings, taps = out.pooler_output, getattr(out, "deepstack_features", [])
    return torch.cat([embeddings, *taps], dim=-1)


@cpu_only
class TestCheckpoint:
    def test_agrees_with_transformers(self, checkpoint: tuple[Path, Any]) -> None:
        folder, model = checkpoint
        spec = resolve_spec(str(folder))
        tower = build_tower(
            spec, backend="FLASHINFER", dtype=torch.float32, device="cpu"
        )
        values = pixels(spec, GRIDS)
        expected = _hf_embeddings(model, values, GRIDS)
        assert relative_error(tower.encode(values, GRIDS), expected) < 1e-4

    def test_part_of_the_blocks(self, checkpoint: tuple[Path, Any]) -> None:
        folder, _ = checkpoint
        spec = resolve_spec(str(folder), depth=1)
        assert (spec.depth, spec.full_depth) == (1, 2)
        tower = build_tower(
            spec, backend="FLASHINFER", dtype=torch.float32, device="cpu"
        )
        assert list(tower.attention_layers()) == ["blocks.0.attn.attn"]


def _copy(source: Path, target: Path) -> Path:
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def _vision_shard(folder: Path) -> tuple[Path, str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = next(name for name in index["weight_map"] if "blocks.1." in name)
    return folder / index["weight_map"][name], name


def _build(folder: Path) -> Tower:
    return build_tower(
        resolve_spec(str(folder)),
        backend="FLASHINFER",
        dtype=torch.float32,
        device="cpu",
    )


@cpu_only
class TestDamagedCheckpoint:
    def test_truncated_file(self, checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
        shard, _ = _vision_shard(_copy(checkpoint[0], tmp_path))
        shard.write_bytes(shard.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match=rf"{shard.name}.*download it again"):
            _build(tmp_path)

    def test_pointer_in_place_of_a_file(
        self, checkpoint: tuple[Path, Any], tmp_path: Path
    ) -> None:
        shard, _ = _vision_shard(_copy(checkpoint[0], tmp_path))
        shard.write_text("version https://git-lfs.github.com/spec/v1\nsize 12345\n")
        with pytest.raises(CheckpointError, match=rf"{shard.name}.*pointer"):
            _build(tmp_path)

    def test_missing_file(self, checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
        shard, _ = _vision_shard(_copy(checkpoint[0], tmp_path))
        shard.unlink()
        with pytest.raises(CheckpointError, match=rf"{shard.name} does not exist"):
            _build(tmp_path)

    def test_missing_tensor(self, checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
        shard, name = _vision_shard(_copy(checkpoint[0], tmp_path))
        tensors = load_file(shard)
        del tensors[name]
        save_file(tensors, shard)
        with pytest.raises(CheckpointError, match=r"download"):
            _build(tmp_path)

    def test_tensor_missing_from_the_index(
        self, checkpoint: tuple[Path, Any], tmp_path: Path
    ) -> None:
        _, name = _vision_shard(_copy(checkpoint[0], tmp_path))
        path = tmp_path / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        del index["weight_map"][name]
        path.write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"lacks 1 vision weights.*blocks\.1"):
            _build(tmp_path)

    def test_quantized_weights(
        self, checkpoint: tuple[Path, Any], tmp_path: Path
    ) -> None:
        shard, name = _vision_shard(_copy(checkpoint[0], tmp_path))
        tensors = load_file(shard)
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        save_file(tensors, shard)
        with pytest.raises(CheckpointError, match=r"float8_e4m3fn; quantized"):
            _build(tmp_path)

    def test_weights_of_another_size(
        self, checkpoint: tuple[Path, Any], tmp_path: Path
    ) -> None:
        shard, name = _vision_shard(_copy(checkpoint[0], tmp_path))
        tensors = load_file(shard)
        tensors[name] = torch.zeros(3)
        save_file(tensors, shard)
        # vLLM's loaders assert shapes without a word.
        with pytest.raises(
            CheckpointError,
            match=r"not fit its config\.json \(at blocks\.1\.\S+ of shape \(3,\): \w",
        ):
            _build(tmp_path)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_weights_that_are_not_finite(
        self, checkpoint: tuple[Path, Any], tmp_path: Path, bad: float
    ) -> None:
        shard, name = _vision_shard(_copy(checkpoint[0], tmp_path))
        tensors = load_file(shard)
        tensors[name].view(-1)[-1] = bad
        save_file(tensors, shard)
        with pytest.raises(
            CheckpointError, match=r"not finite in torch\.float32.*blocks"
        ):
            _build(tmp_path)

    def test_deeply_nested_index(
        self, checkpoint: tuple[Path, Any], tmp_path: Path
    ) -> None:
        _copy(checkpoint[0], tmp_path)
        (tmp_path / "model.safetensors.index.json").write_text("[" * 200_000)
        with pytest.raises(CheckpointError, match="too deeply nested"):
            _build(tmp_path)

    @pytest.mark.parametrize("name", ["../a.safetensors", "/a.safetensors", ".."])
    def test_index_that_leads_elsewhere(
        self, checkpoint: tuple[Path, Any], tmp_path: Path, name: str
    ) -> None:
        _copy(checkpoint[0], tmp_path)
        path = tmp_path / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"] = dict.fromkeys(index["weight_map"], name)
        path.write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="file beside the index is wanted"):
            _build(tmp_path)

    def test_no_weights(self, checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
        config = (checkpoint[0] / "config.json").read_text()
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors"):
            _build(tmp_path)

    def test_index_without_a_tower(
        self, checkpoint: tuple[Path, Any], tmp_path: Path
    ) -> None:
        config = (checkpoint[0] / "config.json").read_text()
        (tmp_path / "config.json").write_text(config)
        index = {"weight_map": {"model.embed_tokens.weight": "a.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"no weights of a vision tower"):
            _build(tmp_path)


def _vision(**changes: Any) -> str:
    return json.dumps({"model_type": "qwen2_5_vl", "vision_config": changes})


class TestSpec:
    def test_named_models_have_known_head_dims(self) -> None:
        head_dims = {
            name: config.get("embed_dim", config["hidden_size"]) // config["num_heads"]
            for name, (_, config) in NAMED_MODELS.items()
        }
        assert set(head_dims.values()) == {64, 72, 80, 128}
        assert head_dims["Qwen/Qwen3-VL-8B-Instruct"] == 72

    def test_cut_tower_keeps_a_full_attention_block(self) -> None:
        name = "Qwen/Qwen2.5-VL-7B-Instruct"
        cut = resolve_spec(name, random_weights=True, depth=4).vision_config
        assert cut["fullatt_block_indexes"] == [3]
        cut = resolve_spec(name, random_weights=True, depth=9).vision_config
        assert cut["fullatt_block_indexes"] == [7, 8]
        whole = resolve_spec(name, random_weights=True).vision_config
        assert whole["fullatt_block_indexes"] == [7, 15, 23, 31]

    def test_cut_tower_keeps_its_taps(self) -> None:
        spec = resolve_spec("Qwen/Qwen3-VL-8B-Instruct", random_weights=True, depth=17)
        assert spec.vision_config["deepstack_visual_indexes"] == [8, 16]

    @pytest.mark.parametrize("depth", [-1, 0, 33])
    def test_depth_out_of_range(self, depth: int) -> None:
        with pytest.raises(TowerError, match=rf"depth {depth} .* 1 to 32 blocks"):
            resolve_spec("Qwen/Qwen2-VL-2B-Instruct", random_weights=True, depth=depth)

    def test_a_file_says_that_weights_are_random(self, tmp_path: Path) -> None:
        name = "Qwen/Qwen2-VL-2B-Instruct"
        spec = resolve_spec(name, random_weights=True)
        assert spec.name == f"{name} (random weights)"
        (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
        assert resolve_spec(str(tmp_path)).name == str(tmp_path)

    def test_unknown_model(self) -> None:
        with pytest.raises(TowerError, match=r"known are Qwen/Qwen2-VL-2B-Instruct"):
            resolve_spec("Qwen/Qwen9", random_weights=True)

    def test_name_without_weights(self) -> None:
        with pytest.raises(TowerError, match=r"no weights are downloaded"):
            resolve_spec("Qwen/Qwen2-VL-2B-Instruct")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, r"config\.json does not exist"),
            ("{", r"config\.json is not a model's config"),
            ("[]", r"config\.json is not a model's config"),
            ('{"model_type": "llama"}', r"'llama' is not supported; supported are"),
            ("[" * 200_000, r"config\.json is .* too deeply nested"),
            (_vision(num_heads=0), r"vision_config\.num_heads is 0: .* greater"),
            (
                _vision(depth="two"),
                r"vision_config\.depth is 'two', not a whole number",
            ),
            (_vision(depth=True), r"vision_config\.depth is True, not a whole number"),
            (_vision(depth=None), r"vision_config\.depth is None, not a whole number"),
            (_vision(hidden_size=100), r"100 channels, which 16 heads cannot share"),
            (
                _vision(fullatt_block_indexes="all"),
                r"fullatt_block_indexes is 'all', not a list",
            ),
        ],
    )
    def test_bad_config(self, tmp_path: Path, text: str | None, message: str) -> None:
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            resolve_spec(str(tmp_path))


@cpu_only
class TestRefusals:
    @pytest.mark.parametrize(
        ("rows", "grids", "message"),
        [
            (0, [], r"list of grids is empty"),
            (64, [[1, 8]], r"grid 0 is \[1, 8\]"),
            (0, [[1, 0, 8]], r"grid 0 is \[1, 0, 8\]"),
            (63, [[1, 7, 9]], r"multiples of 2"),
            (60, [[1, 8, 8]], r"shape \(60, 1176\); these grids need \(64, 1176\)"),
        ],
    )
    def test_grids(self, rows: int, grids: list[list[int]], message: str) -> None:
        tower = small_tower("qwen2_vl")
        with pytest.raises(TowerError, match=message):
            tower.encode(torch.zeros(rows, tower.spec.patch_dim), grids)

    def test_patches_of_another_model(self) -> None:
        tower = small_tower("qwen2_vl")
        with pytest.raises(TowerError, match=r"these grids need \(64, 1176\)"):
            tower.encode(torch.zeros(64, 1536), [[1, 8, 8]])

    def test_backends(self) -> None:
        with pytest.raises(TowerError, match=r"'NONE_SUCH' is unknown to vLLM"):
            small_tower("qwen2_vl", "NONE_SUCH")
        with pytest.raises(TowerError, match=r"FLASH_ATTN does not run .* on cpu"):
            small_tower("qwen2_vl", "FLASH_ATTN")

    def test_devices(self) -> None:
        spec = small_spec("qwen2_vl")
        with pytest.raises(
            TowerError, match=r"'cuda' is not available; use cpu or one of 0"
        ):
            build_tower(spec, backend="FLASHINFER", dtype=torch.bfloat16, device="cuda")
        with pytest.raises(TowerError, match=r"compiling the tower needs a GPU"):
            build_tower(
                spec,
                backend="FLASHINFER",
                dtype=torch.bfloat16,
                device="cpu",
                compile=True,
            )


@cpu_only
class TestKernels:
    def test_by_layer_class(self) -> None:
        tower = small_tower("qwen2_5_vl")
        assert tower.kernels(GRIDS) == {"windows": "reference", "full": "reference"}
        assert small_tower("qwen2_vl").kernels(GRIDS) == {"all": "reference"}
        stock = small_tower("qwen3_vl", "TORCH_SDPA")
        assert stock.kernels(GRIDS) == {"all": "in-tree torch_sdpa"}

    def test_longest_sequences(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tower = small_tower("qwen2_5_vl")
        layer_cls = type(next(iter(tower.attention_layers().values())))
        monkeypatch.setattr(
            layer_cls, "kernel_for", lambda self, *lengths: str(lengths)
        )
        grids = [[1, 12, 20], [3, 4, 30]]
        kernels = tower.kernels(grids)
        assert kernels == {"windows": "(64, None)", "full": "(240, 150.0)"}
        kernels = tower.kernels([[1, 4, 6]])
        assert kernels == {"windows": "(24, None)", "full": "(24, 24.0)"}


class _OtherPlatform:
    device_name = "a GPU"

    def __init__(self) -> None:
        from vllm.platforms.interface import PlatformEnum

        self._enum = PlatformEnum.CUDA


@cpu_only
class TestCpuPlatform:
    def test_once_is_enough(self) -> None:
        assert use_cpu_platform()
        assert use_cpu_platform()

    def test_modules_that_hold_the_platform_see_the_cpu(self) -> None:
        # In a process of its own: here the platform was changed long ago.
        code = (
            "from vllm.platforms import current_platform as held\n"
            "from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform\n"
            "assert not held.is_cpu() and use_cpu_platform()\n"
            "assert held.is_cpu() and held.device_type == 'cpu'\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

    def test_leaves_other_platforms_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import vllm.platforms

        platform = _OtherPlatform()
        monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
        assert not use_cpu_platform()
        assert type(platform) is _OtherPlatform

    def test_too_late(self, monkeypatch: pytest.MonkeyPatch) -> None:
        small_tower("qwen2_vl")
        import vllm.platforms

        monkeypatch.setattr(vllm.platforms, "_current_platform", _OtherPlatform())
        with pytest.raises(RuntimeError, match=r"was imported for a GPU before"):
            use_cpu_platform(force=True)


GPU_MODELS = (
    "Qwen/Qwen2-VL-2B-Instruct",
    "Qwen/Qwen2.5-VL-3B-Instruct",
    "Qwen/Qwen3-VL-8B-Instruct",
)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("model", GPU_MODELS)
def test_true_width_on_a_gpu(model: str, compile: bool) -> None:
    spec = resolve_spec(model, random_weights=True, depth=2)
    grids = [[1, 32, 32], [1, 20, 26], [4, 12, 16], [1, 2, 2]]
    values = pixels(spec, grids)

    def encode(backend: str, dtype: torch.dtype, compile: bool = False) -> torch.Tensor:
        tower = build_tower(
            spec, backend=backend, dtype=dtype, device="cuda", compile=compile
        )
        return tower.encode(values, grids)

    exact = encode("TORCH_SDPA", torch.float32)
    stock = relative_error(encode("FLASH_ATTN", torch.bfloat16, compile), exact)
    ours = relative_error(encode("FLASHINFER", torch.bfloat16, compile), exact)
    assert ours <= 2 * stock

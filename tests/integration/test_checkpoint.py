# SPDX-License-Identifier: Apache-2.0
"""Towers from checkpoints: as transformers runs them, and damaged files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from _towers import FAMILIES, SMALL, cpu_only, pixels
from safetensors.torch import load_file, save_file

from cases import relative_error
from vllm_flashinfer_vit.towers import weights
from vllm_flashinfer_vit.towers.spec import CheckpointError, resolve_spec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower
from vllm_flashinfer_vit.towers.weights import load_weights

# A wide image with cut windows, one token, a square image, a video of two frames.
GRIDS = [[1, 12, 20], [1, 2, 2], [1, 8, 8], [2, 6, 4]]


def _hf_config(family: str) -> Any:
    import transformers

    vision = SMALL[family.removesuffix("_moe")]
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
        "glm4v_moe": "Glm4vMoe",
    }
    config_cls = getattr(transformers, f"{stem[family]}Config")
    model_cls = getattr(transformers, f"{stem[family]}ForConditionalGeneration")
    config = config_cls(text_config=text, vision_config=dict(vision))
    return model_cls, config


# The tower of `glm4v_moe` is that of `glm4v`; what a checkpoint holds differs.
@pytest.fixture(scope="module", params=[*FAMILIES, "glm4v_moe"])
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

    @pytest.mark.parametrize(
        ("opener", "error", "name"),
        [
            (f"{weights.__name__}.read_json", PermissionError, r"index\.json"),
            # safetensors takes the one for the other.
            ("safetensors.safe_open", FileNotFoundError, r"\.safetensors"),
        ],
    )
    def test_file_that_may_not_be_read(
        self,
        checkpoint: tuple[Path, Any],
        opener: str,
        error: type[OSError],
        name: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise error("No")

        # Root may read anything.
        monkeypatch.setattr(opener, refuse)
        with pytest.raises(CheckpointError, match=rf"{name} may not be read by this"):
            _build(checkpoint[0])

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

    def test_no_memory_for_the_weights(self, checkpoint: tuple[Path, Any]) -> None:
        class Full(torch.nn.Module):
            def load_weights(self, weights: Any) -> None:
                raise torch.OutOfMemoryError("CUDA out of memory")

        class FullCpu(torch.nn.Module):
            def load_weights(self, weights: Any) -> None:
                torch.empty(2**60, dtype=torch.uint8)

        # No fault of the checkpoint's.
        spec = resolve_spec(str(checkpoint[0]))
        with pytest.raises(torch.OutOfMemoryError):
            load_weights(Full(), spec, checkpoint[0])
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            load_weights(FullCpu(), spec, checkpoint[0])

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

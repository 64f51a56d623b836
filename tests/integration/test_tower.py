# SPDX-License-Identifier: Apache-2.0
"""vLLM's vision towers outside an engine: weights, results, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from _towers import FAMILIES, SMALL, cpu_only, pixels, small_spec, small_tower

from cases import relative_error
from vllm_flashinfer_vit.towers import spec as towers_spec
from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform
from vllm_flashinfer_vit.towers.spec import (
    NAMED_MODELS,
    CheckpointError,
    TowerError,
    TowerSpec,
    resolve_spec,
)
from vllm_flashinfer_vit.towers.tower import build_tower, check_backend

# A wide image with cut windows, one token, a square image, a video of two frames.
GRIDS = [[1, 12, 20], [1, 2, 2], [1, 8, 8], [2, 6, 4]]


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
        spec = TowerSpec(config, "cut", 2, family="qwen2_5_vl")
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
            (_vision(hidden_size=160), r"160 channels, which 16 heads .* in fours"),
            (_vision(in_channels=4), r"pixels of 4 channels, and .* images have 3"),
            (
                _vision(fullatt_block_indexes="all"),
                r"fullatt_block_indexes is 'all', not a list",
            ),
            (_vision(hidden_act=None), r"config\.json is not .*field 'hidden_act': \w"),
            (
                '{"model_type": "qwen2_5_vl", "rms_norm_eps": "x"}',
                r"config\.json is not .*'rms_norm_eps'",
            ),
            (_vision(window_size=27), r"27 pixels, smaller than a token's 28; down"),
        ],
    )
    def test_bad_config(self, tmp_path: Path, text: str | None, message: str) -> None:
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            resolve_spec(str(tmp_path))

    def test_config_that_may_not_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        # Root may read anything.
        monkeypatch.setattr(towers_spec, "read_json", refuse)
        with pytest.raises(CheckpointError, match=r"config\.json may not be read by"):
            resolve_spec(str(tmp_path))


@cpu_only
class TestRefusals:
    def test_an_activation_that_vllm_does_not_know(self) -> None:
        spec = small_spec("qwen3_vl")
        vision = {**spec.vision_config, "hidden_act": "gelu_of_mine"}
        spec = dataclasses.replace(spec, vision_config=vision)
        how = {"backend": "FLASHINFER", "dtype": torch.float32, "device": "cpu"}
        with pytest.raises(CheckpointError, match=r"does not know 'gelu_of_mine'"):
            build_tower(spec, **how)

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
    def test_grids_that_do_not_fit(
        self, rows: int, grids: list[list[int]], message: str
    ) -> None:
        tower = small_tower("qwen2_vl")
        with pytest.raises(TowerError, match=message):
            tower.encode(torch.zeros(rows, tower.spec.patch_dim), grids)

    def test_patches_of_another_model(self) -> None:
        tower = small_tower("qwen2_vl")
        with pytest.raises(TowerError, match=r"these grids need \(64, 1176\)"):
            tower.encode(torch.zeros(64, 1536), [[1, 8, 8]])

    def test_backends_that_do_not_run_here(self) -> None:
        with pytest.raises(TowerError, match=r"'NONE_SUCH' is unknown to vLLM"):
            small_tower("qwen2_vl", "NONE_SUCH")
        with pytest.raises(TowerError, match=r"FLASH_ATTN does not run .* on cpu"):
            small_tower("qwen2_vl", "FLASH_ATTN")

    def test_other_devices_than_its_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        for device in ("xpu", "cuda:2"):
            with pytest.raises(TowerError, match=rf"'{device}' is .* sees 2 GPUs; use"):
                check_backend("FLASHINFER", torch.device(device), torch.bfloat16)

    def test_devices_that_are_not_here(self) -> None:
        spec = small_spec("qwen2_vl")
        with pytest.raises(
            TowerError, match=r"'cuda' is not available: .* sees 0 GPUs; use"
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
        import vllm.platforms

        use_cpu_platform()
        use_cpu_platform()
        assert vllm.platforms.current_platform.is_cpu()

    def test_modules_that_hold_the_platform_see_the_cpu(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import vllm.platforms
        from vllm.platforms.interface import UnspecifiedPlatform

        # What vLLM finds without a GPU; this process's was changed long ago.
        held = UnspecifiedPlatform()
        monkeypatch.setattr(vllm.platforms, "_current_platform", held)
        assert not held.is_cpu()
        use_cpu_platform()
        assert held.is_cpu() and held.device_type == "cpu"
        assert vllm.platforms.current_platform is held

    def test_leaves_other_platforms_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import vllm.platforms

        platform = _OtherPlatform()
        monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
        use_cpu_platform()
        assert type(platform) is _OtherPlatform

    def test_no_operator_of_the_cpu_wheel(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As on a CPU with AMX, where vLLM would pack the weights of small layers.
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        tower = small_tower("qwen2_vl", "FLASHINFER", torch.bfloat16)
        grids = [[1, 4, 4]]
        assert tower.encode(pixels(tower.spec, grids), grids).isfinite().all()

    @pytest.mark.parametrize("name", ["QuickGELU", "SiluAndMul"])
    def test_no_compiled_activation(self, name: str) -> None:
        tower = small_tower("qwen2_vl")
        from vllm.model_executor.layers import activation

        with tower.running():
            built = getattr(activation, name)()
        values = torch.randn(3, 8)
        assert not hasattr(built, "op")
        assert torch.equal(built(values), built.forward_native(values))

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

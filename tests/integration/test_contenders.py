# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks stand on: compiled blocks, FlashAttention 4, steps of blocks."""

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _blocks import build
from _models import noise
from _towers import FAMILIES, cpu_only, pixels, small_spec, small_tower

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_host  # noqa: E402
from engines import compiles_blocks  # noqa: E402
from vllm_flashinfer_vit.towers.tower import Tower, build_tower  # noqa: E402

GRIDS = [[1, 12, 20], [1, 2, 2], [2, 6, 4]]
NAMES = {
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "glm4v": "GLM-4.1V",
}
IS_COMPILED = {
    family: compiles_blocks(name, version("vllm")) for family, name in NAMES.items()
}


@pytest.fixture
def compiled_tower(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tower]:
    """Return what builds towers as `compile` does on a GPU, but without Inductor."""
    from vllm import config

    compilation = config.CompilationConfig

    def compiling(**_: object) -> Any:
        return compilation(
            mode=config.CompilationMode.VLLM_COMPILE,
            compile_mm_encoder=True,
            backend="eager",
            custom_ops=["none"],
            # What a platform with CUDA graphs sets.
            compile_sizes=[],
        )

    def build(family: str, backend: str) -> Tower:
        with monkeypatch.context() as context:
            context.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
            context.setattr(config, "CompilationConfig", compiling)
            return small_tower(family, backend)

    return build


@cpu_only
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_compiles_the_blocks_of_these_towers(
    family: str, compiled_tower: Callable[..., Tower]
) -> None:
    blocks = compiled_tower(family, "TORCH_SDPA").visual.blocks
    flags = {getattr(block, "do_not_compile", True) for block in blocks}
    assert flags == {not IS_COMPILED[family]}


@cpu_only
@pytest.mark.extended
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "FLASHINFER"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if IS_COMPILED[name]])
def test_compiled_blocks_hold_either_attention(
    family: str, backend: str, compiled_tower: Callable[..., Tower], ran: list[int]
) -> None:
    tower = compiled_tower(family, backend)
    values = pixels(tower.spec, GRIDS)
    found = tower.encode(values, GRIDS)
    torch.compiler.reset()
    assert all(block.compiled for block in tower.visual.blocks)
    assert not ran
    expected = small_tower(family, backend).encode(values, GRIDS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@cpu_only
@pytest.mark.parametrize("head_dim", [72, 80])
@pytest.mark.parametrize(("asked", "runs"), [(None, 3), (4, 4)])
def test_encoders_follow_the_version_of_flash_attention_on_hopper(
    head_dim: int, asked: int | None, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = build_tower(
        small_spec("qwen3_vl"),
        backend="TORCH_SDPA",
        dtype=torch.float32,
        device="cpu",
        flash_attn_version=asked,
    )
    from vllm.model_executor.layers.attention import mm_encoder_attention as layers
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    hopper = SimpleNamespace(
        is_xpu=lambda: False,
        is_rocm=lambda: False,
        get_device_capability=lambda: DeviceCapability(9, 0),
    )
    monkeypatch.setattr(fa_utils, "current_platform", hopper)
    # It cannot be imported without a GPU.
    interface = SimpleNamespace(
        is_fa_version_supported=lambda number: True,
        fa_version_unsupported_reason=lambda number: None,
    )
    name = "vllm.vllm_flash_attn"
    for module in (name, f"{name}.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, interface)
    monkeypatch.setattr(
        layers,
        "get_vit_attn_backend",
        lambda **_: AttentionBackendEnum.FLASH_ATTN,
    )
    with tower.running():
        layer = layers.MMEncoderAttention(16, head_dim)
    assert layer._fa_version == runs


@cpu_only
@pytest.mark.parametrize("family", FAMILIES)
def test_each_step_of_a_block_can_be_run_alone(family: str) -> None:
    tower = build(family)
    patches = noise(16, tower.spec.patch_dim)
    with tower.running():
        steps = bench_host.steps_of(tower, lambda: tower.encode(patches, [[1, 4, 4]]))
        for step in steps.values():
            step()
    assert len(steps) == 8

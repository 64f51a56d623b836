# SPDX-License-Identifier: Apache-2.0
"""vLLM's own encoders on FLASHINFER against TORCH_SDPA: same weights, same output."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from _encoders import CROSS, DENSE, PACKED, WHISPER, programs_of
from _models import Encoder, OpCount, Result, encode, engine, noise, patches
from _towers import SMALL, cpu_only
from torch import nn

from cases import relative_error
from vllm_flashinfer_vit.blocks import mlp
from vllm_flashinfer_vit.plugin import all_patches, apply_model_patches
from vllm_flashinfer_vit.settings import Settings
from vllm_flashinfer_vit.towers.spec import TowerSpec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

# Two fp32 sums of the same few hundred terms in another order.
TOLERANCE = 1e-5

# True head dims; windowed, full-attention and tapped blocks where the family has them.
_CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 160, "hidden_size": 96, "mlp_ratio": 1},
    "qwen2_5_vl": {"depth": 3, "hidden_size": 160, "out_hidden_size": 96},
    "qwen3_vl": {
        "depth": 3,
        "hidden_size": 144,
        "out_hidden_size": 96,
        "deepstack_visual_indexes": [0, 1],
    },
    "glm4v": {"hidden_size": 256, "out_hidden_size": 96},
}
FAMILIES = {
    family: SMALL[family] | {"num_heads": 2} | changes
    for family, changes in _CHANGES.items()
}
IMAGES = {
    "one": [[1, 8, 8]],
    "several": [[1, 12, 20], [1, 6, 4], [1, 18, 10]],
    "video": [[5, 6, 8], [1, 4, 4]],
    "ragged-windows": [[1, 26, 38], [1, 10, 12]],
    "one-merged-row": [[1, 2, 40], [1, 30, 2], [1, 2, 2]],
    "many-windows": [[1, 64, 66]],
}


@cache
def qwen_tower(family: str, backend: str) -> Tower:
    spec = TowerSpec(
        family=family,  # type: ignore[arg-type]
        vision_config=FAMILIES[family],
        model=family,
        full_depth=FAMILIES[family]["depth"],
    )
    return build_tower(spec, backend=backend, dtype=torch.float32, device="cpu")


@cache
def engine_of(backend: str) -> Tower:
    return engine(backend)


def layer_classes(tower: Tower) -> set[str]:
    return {type(layer).__name__ for layer in tower.attention_layers().values()}


def compare(family: str, images: str) -> None:
    grids = IMAGES[images]
    tower, stock = (qwen_tower(family, name) for name in ("FLASHINFER", "TORCH_SDPA"))
    assert layer_classes(tower) == {"FlashInferViTAttention"}
    assert layer_classes(stock) == {"MMEncoderAttention"}
    pixels = noise(patches(grids), tower.spec.patch_dim)
    with OpCount() as count:
        out = tower.encode(pixels, grids)
    assert count.calls == tower.spec.depth
    assert relative_error(out, stock.encode(pixels, grids)) < TOLERANCE


@cpu_only
@pytest.mark.parametrize("images", IMAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_qwen_tower(family: str, images: str) -> None:
    compare(family, images)


@contextmanager
def without_model_patches() -> Iterator[None]:
    for patch in all_patches():
        if patch.name.endswith("-blocks"):
            patch.revert()
    try:
        yield
    finally:
        apply_model_patches(Settings())


@cpu_only
@pytest.mark.parametrize("family", FAMILIES)
def test_qwen_tower_without_model_patches(family: str) -> None:
    qwen_tower(family, "FLASHINFER")
    with without_model_patches():
        compare(family, "several")


def run(encoder: Encoder, tower: Tower) -> Result:
    try:
        return encode(encoder, tower)
    except ImportError as error:
        pytest.skip(f"not in this vLLM, or its transformers: {error}")
    except NotImplementedError as error:
        pytest.skip(f"in this vLLM it {error}")


ENCODERS = {**PACKED, **DENSE}


@cpu_only
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name: str) -> None:
    result = run(ENCODERS[name], engine_of("FLASHINFER"))
    assert result.layers == {"FlashInferViTAttention"}
    assert result.ops == ENCODERS[name].ops
    assert result.programs == programs_of(name)
    turns = ENCODERS[name].turns if programs_of(name) > 0 else "nothing"
    assert set(result.turns) == {turns}
    # Else the plans of the warm-up would serve another one.
    assert all(layout in layouts for layout, layouts in result.layouts)
    stock = run(ENCODERS[name], engine_of("TORCH_SDPA"))
    assert stock.layers == {"MMEncoderAttention"}
    assert stock.ops == stock.programs == 0
    assert relative_error(result.out, stock.out) < TOLERANCE


@cpu_only
@pytest.mark.usefixtures("direct", "nan_empty")
@pytest.mark.parametrize("name", [name for name in ENCODERS if ENCODERS[name].programs])
def test_encoder_whose_linear_layers_run_as_on_a_gpu(name: str) -> None:
    result = run(ENCODERS[name], engine_of("FLASHINFER"))
    assert result.programs == programs_of(name)
    stock = run(ENCODERS[name], engine_of("TORCH_SDPA"))
    assert relative_error(result.out, stock.out) < TOLERANCE


@cpu_only
@pytest.mark.usefixtures("direct", "nan_empty")
def test_a_clamped_activation_writes_into_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GLM-5.3's, by vLLM's op, which this machine lacks."""
    calls = []

    def clamped(
        out: torch.Tensor, values: torch.Tensor, limit: float, alpha: float, beta: float
    ) -> None:
        calls.append(out.data_ptr())
        gate, up = values.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out.copy_(gate * torch.sigmoid(alpha * gate) * (up + beta))

    ops = {"silu_and_mul_with_clamp": clamped}
    monkeypatch.setattr(mlp, "compiled_op", ops.get)
    result = run(ENCODERS["glm5next"], engine_of("FLASHINFER"))
    assert len(calls) == 2
    assert len(set(calls)) == 1
    stock = run(ENCODERS["glm5next"], engine_of("TORCH_SDPA"))
    assert relative_error(result.out, stock.out) < TOLERANCE


@cpu_only
def test_glm_5_takes_what_is_kept_without_graphs_too() -> None:
    """Stock's longest length is on the device there, where nothing can read it."""
    encoder = ENCODERS["glm5next"]
    longest, tables = mock.Mock(), mock.Mock()

    def twice(module: Any) -> tuple[nn.Module, Any]:
        built: Any
        built, call = encoder.build(module)
        tables.side_effect = built.rot_pos_emb
        # nn.Module finds what an object itself has first.
        built.compute_attn_mask_seqlen, built.rot_pos_emb = longest, tables
        return built, lambda: [call(), call()][1]

    assert run(replace(encoder, build=twice), engine_of("FLASHINFER")).programs == 4
    assert not longest.called
    assert tables.call_count == 1


@cpu_only
@pytest.mark.parametrize("name", [name for name in DENSE if DENSE[name].programs])
def test_encoder_whose_patches_are_embedded_as_on_a_gpu(name: str) -> None:
    """There a convolution does it, and streams lie channel by channel."""
    from vllm.model_executor.layers.conv import Conv2dLayer

    with mock.patch.object(Conv2dLayer, "forward_native", Conv2dLayer._forward_conv):
        result = run(DENSE[name], engine_of("FLASHINFER"))
        assert result.programs == programs_of(name)
        stock = run(DENSE[name], engine_of("TORCH_SDPA"))
    assert relative_error(result.out, stock.out) < TOLERANCE


@cpu_only
@pytest.mark.parametrize("name", CROSS)
def test_cross_shapes_fall_back(name: str) -> None:
    result = run(CROSS[name], engine_of("FLASHINFER"))
    assert result.layers == {"FlashInferViTAttention"}
    assert result.ops == 0
    stock = run(CROSS[name], engine_of("TORCH_SDPA"))
    assert relative_error(result.out, stock.out) < TOLERANCE


@cpu_only
def test_whisper_stays_in_tree() -> None:
    result = run(WHISPER, engine_of("FLASHINFER"))
    assert result.layers == {"WhisperEncoderAttention"}
    assert result.ops == 0
    assert torch.equal(result.out, run(WHISPER, engine_of("TORCH_SDPA")).out)


# Encoders that this test cannot build or compare on a GPU; the CPU tests have them.
NOT_ON_A_GPU = {
    "exaone4_5": "its tower pins memory, which a default device of cuda forbids",
    "glmasr": "stock cannot view TORCH_SDPA's output there",
    "kimi_k25": "its rotary table stays on the CPU outside an engine",
    "kimi_k3": "its rotary table stays on the CPU outside an engine",
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_on_a_gpu(name: str) -> None:
    if name in NOT_ON_A_GPU:
        pytest.skip(NOT_ON_A_GPU[name])
    half = {
        backend: run(ENCODERS[name], engine(backend, torch.bfloat16, "cuda"))
        for backend in ("FLASHINFER", "FLASH_ATTN")
    }
    exact = run(ENCODERS[name], engine("TORCH_SDPA", torch.float32, "cuda"))
    assert half["FLASHINFER"].layers == {"FlashInferViTAttention"}
    assert half["FLASHINFER"].ops == ENCODERS[name].ops
    errors = {name: relative_error(r.out, exact.out) for name, r in half.items()}
    assert errors["FLASHINFER"] <= 2 * errors["FLASH_ATTN"]

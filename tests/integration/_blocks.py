# SPDX-License-Identifier: Apache-2.0
"""Towers with patched blocks: built with and without patches, run and loaded again."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _models import noise
from _towers import DEVICE
from torch import nn

from vllm_flashinfer_vit import plugin
from vllm_flashinfer_vit.patches.patch import revert_group
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES
from vllm_flashinfer_vit.towers.spec import TowerSpec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

# No multiple of 8, like 3420 and the 1710 and 855 of its ranks.
SIZE, ALIGNED = 44, 64
GRIDS = [[1, 12, 20], [1, 6, 4]]
# Qwen3-VL's attention is of Qwen2.5-VL's class.
QUACK_QKV = {
    "qwen2_vl": "qwen2_vl-quack-qkv",
    "qwen2_5_vl": "qwen2_5_vl-quack-qkv",
    "qwen3_vl": "qwen2_5_vl-quack-qkv",
}
SPECS = {
    "qwen2_vl": {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 48,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 2,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 64,
        "hidden_act": "silu",
        "intermediate_size": SIZE,
        "num_heads": 2,
        "in_channels": 3,
        "out_hidden_size": 48,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 3,
        "hidden_size": 64,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": SIZE,
        "num_heads": 2,
        "in_channels": 3,
        "out_hidden_size": 48,
        "num_position_embeddings": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": [0, 1],
    },
}


def build(
    family: str = "qwen2_5_vl",
    backend: str = "FLASHINFER",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **vision: Any,
) -> Tower:
    spec = TowerSpec(
        family=family,  # type: ignore[arg-type]
        vision_config={**SPECS[family], **vision},
        model=family,
        checkpoint=None,
        full_depth=2,
    )
    return build_tower(spec, backend=backend, dtype=dtype, device=DEVICE, seed=seed)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Leave patches out of what is built, as the environment variable does."""
    model_patches = [
        patch for patch in plugin.all_patches() if not patch.name.startswith("select-")
    ]
    revert_group(model_patches)
    with pytest.MonkeyPatch.context() as context:
        context.setenv(ENV_DISABLE_PATCHES, ",".join(names))
        yield
    revert_group(model_patches)


def outputs(of: Tower) -> torch.Tensor:
    rows = sum(t * h * w for t, h, w in GRIDS)
    pixels = noise(rows, of.spec.patch_dim)
    return of.encode(pixels, GRIDS)


def mlp(of: Tower) -> Any:
    return of.visual.get_submodule("blocks.0.mlp")


def blocks(of: Tower) -> list[Any]:
    return list(of.visual.get_submodule("blocks"))


def checkpoint(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Return a tower's weights as a checkpoint holds them."""
    weights = []
    for name, parameter in build(
        backend="TORCH_SDPA", seed=seed
    ).visual.named_parameters():
        if "gate_up_proj" in name:
            for part, half in zip(("gate", "up"), parameter.chunk(2), strict=True):
                weights.append((name.replace("gate_up", part), half.clone()))
        else:
            weights.append((name, parameter.data.clone()))
    return weights


def load(into: Tower, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    with into.running():
        into.visual.load_weights(weights)  # type: ignore[operator]


def other_method(layer: nn.Module, prefix: str) -> Any:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class OtherMethod(UnquantizedLinearMethod):
        pass

    return OtherMethod()


QUANTIZED = SimpleNamespace(
    get_quant_method=other_method, online_quantization_config=None
)


def allow_lora(context: Tower, is_wanted: bool) -> None:
    lora = SimpleNamespace(enable_tower_connector_lora=is_wanted)
    object.__setattr__(context.vllm_config, "lora_config", lora)

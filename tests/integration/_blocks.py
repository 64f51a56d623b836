# SPDX-License-Identifier: Apache-2.0
"""Towers with patched blocks: built with and without patches, run and loaded again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _models import noise, offsets
from _towers import DEVICE, SMALL
from torch import nn
from torch.nn.functional import gelu, silu

from vllm_flashinfer_vit import plugin
from vllm_flashinfer_vit.blocks.attach import program_of
from vllm_flashinfer_vit.blocks.program import BlockProgram
from vllm_flashinfer_vit.gemms.quack import QUICK_GELU, SWIGLU, TANH_GELU
from vllm_flashinfer_vit.patches.patch import revert_group
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES, Settings
from vllm_flashinfer_vit.towers import tower
from vllm_flashinfer_vit.towers.spec import TowerSpec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

# No multiple of 8, like 3420 and the 1710 and 855 of its ranks.
SIZE, ALIGNED = 44, 64
GRIDS = [[1, 12, 20], [1, 6, 4]]
LAYERS = ("qkv", "proj", "first", "second")
_CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"mlp_ratio": 2},
    "qwen2_5_vl": {"intermediate_size": SIZE},
    "qwen3_vl": {
        "depth": 3,
        "intermediate_size": SIZE,
        "deepstack_visual_indexes": [0, 1],
    },
    # Its blocks' MLPs are as wide as its output.
    "glm4v": {"out_hidden_size": SIZE},
}
SPECS = {
    family: SMALL[family] | {"num_heads": 2} | changes
    for family, changes in _CHANGES.items()
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
        full_depth=2,
    )
    return build_tower(spec, backend=backend, dtype=dtype, device=DEVICE, seed=seed)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Leave patches and optimisations out of what is built, as the variable does."""
    model_patches = [
        patch for patch in plugin.all_patches() if not patch.name.startswith("select-")
    ]
    revert_group(model_patches)
    try:
        with pytest.MonkeyPatch.context() as context:
            context.setenv(ENV_DISABLE_PATCHES, ",".join(names))
            yield
    finally:
        revert_group(model_patches)
        plugin.apply_model_patches(Settings())


def outputs(of: Tower) -> torch.Tensor:
    rows = sum(t * h * w for t, h, w in GRIDS)
    pixels = noise(rows, of.spec.patch_dim)
    return of.encode(pixels, GRIDS)


def image(of: Tower, rows: int) -> torch.Tensor:
    """Encode an image of so many patches, a multiple of 4."""
    return of.encode(noise(rows, of.spec.patch_dim), [[1, 2, rows // 2]])


def programs(of: Tower) -> list[BlockProgram]:
    found = [program_of(block) for block in blocks(of)]
    assert all(found)
    return found  # type: ignore[return-value]


def linear_steps(of: BlockProgram) -> tuple[object, ...]:
    """Return what runs `LAYERS` of a block."""
    return of._attention.qkv.step, of._proj, of._mlp.first, of._mlp.second


def kinds(of: Tower) -> set[tuple[str, ...]]:
    """Return what runs `LAYERS`, once for all blocks that are alike."""
    return {
        tuple(type(step).__name__ for step in linear_steps(one)) for one in programs(of)
    }


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


def quantized(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have towers built whose layers have another method, if `part` is in their names.

    The values are the same.
    """

    def method(layer: nn.Module, prefix: str) -> Any:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        if part in prefix and hasattr(layer, "output_size"):
            return other_method(layer, prefix)
        # As `LinearBase` gets without a configuration.
        return UnquantizedLinearMethod() if hasattr(layer, "output_size") else None

    change_config(
        monkeypatch,
        quant_config=SimpleNamespace(
            get_quant_method=method, online_quantization_config=None
        ),
    )


def allow_lora(is_wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have towers built for an engine with or without adapters of its tower."""
    lora = SimpleNamespace(enable_tower_connector_lora=is_wanted)
    change_config(monkeypatch, lora_config=lora)


def change_config(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    """Have towers built in a `VllmConfig` with other values, unchecked."""
    make = tower.tower_config

    def config(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        for name, value in values.items():
            object.__setattr__(made.vllm, name, value)
        return made

    monkeypatch.setattr(tower, "tower_config", config)


def log_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect what a module says once in a process, every time."""
    lines: list[str] = []

    def say(message: str, *values: object) -> None:
        lines.append(message % values)

    logger = SimpleNamespace(info_once=say, warning_once=say)
    monkeypatch.setattr(module, "logger", logger)
    return lines


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


ACTIVATIONS = {
    "qwen2_vl": QUICK_GELU,
    "qwen2_5_vl": SWIGLU,
    "qwen3_vl": TANH_GELU,
    "glm4v": SWIGLU,
}
FUNCTIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    SWIGLU: swiglu,
    TANH_GELU: lambda x: gelu(x, approximate="tanh"),
    None: lambda x: x,
}


def stream(tower: Tower, rows: int = 24, batch: int = 1) -> torch.Tensor:
    width = blocks(tower)[0].norm1.weight.shape[0]
    return noise(rows, batch, width)


def tables(tower: Tower, rows: int = 24, batch: int = 1) -> dict[str, Any]:
    """What a tower hands to its blocks, for two sequences and equal ones in a batch."""
    layer = blocks(tower)[0].attn
    angles = noise(rows, layer.hidden_size_per_attention_head // 2)
    lengths = [rows // 3, rows - rows // 3] * batch
    found: dict[str, Any] = {
        "cu_seqlens": offsets(lengths),
        "rotary_pos_emb_cos": angles.cos(),
        "rotary_pos_emb_sin": angles.sin(),
        "max_seqlen": torch.tensor(rows, dtype=torch.int32),
    }
    if tower.spec.family not in ("qwen2_vl", "glm4v"):
        found["sequence_lengths"] = None
    return found


def call(tower: Tower, index: int, x: torch.Tensor, with_: dict[str, Any]) -> Any:
    with tower.running():
        return blocks(tower)[index](x, **with_)


@contextmanager
def noted(modules: Sequence[nn.Module]) -> Iterator[list[int]]:
    """Collect which of some modules are called, by their places, in order."""
    seen: list[int] = []
    hooks = [
        module.register_forward_pre_hook(lambda *_, at=at: seen.append(at))
        for at, module in enumerate(modules)
    ]
    yield seen
    for hook in hooks:
        hook.remove()

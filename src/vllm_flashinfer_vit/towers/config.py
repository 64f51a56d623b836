# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration of a tower that no engine runs, and what follows from it."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_flashinfer_vit.towers.spec import (
    FAMILIES,
    Family,
    TowerError,
    TowerSpec,
    model_module,
)

_DEVICE_NORMALIZE = "mm_device_do_normalize"
_INPUT_NORM = "vllm.model_executor.layers.fusion.mm_input_norm"


@contextmanager
def current_config(config: Any) -> Iterator[None]:
    """Hold a `VllmConfig` as the process's own."""
    from vllm.config import set_current_vllm_config

    # A worker sets the implementations of IR ops for good; a tower only while it runs.
    ir_ops = config.kernel_config.ir_op_priority
    with set_current_vllm_config(config), ir_ops.set_priority():
        yield


@contextmanager
def model_folder(spec: TowerSpec, image_processor: Any | None) -> Iterator[Path]:
    """Make the folder of a model for vLLM to read, without weights and tokenizer.

    Args:
        spec: What to build.
        image_processor: The model's, or None for a folder without one.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(_hf_config(spec)))
        if image_processor is not None:
            image_processor.save_pretrained(folder)
        yield folder


def tower_config(
    spec: TowerSpec,
    folder: Path,
    multimodal: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    compile: bool,
    fused_ops: bool,
    flash_attn_version: int | None,
) -> Any:
    """Return the `VllmConfig` that an engine would have for a tower.

    Args:
        spec: What to build.
        folder: From `model_folder`.
        multimodal: Multi-modal settings by vLLM's names for them.
        dtype: As for `build_tower`, like the rest.
        device: See `dtype`.
        compile: See `dtype`.
        fused_ops: See `dtype`.
        flash_attn_version: See `dtype`.
    """
    from vllm.config import (
        AttentionConfig,
        CompilationConfig,
        CompilationMode,
        DeviceConfig,
        ModelConfig,
        VllmConfig,
    )

    if fused_ops:
        # Without a compiler, vLLM turns its fused ops on.
        compilation = CompilationConfig(
            mode=CompilationMode.NONE, compile_mm_encoder=False
        )
    elif device.type == "cuda":
        compilation = CompilationConfig(compile_mm_encoder=compile)
    else:
        # Without compilation and custom operators, layers run their plain PyTorch code.
        compilation = CompilationConfig(
            mode=CompilationMode.NONE, custom_ops=["none"], compile_mm_encoder=False
        )
    with _inspected_here(spec.family):
        model_config = ModelConfig(
            model=str(folder), dtype=dtype, skip_tokenizer_init=True, **multimodal
        )
        return VllmConfig(
            model_config=model_config,
            compilation_config=compilation,
            attention_config=AttentionConfig(flash_attn_version=flash_attn_version),
            device_config=DeviceConfig(device=device.type),
        )


def pixel_settings(image_processor: Any | None) -> dict[str, bool]:
    """Return vLLM's setting of who normalises pixels, the tower or who calls it.

    Args:
        image_processor: The model's; vLLM then decides. None: who calls it.
    """
    from vllm.config import MultiModalConfig

    # vLLM before 0.28 has towers for normalised pixels alone.
    if _DEVICE_NORMALIZE not in MultiModalConfig.__dataclass_fields__:
        return {}
    # vLLM before 0.31 normalises elsewhere, to the same values but for rounding.
    if image_processor is not None and find_spec(_INPUT_NORM) is not None:
        return {}
    return {_DEVICE_NORMALIZE: False}


def normalizes_on_device(config: Any) -> bool:
    """Return whether a `VllmConfig` has the tower normalise bytes itself."""
    multimodal = config.model_config.multimodal_config
    return bool(getattr(multimodal, _DEVICE_NORMALIZE, False))


def input_norm(config: Any, device: torch.device) -> nn.Module | None:
    """Return what an engine normalises a tower's pixels with on the device, if it does.

    Args:
        config: From `tower_config`, while its folder is there.
        device: Where the tower runs.

    Raises:
        TowerError: The image processor's mean and std are no finite numbers, or std
            is 0.
    """
    if not normalizes_on_device(config):
        return None
    from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm

    try:
        with current_config(config), device:
            norm = build_mm_input_norm(config.model_config)
    except (ArithmeticError, AssertionError, ValueError) as error:
        raise TowerError(
            f"vLLM cannot normalise as the image processor does ({error}); check its "
            "mean and std"
        ) from error
    if not all(buffer.isfinite().all() for buffer in norm.buffers()):
        raise TowerError(
            "the image processor makes pixels NaN or infinite; check its mean and std"
        )
    return norm


@contextmanager
def _inspected_here(family: Family) -> Iterator[None]:
    from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel

    # vLLM would start a process, which has no CPU platform, to look at the class.
    name = FAMILIES[family].model
    lazy = ModelRegistry.models[name]
    model_cls = getattr(model_module(family), name)
    ModelRegistry.models[name] = _RegisteredModel.from_model_cls(model_cls)
    try:
        yield
    finally:
        ModelRegistry.models[name] = lazy


def _hf_config(spec: TowerSpec) -> dict[str, Any]:
    # vLLM validates a language model, which no tower ever builds.
    text = {
        "model_type": f"{spec.family}_text",
        "vocab_size": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    return {
        "architectures": [FAMILIES[spec.family].model],
        "model_type": spec.family,
        "text_config": text,
        "vision_config": {**spec.vision_config, "model_type": spec.family},
    }

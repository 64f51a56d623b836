# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration of a tower that no engine runs, and what follows from it."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_flashinfer_vit.towers.spec import FAMILIES, TowerError, TowerSpec

_DEVICE_NORMALIZE = "mm_device_do_normalize"
# The name that other vLLMs and checkpoints know.
_OLD_FP8 = "fp8"
_INPUT_NORM = "vllm.model_executor.layers.fusion.mm_input_norm"


class TowerConfig(NamedTuple):
    """What an engine would have for a tower.

    Attributes:
        vllm: The `VllmConfig`.
        processor_kwargs: What the engine calls the image processor with.
        input_norm: What the tower normalises bytes with, on its device; None for a
            tower of normalised pixels.
    """

    vllm: Any
    processor_kwargs: Mapping[str, Any]
    input_norm: nn.Module | None


@contextmanager
def current_config(config: Any) -> Iterator[None]:
    """Hold a `VllmConfig` as the process's own."""
    from vllm.config import set_current_vllm_config

    # A worker sets the implementations of IR ops for good; a tower only while it runs.
    ir_ops = config.kernel_config.ir_op_priority
    with set_current_vllm_config(config), ir_ops.set_priority():
        yield


def tower_config(
    spec: TowerSpec,
    *,
    device: torch.device,
    image_processor: Any | None = None,
    **how: Any,
) -> TowerConfig:
    """Return what an engine would have for a tower.

    Call `check_backend` and `check_quantization` first.

    Args:
        spec: What to build.
        device: Where it runs.
        image_processor: As for `build_tower`.
        **how: As for `vllm_config`.

    Raises:
        TowerError: The image processor's mean and std are no lists of finite numbers,
            or std is 0.
    """
    from vllm.config import MultiModalConfig

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(_hf_config(spec)))
        # Before 0.28 vLLM has no setting, and towers take normalised pixels. From 0.28
        # to 0.30 a model normalises before its tower, to the same but for rounding, so
        # it is off. From 0.31 on vLLM decides, given a processor whose values it reads.
        if image_processor is not None and find_spec(_INPUT_NORM) is not None:
            image_processor.save_pretrained(folder)
        elif _DEVICE_NORMALIZE in MultiModalConfig.__dataclass_fields__:
            how[_DEVICE_NORMALIZE] = False
        config = vllm_config(
            folder,
            FAMILIES[spec.family].model,
            spec.model_class(),
            device=device,
            **how,
        )
        norm = _input_norm(config, device)
    if config.quant_config is not None:
        from vllm.model_executor.model_loader.utils import configure_quant_config

        configure_quant_config(config.quant_config, spec.model_class())
    # A part of vLLM's compile cache key, and what scale files are compared with.
    config.model_config.model = spec.name
    settings = config.model_config.multimodal_config
    return TowerConfig(config, settings.merge_mm_processor_kwargs({}), norm)


def model_arguments(
    backend: str,
    attn_dtype: str | None = None,
    fp8_scale_path: Path | None = None,
    quantization: str | None = None,
    unquantized: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what `ModelConfig` is told about attention and linear layers.

    The arguments are those of `build_tower`.
    """
    from vllm.config.quantization import resolve_quantization_config

    arguments: dict[str, Any] = {
        "mm_encoder_attn_backend": backend,
        "mm_encoder_attn_dtype": attn_dtype,
    }
    if fp8_scale_path is not None:
        arguments["mm_encoder_fp8_scale_path"] = str(fp8_scale_path)
    if quantization is not None:
        ignored = {"ignore": list(unquantized)} if unquantized else None
        config = resolve_quantization_config(quantization, ignored)
        arguments |= {"quantization": quantization, "quantization_config": config}
    return arguments


def vllm_config(
    folder: Path,
    architecture: str,
    model_cls: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    compilation: Any | None = None,
    flash_attn_version: int | None = None,
    **model: Any,
) -> Any:
    """Return the `VllmConfig` of a model that no engine runs.

    Args:
        folder: Holds the model's `config.json`.
        architecture: The model's name there.
        model_cls: vLLM's class of the model.
        dtype: Of weights and activations.
        device: Where it runs.
        compilation: A `CompilationConfig`; None for one that compiles nothing.
        flash_attn_version: As for `build_tower`.
        **model: Other arguments of `ModelConfig`.
    """
    from vllm.config import AttentionConfig, DeviceConfig, ModelConfig, VllmConfig

    if compilation is None:
        compilation = compilation_config(device)
    with _inspected_here(architecture, model_cls):
        return VllmConfig(
            model_config=ModelConfig(
                model=str(folder),
                dtype=dtype,
                skip_tokenizer_init=True,
                trust_remote_code=False,
                **model,
            ),
            compilation_config=compilation,
            attention_config=AttentionConfig(flash_attn_version=flash_attn_version),
            device_config=DeviceConfig(device=device.type),
        )


def normalizes_on_device(config: Any) -> bool:
    """Return whether a `VllmConfig` has the tower normalise bytes itself."""
    multimodal = config.model_config.multimodal_config
    return bool(getattr(multimodal, _DEVICE_NORMALIZE, False))


def check_quantization(
    quantization: str | None, unquantized: Sequence[str], device: torch.device
) -> None:
    """Check how a tower's linear layers are to be quantised as they are loaded.

    Args:
        quantization: As for `build_tower`.
        unquantized: As for `build_tower`.
        device: The tower's.

    Raises:
        TowerError: vLLM has no such method, or it cannot be had here.
    """
    if quantization is None:
        if unquantized:
            raise TowerError(
                "--unquantized needs --quantization: add it, or leave both out"
            )
        return
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    lists = [name for name in ONLINE_QUANT_SHORTHAND_NAMES if name != "online"]
    # Others are for weights that a checkpoint has quantised.
    if quantization not in (_OLD_FP8, *lists):
        raise TowerError(
            f"--quantization {quantization!r} quantises no 16-bit weights: use "
            + ", ".join([_OLD_FP8, *lists])
        )
    if unquantized and quantization == _OLD_FP8:
        raise TowerError(
            f"--quantization {_OLD_FP8} takes no --unquantized: leave it out, or use "
            + ", ".join(lists)
        )
    for name in unquantized:
        _check_pattern(name)
    if device.type == "cpu":
        raise TowerError("--quantization needs a GPU: use one, or leave it out")


def _check_pattern(name: str) -> None:
    """Check that vLLM can read a name or pattern of layers."""
    import regex

    if not name.startswith("re:"):
        return
    try:
        regex.compile(name.removeprefix("re:"))
    except regex.error as error:
        raise TowerError(
            f"--unquantized {name!r} is not a regular expression ({error}): correct "
            "what follows re:"
        ) from None


def compilation_config(
    device: torch.device, compile: bool = False, fused_ops: bool = False
) -> Any:
    """Return a `CompilationConfig`; the arguments are those of `build_tower`."""
    from vllm.config import CompilationConfig, CompilationMode

    if fused_ops:
        # Without a compiler, vLLM turns its fused ops on.
        return CompilationConfig(mode=CompilationMode.NONE, compile_mm_encoder=False)
    if device.type == "cuda":
        return CompilationConfig(compile_mm_encoder=compile)
    # Without compilation and custom operators, layers run their plain PyTorch code.
    return CompilationConfig(
        mode=CompilationMode.NONE, custom_ops=["none"], compile_mm_encoder=False
    )


def _input_norm(config: Any, device: torch.device) -> nn.Module | None:
    if not normalizes_on_device(config):
        return None
    from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm

    try:
        with current_config(config), device:
            norm = build_mm_input_norm(config.model_config)
    except (ArithmeticError, AssertionError, TypeError, ValueError) as error:
        raise TowerError(
            f"vLLM cannot normalise as the image processor does ({error}); check its "
            "mean and std, lists of one number per channel"
        ) from error
    if not all(buffer.isfinite().all() for buffer in norm.buffers()):
        raise TowerError(
            "the image processor makes pixels NaN or infinite; check its mean and std"
        )
    return norm


@contextmanager
def _inspected_here(name: str, model_cls: Any) -> Iterator[None]:
    from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel

    # vLLM would start a process, which has no CPU platform, to look at the class.
    lazy = ModelRegistry.models[name]
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

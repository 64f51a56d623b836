# SPDX-License-Identifier: Apache-2.0
"""vLLM's real models without their language model, built outside an engine.

The model's class, its tower and its projector are vLLM's own, and so are the names of
its layers, as an engine has them. It is built as vLLM builds it for `mm_encoder_only`.
"""

import json
import math
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_flashinfer_vit.towers.built import Built, kernel_name
from vllm_flashinfer_vit.towers.config import (
    current_config,
    model_arguments,
    tower_config,
    vllm_config,
)
from vllm_flashinfer_vit.towers.spec import Spec, TowerError, TowerSpec
from vllm_flashinfer_vit.towers.tower import (
    build_tower,
    check_backend,
    finish_weights,
    init_distributed,
)
from vllm_flashinfer_vit.towers.weights import (
    fill_with_random_weights,
    make_attention_matter,
)
from vllm_flashinfer_vit.towers.whole import ModelSpec

_PACKAGE = __name__.partition(".")[0]


class ModelTower(Built):
    """A model's tower and projector, ready to run; see `Built`."""

    spec: ModelSpec

    def encode(self, **inputs: Any) -> torch.Tensor:
        """Encode images, as the engine does.

        Args:
            **inputs: Those of a `Cut`; pixels on any device, in any float dtype.

        Returns:
            `[tokens, hidden]` in the tower's dtype, what the language model receives.
        """
        model: Any = self.visual
        placed = self.placed(inputs)
        if self.spec.has_images_apart():
            placed["pixel_values"] = [placed["pixel_values"]]
        with self.running():
            return torch.cat(list(model.embed_multimodal(**placed)))

    def placed(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `encode`, where this vLLM's engine has them.

        Args:
            inputs: As for `Built.placed`.
        """
        placed = super().placed(inputs)
        if not self.spec.counts_on_device():
            return placed
        return {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in placed.items()
        }

    def kernels(self, grid_thw: Sequence[Sequence[int]]) -> dict[str, str]:
        """Return the kernel that serves the layers, for these images.

        Args:
            grid_thw: Of each image, as `Cut.grid`.
        """
        extra = self.spec.whole.extra_tokens
        lengths = [rows * columns + extra for _, rows, columns in grid_thw]
        patches = sum(math.prod(grid) + extra * grid[0] for grid in grid_thw)
        mean = patches / sum(frames for frames, _, _ in grid_thw)
        names = {
            kernel_name(layer, max(lengths), mean)
            for layer in self.attention_layers().values()
        }
        return {"all": ", ".join(sorted(names)) or "Transformers' own"}


def build(spec: Spec, *, image_processor: Any | None = None, **how: Any) -> Built:
    """Build what a spec of either kind says.

    Args:
        spec: From `resolve`.
        image_processor: As for `build_tower`; other models' always normalises.
        **how: As for `build_tower` or `build_model`.

    Returns:
        A `Tower` of a `TowerSpec`, a `ModelTower` of a `ModelSpec`.

    Raises:
        TowerError: See these.
    """
    if isinstance(spec, TowerSpec):
        return build_tower(spec, image_processor=image_processor, **how)
    assert isinstance(spec, ModelSpec)
    return build_model(spec, **how)


def check_quantizable(
    spec: Spec, quantization: str | None, unquantized: Sequence[str]
) -> None:
    """Check that what a spec builds is quantised at all, if that is asked for.

    Args:
        spec: From `resolve`.
        quantization: As for `build_tower`.
        unquantized: As for `build_tower`.

    Raises:
        TowerError: It is not.
    """
    if isinstance(spec, TowerSpec) or (quantization is None and not unquantized):
        return
    raise TowerError(
        f"the layers of {spec.model} are not quantised outside an engine: leave "
        "--quantization and --unquantized out"
    )


def processor_kwargs(
    spec: Spec, device: torch.device, image_processor: Any
) -> Mapping[str, Any]:
    """Return what an engine calls the image processor of a spec's tower with.

    Args:
        spec: From `resolve`.
        device: As for `build_tower`.
        image_processor: As for `build_tower`.
    """
    if not isinstance(spec, TowerSpec):
        return {}
    return tower_config(
        spec, dtype=torch.float32, device=device, image_processor=image_processor
    ).processor_kwargs


def build_model(
    spec: ModelSpec,
    *,
    backend: str,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int = 0,
    attn_dtype: str | None = None,
    fp8_scale_path: Path | None = None,
    quantization: str | None = None,
    unquantized: Sequence[str] = (),
) -> ModelTower:
    """Build a model without its language model, and fill in random weights.

    Args:
        spec: From `resolve`.
        backend: As for `build_tower`, like the rest.
        dtype: See `backend`.
        device: See `backend`.
        seed: See `backend`.
        attn_dtype: See `backend`.
        fp8_scale_path: See `backend`.
        quantization: None; no other is supported here.
        unquantized: As `quantization`.

    Raises:
        TowerError: The backend is unknown or not available on this device; or the
            installed vLLM or Transformers cannot build the model.
    """
    device = torch.device(device)
    check_quantizable(spec, quantization, unquantized)
    check_backend(backend, device, dtype)
    cls = spec.model_class()
    attention = model_arguments(backend, attn_dtype, fp8_scale_path)
    # vLLM looks for files beside the config while it builds some models.
    with tempfile.TemporaryDirectory() as folder:
        config = _config(spec, cls, Path(folder), dtype, device, **attention)
        with current_config(config):
            init_distributed()
            model = _build(spec, cls, config, dtype, device)
            fill_with_random_weights(model, seed)
            make_attention_matter(model)
            finish_weights(model, config, device)
    return ModelTower(spec, backend, model.eval(), config, dtype, device)


def _config(
    spec: ModelSpec,
    cls: Any,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    **attention: Any,
) -> Any:
    from vllm.config import MultiModalConfig

    wanted = spec.config()
    # Else some vLLMs look into the checkpoint for a head of the language model.
    wanted.tie_word_embeddings = False
    # Read first, and then replaced: not every config can be read from a file.
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if "mm_device_do_normalize" in MultiModalConfig.__dataclass_fields__:
        attention["mm_device_do_normalize"] = False
    try:
        config = vllm_config(
            folder,
            wanted.architectures[0],
            cls,
            dtype=dtype,
            device=device,
            hf_config_path=str(folder),
            hf_overrides=lambda config: wanted,
            mm_encoder_only=True,
            **attention,
        )
    except (TypeError, ValueError, AttributeError, KeyError, AssertionError) as error:
        raise spec.unbuildable(error) from error
    # A part of vLLM's compile cache key, and what scale files are compared with.
    config.model_config.model = spec.name
    return config


def _build(
    spec: ModelSpec, cls: Any, config: Any, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    from vllm.utils.torch_utils import set_default_torch_dtype

    try:
        with set_default_torch_dtype(dtype), device:
            return cls(vllm_config=config, prefix="")
    except (TypeError, AttributeError, KeyError, AssertionError) as error:
        if _is_ours(error):
            raise
        raise spec.unbuildable(error) from error


def _is_ours(error: Exception) -> bool:
    """Whether this package raised an error: then no other version would help."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").startswith(f"{_PACKAGE}.")

# SPDX-License-Identifier: Apache-2.0
"""What a tower that was built offers, whatever it takes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vllm_flashinfer_vit.towers.config import current_config, normalizes_on_device
from vllm_flashinfer_vit.towers.spec import Spec


@dataclass(frozen=True, eq=False)
class Built:
    """A tower, ready to run.

    Attributes:
        spec: What was asked for.
        backend: Name of the attention backend in the engine's configuration.
        visual: vLLM's module: the tower, or a `ModelTower`'s whole model.
        vllm_config: The `VllmConfig` that it was built with.
        dtype: Dtype of weights and activations.
        device: Where it runs.
        processor_kwargs: What an engine calls the image processor with, for `visual`
            to fit it; empty where that normalises.
    """

    spec: Spec
    backend: str
    visual: nn.Module
    vllm_config: Any
    dtype: torch.dtype
    device: torch.device
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Encode one image or several; which arguments depends on the tower."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Run once, if that needs no image."""

    def kernels(self, grid_thw: Sequence[Sequence[int]]) -> dict[str, str]:
        """Return the kernel that serves each class of layers, for these images."""
        raise NotImplementedError

    @property
    def pixel_dtype(self) -> torch.dtype:
        """What `visual` takes: uint8 if it normalises pixels itself, else `dtype`."""
        return torch.uint8 if normalizes_on_device(self.vllm_config) else self.dtype

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold what a call of `visual` needs: inference mode and vLLM's config."""
        with torch.inference_mode(), current_config(self.vllm_config):
            yield

    def attention_layers(self) -> dict[str, nn.Module]:
        """Return the attention layers by module name, first block first."""
        from vllm.model_executor.layers.attention.mm_encoder_attention import (
            MMEncoderAttention,
        )

        return {
            name: module
            for name, module in self.visual.named_modules()
            if isinstance(module, MMEncoderAttention)
        }

    def placed(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `encode`, with pixels where the tower takes them.

        Args:
            inputs: From an image; bytes stay bytes, and counts stay on the CPU.
        """

        def place(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(place, value))
            if not isinstance(value, torch.Tensor):
                return value
            is_float = value.is_floating_point()
            return value.to(self.device, self.dtype if is_float else value.dtype)

        # As engines keep them: what a tower's loops are made of stays on the CPU.
        return {
            name: place(value) if name.startswith("pixel") else value
            for name, value in inputs.items()
        }


def kernel_name(layer: Any, longest: float, mean: float | None) -> str:
    """Return the kernel that serves a layer; vLLM's own has `in-tree` before it.

    Args:
        layer: An attention layer.
        longest: Tokens of the longest sequence.
        mean: Of all sequences; None if all are as long.
    """
    kernel_for: Any = getattr(layer, "kernel_for", None)
    if kernel_for:
        return kernel_for(longest, mean)
    return f"in-tree {layer.attn_backend.name.lower()}"

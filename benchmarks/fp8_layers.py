# SPDX-License-Identifier: Apache-2.0
"""Of fp8_accuracy.py: towers with linear layers in FP8, and vLLM's beside them.

Only a GPU has such layers. vLLM's own run where the optimisation `fp8_linear` is left
out: by the same weights, with the same attention, but scales as vLLM takes them.
"""

import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from chosen_rows import QUANTIZATIONS, QUANTIZED
from environment import device
from failures import Failures
from fp8_inputs import Images, Size

# Channels of each norm's output that are this many times as large as the others, as
# LLMs and towers have them (Dettmers et al., LLM.int8(), arXiv:2208.07339).
OUTLIER_CHANNELS, OUTLIER_FACTOR = 8, 30.0
_BY_TENSOR, _BY_CHANNEL = QUANTIZATIONS[QUANTIZED], "fp8_per_channel"


class Method(NamedTuple):
    """How a tower's linear layers run.

    Attributes:
        quantization: As `--quantization`.
        is_stock: Whether by vLLM's own steps.
        attn_dtype: As `--mm-encoder-attn-dtype`.
    """

    quantization: str
    is_stock: bool = False
    attn_dtype: str | None = None


METHODS = {
    "tensor, vLLM": Method(_BY_TENSOR, is_stock=True),
    "tensor": Method(_BY_TENSOR),
    "tensor, FP8 attention": Method(_BY_TENSOR, attn_dtype="fp8"),
    "channel, vLLM": Method(_BY_CHANNEL, is_stock=True),
    "channel": Method(_BY_CHANNEL),
    "channel, FP8 attention": Method(_BY_CHANNEL, attn_dtype="fp8"),
}


def add_outliers(visual: torch.nn.Module) -> None:
    """Make some channels of what the norms of blocks return much larger."""
    for name, parameter in visual.named_parameters():
        if name.startswith("blocks.") and ".norm" in name and name.endswith("weight"):
            generator = torch.Generator().manual_seed(len(parameter))
            order = torch.randperm(len(parameter), generator=generator)
            parameter.data[order[:OUTLIER_CHANNELS].to(parameter.device)] *= (
                OUTLIER_FACTOR
            )


def layer_rows(
    model: str,
    size: Size,
    failures: Failures,
    distances: Callable[..., dict[str, str]],
) -> Iterator[dict[str, object]]:
    """Compare a tower's embeddings of one image by every method, on both inputs.

    Args:
        model: A name in `NAMED_MODELS`.
        size: Of the tower and its image.
        failures: Gets what did not run.
        distances: Of an output from fp32's and bf16's.
    """
    from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES
    from vllm_flashinfer_vit.towers.spec import resolve_spec
    from vllm_flashinfer_vit.towers.tower import build_tower

    spec = resolve_spec(model, random_weights=True, depth=size.depth)
    pixels, grids = Images(spec, size)(0)

    def encoded(name: str, **options: Any) -> tuple[torch.Tensor, Any]:
        options = {"backend": "FLASHINFER", "dtype": torch.bfloat16, **options}
        tower = build_tower(spec, device=device(), **options)
        if name == "outliers":
            add_outliers(tower.visual)
        return tower.encode(pixels, grids), tower

    for name in ("images", "outliers"):
        fp32, _ = encoded(name, backend="TORCH_SDPA", dtype=torch.float32)
        bf16, tower = encoded(name)
        found = {"bf16": (bf16, tower)}
        for label, method in METHODS.items():
            off = {ENV_DISABLE_PATCHES: "fp8_linear"} if method.is_stock else {}
            with (
                failures.noted(f"{model} {name} {label}"),
                mock.patch.dict(os.environ, off),
            ):
                found[label] = encoded(
                    name,
                    quantization=method.quantization,
                    attn_dtype=method.attn_dtype,
                )
        for label, (out, tower) in found.items():
            kernels = tower.kernels(grids)
            layer = next(iter(tower.attention_layers().values()))
            yield {
                "level": "layers",
                "input": name,
                "seed": 0,
                "method": label,
                "kernel": " ".join(f"{k}:{kernel}" for k, kernel in kernels.items()),
                "model": model,
                "head_dim": layer.head_size,
                "tokens": math.prod(grids[0]),
                **distances(out, fp32, bf16),
            }

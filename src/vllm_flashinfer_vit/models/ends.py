# SPDX-License-Identifier: Apache-2.0
"""What a tower runs before its first block and after its last, by fewer calls.

They are the calls that vLLM's own modules end up with, for the same bits, in towers
whose blocks have programs. Compiled modules keep vLLM's own path, and mergers with
quantised layers, adapters or sums over ranks, and on CPUs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from vllm_flashinfer_vit.models._shared import LINEAR, MODELS, Function
from vllm_flashinfer_vit.patches.patch import Patch

_CONVOLUTION = tuple(
    f"vllm.model_executor.layers.conv:{method}"
    for method in (
        "ConvLayerBase.__init__",
        "Conv3dLayer._forward_mulmat",
        "Conv3dLayer.forward_cuda",
        "Conv3dLayer.forward_native",
    )
)


def patch_embed(family: str, module: str) -> Patch:
    """Return the patch of a projection of patches.

    Args:
        family: vLLM's module of the model.
        module: The class, whose `proj` is a `Conv3dLayer` over a patch.
    """
    return Patch(
        name=f"{family}-patch-embed",
        target=f"{MODELS}.{family}:{module}.forward",
        stands_for=(
            f"{MODELS}.{family}:{module}.forward",
            f"{MODELS}.{family}:{module}.__init__",
            *_CONVOLUTION,
        ),
        why="stock unfolds each patch into itself by eight views before the GEMM",
        remove_when="vLLM's Conv3dLayer takes patches as rows",
        parameters=("self", "x"),
        replace=_embed,
    )


def _embed(original: Function) -> Function:
    from vllm_flashinfer_vit.blocks.attach import is_served_part

    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not is_served_part(self):
            return original(self, x)
        proj = self.proj
        if not proj.enable_linear:
            return original(self, x)
        # A kernel as large as its stride sees each value once, in the patch's order.
        return linear(x, proj.weight.view(proj.out_channels, -1), proj.bias)

    return forward


def merger(
    family: str,
    module: str,
    normalize: Callable[[Any, torch.Tensor], torch.Tensor],
    mlp: Callable[[Any], Sequence[Any]],
) -> Patch:
    """Return the patch of what merges a tower's tokens: a norm and an MLP.

    Args:
        family: vLLM's module of the model.
        module: The class.
        normalize: Takes such a module and its input; returns the MLP's rows.
        mlp: Returns the module's first linear layer, its activation, and the second.
    """
    return Patch(
        name=f"{family}-merger",
        target=f"{MODELS}.{family}:{module}.forward",
        stands_for=(
            f"{MODELS}.{family}:{module}.__init__",
            f"{MODELS}.{family}:{module}.forward",
            *LINEAR,
        ),
        why="stock pays for a dozen layers of Python around two GEMMs",
        remove_when="vLLM's linear layers take the host no longer than their GEMM",
        parameters=("self", "x"),
        replace=functools.partial(_merge, normalize=normalize, mlp=mlp),
    )


def _merge(
    original: Function,
    normalize: Callable[[Any, torch.Tensor], torch.Tensor],
    mlp: Callable[[Any], Sequence[Any]],
) -> Function:
    from vllm_flashinfer_vit.blocks import layers
    from vllm_flashinfer_vit.blocks.attach import is_served_part

    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not is_served_part(self):
            return original(self, x)
        first, act, second = mlp(self)
        if not (layers.can_run(first) and layers.can_run(second)):
            return original(self, x)
        # vLLM's parameters take every call through Python.
        with torch._C.DisableTorchFunctionSubclass():
            rows = normalize(self, x)
            hidden = act(linear(rows, first.weight, first.bias))
            return linear(hidden, second.weight, second.bias)

    return forward


def normalize_patches(merger: Any, x: torch.Tensor) -> torch.Tensor:
    """Normalise the patches of Qwen2-VL's and Qwen2.5-VL's mergers, then merge them."""
    return merger.ln_q(x).view(-1, merger.hidden_size)

# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL and Qwen2.5-VL: what the GPU does between two attention layers.

Aligned GEMMs, and vLLM's own compiled activations and norms where the engine would run
them as several kernels: it turns them off for the language model, which it compiles,
and leaves encoders uncompiled.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from vllm_flashinfer_vit.patches._patch import Patch
from vllm_flashinfer_vit.support import SUPPORTED_VLLM


def _align_mlp(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from vllm.model_executor.layers.activation import SiluAndMul
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        from vllm_flashinfer_vit.aligned_linear import AlignedLinearMethod, aligned_size
        from vllm_flashinfer_vit.selection import flashinfer_requested

        size = self.down_proj.input_size_per_partition
        methods = {type(self.gate_up_proj.quant_method)}
        methods.add(type(self.down_proj.quant_method))
        if (
            not flashinfer_requested()
            or aligned_size(size) == size
            or methods != {UnquantizedLinearMethod}
            or not isinstance(self.act_fn, SiluAndMul)
            or _may_get_lora()
        ):
            return
        # silu(0) * 0 is 0, so what the first layer pads is zero in the second one too.
        self.gate_up_proj.quant_method = AlignedLinearMethod(0, size, parts=2)
        self.down_proj.quant_method = AlignedLinearMethod(1, size)

    return __init__


def _may_get_lora() -> bool:
    from vllm.config import get_current_vllm_config

    # Adapters are added to outputs of the checkpoint's size.
    lora = get_current_vllm_config().lora_config
    return lora is not None and lora.enable_tower_connector_lora


def _fuse_gelu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from vllm.model_executor.layers.activation import QuickGELU

        from vllm_flashinfer_vit.selection import flashinfer_requested

        if (
            flashinfer_requested()
            and isinstance(self.act, QuickGELU)
            and _has_compiled("gelu_quick")
        ):
            self.act._forward_method = self.act.forward_cuda

    return __init__


def _has_compiled(*names: str) -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cuda() and all(
        hasattr(torch.ops._C, name) for name in names
    )


def _fuse_norms_and_silu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any,
        x: torch.Tensor,
        grid_thw: list[list[int]] | None,
        *,
        encoder_metadata: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        with _compiled_ops(self):
            return original(self, x, grid_thw, encoder_metadata=encoder_metadata)

    return forward


@contextmanager
def _compiled_ops(tower: Any) -> Iterator[None]:
    """Run an uncompiled FLASHINFER tower's norms and activation by vLLM's kernels."""
    from vllm import envs, ir
    from vllm.model_executor.layers.activation import SiluAndMul

    from vllm_flashinfer_vit.layer import FlashInferViTAttention

    block = tower.blocks[0]
    if (
        not isinstance(block.attn.attn, FlashInferViTAttention)
        # Inductor fuses these ops, and more than these.
        or not getattr(block, "do_not_compile", True)
        or envs.VLLM_BATCH_INVARIANT
        or not _has_compiled("rms_norm", "fused_add_rms_norm", "silu_and_mul")
    ):
        yield
        return
    act = block.mlp.act_fn
    with ExitStack() as stack:
        for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
            # Anything but `native` is a choice that the user or the platform made.
            if op.get_priority() in ([], ["native"]):
                stack.enter_context(op.set_priority(["vllm_c", "native"]))
        if isinstance(act, SiluAndMul):
            # All blocks share it with any other model of this process.
            stack.callback(setattr, act, "_forward_method", act._forward_method)
            act._forward_method = act.forward_cuda
        yield


_INIT_PARAMETERS = ("self", "in_features", "hidden_features")
_UNFUSED = (
    "the engine's default turns vLLM's own kernels off, for a compiler that does not "
    "run on encoders, so each op runs as several kernels"
)
_REMOVE_FUSED_WHEN = "vLLM chooses the ops of encoders apart from the language model's"

PATCHES = (
    Patch(
        name="qwen2_5_vl-aligned-mlp",
        target="vllm.model_executor.models.qwen2_5_vl:Qwen2_5_VisionMLP.__init__",
        why="rows of 3420 values do not fit 16-byte loads, so down_proj is slow",
        vllm_range=SUPPORTED_VLLM,
        remove_when="vLLM pads this layer, or cuBLAS is as fast for such rows",
        parameters=(
            *_INIT_PARAMETERS,
            "bias",
            "act_fn",
            "quant_config",
            "prefix",
        ),
        replace=_align_mlp,
    ),
    Patch(
        name="qwen2_5_vl-fused-ops",
        target="vllm.model_executor.models.qwen2_5_vl:"
        "Qwen2_5_VisionTransformer.forward",
        why=_UNFUSED,
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_FUSED_WHEN,
        parameters=("self", "x", "grid_thw", "encoder_metadata"),
        replace=_fuse_norms_and_silu,
    ),
    Patch(
        name="qwen2_vl-fused-gelu",
        target="vllm.model_executor.models.qwen2_vl:Qwen2VisionMLP.__init__",
        why=_UNFUSED,
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_FUSED_WHEN,
        parameters=(*_INIT_PARAMETERS, "act_layer", "quant_config", "prefix"),
        replace=_fuse_gelu,
    ),
)

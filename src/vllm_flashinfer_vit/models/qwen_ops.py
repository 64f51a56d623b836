# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: what the GPU does between two attention layers.

Aligned GEMMs, activations as a part of one, QKV projections by a faster one, residual
sums and norms as one op, and vLLM's own compiled activations and norms where the engine
would run them as several kernels: it turns them off for the language model, which it
compiles, and leaves encoders uncompiled.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from vllm_flashinfer_vit.blocks.chain import chained, has_known_forward
from vllm_flashinfer_vit.machine.versions import SUPPORTED_VLLM
from vllm_flashinfer_vit.patches.patch import Patch


def _align_mlp(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from vllm.model_executor.layers.activation import SiluAndMul

        # silu(0) * 0 is 0, so what the first layer pads is zero in the second one too.
        if isinstance(self.act_fn, SiluAndMul):
            _align(self.gate_up_proj, self.down_proj, parts=2)

    return __init__


def _align_gelu_mlp(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # So is GELU of 0.
        if isinstance(self.act_fn, torch.nn.GELU):
            _align(self.linear_fc1, self.linear_fc2, parts=1)

    return __init__


def _align(first: Any, second: Any, parts: int) -> None:
    """Have what one layer returns and the other takes padded, if it is unaligned."""
    from vllm_flashinfer_vit.blocks.aligned_linear import (
        AlignedLinearMethod,
        aligned_size,
    )
    from vllm_flashinfer_vit.engine.selection import flashinfer_requested

    size = second.input_size_per_partition
    added = aligned_size(size) - size
    if not flashinfer_requested() or not added:
        return
    if reason := _not_plain(first) or _not_plain(second):
        _say_once(
            "The vision tower's MLPs keep rows of %d values, which are slow: %s.",
            size,
            reason,
        )
        return
    first.quant_method = AlignedLinearMethod(0, size, parts)
    second.quant_method = AlignedLinearMethod(1, size)
    for linear in (first, second):
        linear.quant_method.reserve(linear)
    values = added * (parts * first.weight.shape[1] + second.weight.shape[0])
    _say_once(
        "The vision tower's MLPs get rows of %d values instead of %d, which takes "
        "%.2f MiB more in each block.",
        size + added,
        size,
        values * second.weight.element_size() / 2**20,
    )


def _say_once(message: str, *values: object) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.plugins.flashinfer_vit").info_once(message, *values)


def _not_plain(linear: Any) -> str | None:
    """Say why a linear layer must stay as it is, or None."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from vllm_flashinfer_vit.blocks.aligned_linear import AlignedLinearMethod
    from vllm_flashinfer_vit.blocks.gelu_linear import GeluLinearMethod

    method = type(linear.quant_method)
    if method not in (UnquantizedLinearMethod, AlignedLinearMethod, GeluLinearMethod):
        return f"their weights are served by {method.__name__}"
    # Adapters are added to what the layer itself returns, in the checkpoint's size.
    lora = get_current_vllm_config().lora_config
    if lora is not None and lora.enable_tower_connector_lora:
        return "the tower may get LoRA adapters"
    return None


def _fuse_tanh_gelu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from vllm import envs

        from vllm_flashinfer_vit.blocks.gelu_linear import GeluLinearMethod
        from vllm_flashinfer_vit.engine.selection import flashinfer_requested

        if (
            not flashinfer_requested()
            or getattr(self.act_fn, "approximate", None) != "tanh"
            or self.linear_fc1.bias is None
            or envs.VLLM_BATCH_INVARIANT
            or _not_plain(self.linear_fc1)
        ):
            return
        fc1 = self.linear_fc1
        fc1.quant_method = GeluLinearMethod(fc1.quant_method)
        self.act_fn = torch.nn.Identity()

    return __init__


def _fuse_gelu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from vllm.model_executor.layers.activation import QuickGELU

        from vllm_flashinfer_vit.engine.selection import flashinfer_requested

        if (
            flashinfer_requested()
            and isinstance(self.act, QuickGELU)
            and _has_compiled("gelu_quick")
        ):
            self.act._forward_method = self.act.forward_cuda

    return __init__


def _fuse_quick_gelu_mlp(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from vllm.model_executor.layers.activation import QuickGELU

        from vllm_flashinfer_vit.blocks.quack_linear import QUICK_GELU

        if _computes(self.act, QuickGELU) and _fuse(self.fc1, self.act, QUICK_GELU):
            self.act = torch.nn.Identity()

    return __init__


def _fuse_swiglu_mlp(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from vllm.model_executor.layers.activation import SiluAndMul

        from vllm_flashinfer_vit.blocks.quack_linear import SWIGLU

        act = self.act_fn
        if _computes(act, SiluAndMul) and _fuse(self.gate_up_proj, act, SWIGLU):
            self.act_fn = torch.nn.Identity()

    return __init__


def _fuse_tanh_gelu_mlp(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from vllm_flashinfer_vit.blocks.gelu_linear import GeluLinearMethod
        from vllm_flashinfer_vit.blocks.quack_linear import TANH_GELU

        act = self.act_fn
        is_known = isinstance(self.linear_fc1.quant_method, GeluLinearMethod) or (
            type(act) is torch.nn.GELU and act.approximate == "tanh"
        )
        if is_known and _fuse(self.linear_fc1, act, TANH_GELU):
            self.act_fn = torch.nn.Identity()

    return __init__


def _speed_up_qkv(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _fuse(self.qkv, torch.nn.Identity(), None)

    return __init__


def _computes(act: Any, op: Any) -> bool:
    """Whether an activation is a vLLM op, or one that a platform has in its place."""
    return getattr(type(act), "forward_native", None) is op.forward_native


def _fuse(linear: Any, act: torch.nn.Module, activation: str | None) -> bool:
    """Have QuACK run large batches of a layer and its activation, if it can here."""
    from vllm import envs

    from vllm_flashinfer_vit.blocks.quack_linear import QuackLinearMethod, fits
    from vllm_flashinfer_vit.engine.selection import flashinfer_requested

    if (
        not flashinfer_requested()
        or envs.VLLM_BATCH_INVARIANT
        or not _has_quack()
        or _not_plain(linear)
        or not fits(linear, activation)
    ):
        return False
    method = QuackLinearMethod(linear.quant_method, act, activation)
    linear.quant_method = method
    _say_once(
        "The vision tower runs %s as one kernel of QuACK, from %d rows on, in CUDA "
        "graphs from %d.",
        "an MLP's first GEMM, its bias and the activation"
        if activation
        else "the QKV projection and its bias",
        method.min_rows,
        method.min_graph_rows,
    )
    return True


def _has_quack() -> bool:
    from vllm.platforms import current_platform

    # The only capability that was measured.
    return (
        current_platform.is_cuda()
        and current_platform.is_device_capability(90)
        and importlib.util.find_spec("quack") is not None
    )


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

    from vllm_flashinfer_vit.blocks.quack_linear import QuackLinearMethod
    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

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
    first = getattr(block.mlp, "gate_up_proj", None)
    method = getattr(first, "quant_method", None)
    act = method.act if isinstance(method, QuackLinearMethod) else block.mlp.act_fn
    with ExitStack() as stack:
        if has_known_forward(block):
            stack.enter_context(chained(tower.blocks, _sum_norm))
        for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
            # Anything but `native` is a choice that the user or the platform made.
            if op.get_priority() in ([], ["native"]):
                stack.enter_context(op.set_priority(["vllm_c", "native"]))
        if isinstance(act, SiluAndMul):
            # All blocks share it with any other model of this process.
            stack.callback(setattr, act, "_forward_method", act._forward_method)
            act._forward_method = act.forward_cuda
        yield


def _fuse_adds_and_norms(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any,
        x: torch.Tensor,
        grid_thw: list[list[int]] | None,
        *,
        encoder_metadata: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if not _can_chain(self.blocks[0]):
            return original(self, x, grid_thw, encoder_metadata=encoder_metadata)
        with chained(self.blocks, _sum_norm):
            return original(self, x, grid_thw, encoder_metadata=encoder_metadata)

    return forward


def _can_chain(block: Any) -> bool:
    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

    return (
        isinstance(block.attn.attn, FlashInferViTAttention)
        # Inductor fuses these ops, and more than these.
        and getattr(block, "do_not_compile", True)
        and has_known_forward(block)
        and all(
            type(norm) is torch.nn.LayerNorm and norm.bias is not None
            for norm in (block.norm1, block.norm2)
        )
        and _runs_triton()
    )


def _runs_triton() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cuda()


def _sum_norm(
    norm: Any, terms: tuple[torch.Tensor, ...], keep_sum: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    from vllm_flashinfer_vit.kernels.add_norm import sum_norm

    if isinstance(norm, torch.nn.LayerNorm):
        return sum_norm(terms, norm.weight, norm.bias, norm.eps, keep_sum)
    return sum_norm(terms, norm.weight, None, norm.variance_epsilon, keep_sum)


_INIT_PARAMETERS = ("self", "in_features", "hidden_features")
_MLP_PARAMETERS = (*_INIT_PARAMETERS, "bias", "act_fn", "quant_config", "prefix")
_QWEN2_MLP_PARAMETERS = (*_INIT_PARAMETERS, "act_layer", "quant_config", "prefix")
_QKV_PARAMETERS = (
    "self",
    "embed_dim",
    "num_heads",
    "projection_size",
    "quant_config",
    "prefix",
)
_FORWARD_PARAMETERS = ("self", "x", "grid_thw", "encoder_metadata")
_QWEN2 = "vllm.model_executor.models.qwen2_vl:"
_QWEN2_5 = "vllm.model_executor.models.qwen2_5_vl:"
_QWEN3 = "vllm.model_executor.models.qwen3_vl:"
_UNALIGNED = "rows of no multiple of 8 values do not fit 16-byte loads: {}"
_REMOVE_ALIGNED_WHEN = "vLLM pads this layer, or cuBLAS is as fast for such rows"
_UNFUSED = (
    "the engine's default turns vLLM's own kernels off, for a compiler that does not "
    "run on encoders, so each op runs as several kernels"
)
_REMOVE_FUSED_WHEN = "vLLM chooses the ops of encoders apart from the language model's"
_SEPARATE = "stock adds and normalizes by two kernels, which read the sum once more"
_REMOVE_ADD_NORM_WHEN = "vLLM has an op for a residual sum and its LayerNorm"
_UNFUSED_MLP = (
    "stock writes the first GEMM's output and reads it again for the activation"
)
_REMOVE_FUSED_MLP_WHEN = "vLLM runs an activation within the GEMM in front of it"
_SLOW_QKV = "cuBLAS takes longer than QuACK for the QKV projection of large batches"
_REMOVE_QUACK_QKV_WHEN = "cuBLAS is as fast for this layer on Hopper"

PATCHES = (
    Patch(
        name="qwen2_5_vl-aligned-mlp",
        target=f"{_QWEN2_5}Qwen2_5_VisionMLP.__init__",
        why=_UNALIGNED.format("3420 values, so down_proj is slow"),
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_ALIGNED_WHEN,
        parameters=_MLP_PARAMETERS,
        replace=_align_mlp,
    ),
    Patch(
        name="qwen2_5_vl-fused-ops",
        target=f"{_QWEN2_5}Qwen2_5_VisionTransformer.forward",
        why=_UNFUSED,
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_FUSED_WHEN,
        parameters=_FORWARD_PARAMETERS,
        replace=_fuse_norms_and_silu,
    ),
    Patch(
        name="qwen2_vl-fused-gelu",
        target=f"{_QWEN2}Qwen2VisionMLP.__init__",
        why=_UNFUSED,
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_FUSED_WHEN,
        parameters=_QWEN2_MLP_PARAMETERS,
        replace=_fuse_gelu,
    ),
    Patch(
        name="qwen2_vl-add-norm",
        target=f"{_QWEN2}Qwen2VisionTransformer.forward",
        why=_SEPARATE,
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_ADD_NORM_WHEN,
        parameters=_FORWARD_PARAMETERS,
        replace=_fuse_adds_and_norms,
    ),
    Patch(
        name="qwen3_vl-aligned-mlp",
        target=f"{_QWEN3}Qwen3_VisionMLP.__init__",
        why=_UNALIGNED.format("4304 values, cut for four ranks"),
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_ALIGNED_WHEN,
        parameters=_MLP_PARAMETERS,
        replace=_align_gelu_mlp,
    ),
    Patch(
        name="qwen3_vl-fused-gelu",
        target=f"{_QWEN3}Qwen3_VisionMLP.__init__",
        why="stock reads and writes the GEMM's output once more for a GELU",
        vllm_range=SUPPORTED_VLLM,
        remove_when="vLLM hands the activation to the GEMM",
        parameters=_MLP_PARAMETERS,
        replace=_fuse_tanh_gelu,
    ),
    Patch(
        name="qwen3_vl-add-norm",
        target=f"{_QWEN3}Qwen3_VisionTransformer.forward",
        why=_SEPARATE,
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_ADD_NORM_WHEN,
        parameters=_FORWARD_PARAMETERS,
        replace=_fuse_adds_and_norms,
    ),
    Patch(
        name="qwen2_vl-fused-mlp",
        target=f"{_QWEN2}Qwen2VisionMLP.__init__",
        why=_UNFUSED_MLP,
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_FUSED_MLP_WHEN,
        parameters=_QWEN2_MLP_PARAMETERS,
        replace=_fuse_quick_gelu_mlp,
    ),
    Patch(
        name="qwen2_5_vl-fused-mlp",
        target=f"{_QWEN2_5}Qwen2_5_VisionMLP.__init__",
        why=_UNFUSED_MLP,
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_FUSED_MLP_WHEN,
        parameters=_MLP_PARAMETERS,
        replace=_fuse_swiglu_mlp,
    ),
    Patch(
        name="qwen3_vl-fused-mlp",
        target=f"{_QWEN3}Qwen3_VisionMLP.__init__",
        why=_UNFUSED_MLP,
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_FUSED_MLP_WHEN,
        parameters=_MLP_PARAMETERS,
        replace=_fuse_tanh_gelu_mlp,
    ),
    Patch(
        name="qwen2_vl-quack-qkv",
        target=f"{_QWEN2}Qwen2VisionAttention.__init__",
        why=_SLOW_QKV,
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_QUACK_QKV_WHEN,
        parameters=_QKV_PARAMETERS,
        replace=_speed_up_qkv,
    ),
    # Qwen3-VL's attention is of this class, too.
    Patch(
        name="qwen2_5_vl-quack-qkv",
        target=f"{_QWEN2_5}Qwen2_5_VisionAttention.__init__",
        why=_SLOW_QKV,
        vllm_range=SUPPORTED_VLLM,
        remove_when=_REMOVE_QUACK_QKV_WHEN,
        parameters=_QKV_PARAMETERS,
        replace=_speed_up_qkv,
    ),
)

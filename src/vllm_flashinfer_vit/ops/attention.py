# SPDX-License-Identifier: Apache-2.0
"""The custom ops `vllm_flashinfer_vit::attention` and `fp8_attention`.

Both are opaque to torch.compile. Inside them nothing synchronises with the device, and
every device tensor is derived anew from `cu_seqlens`, so a captured graph stays right
when its inputs change.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_flashinfer_vit.choices.lookup import select
from vllm_flashinfer_vit.settings import FP8_KERNELS

if TYPE_CHECKING:
    from vllm_flashinfer_vit.kernels.absmax import DynamicScales

_LIBRARY = Library("vllm_flashinfer_vit", "DEF")

_KERNELS = {
    "cudnn": ("vllm_flashinfer_vit.kernels.cudnn", "attention"),
    "cudnn_fp8": ("vllm_flashinfer_vit.kernels.cudnn_fp8", "attention"),
    "flash_attn": ("vllm_flashinfer_vit.kernels.flash_attn", "attention"),
    "flash_attn_4": ("vllm_flashinfer_vit.kernels.flash_attn", "attention_4"),
    "hopper_fp8": ("vllm_flashinfer_vit.kernels.hopper_fp8", "attention"),
    "reference": ("vllm_flashinfer_vit.kernels.attention_ref", "attention_ref"),
    "reference_fp8": ("vllm_flashinfer_vit.kernels.flash_fp8_ref", "attention_fp8_ref"),
    "triton": ("vllm_flashinfer_vit.kernels.flash", "attention"),
    "triton_fp8": ("vllm_flashinfer_vit.kernels.flash_fp8", "attention"),
    "triton_window": ("vllm_flashinfer_vit.kernels.window", "attention"),
}
# Kernels that rotate q and k themselves, if all of the head dim is rotated.
_ROTATES = frozenset({"triton_window"})


@functools.cache
def _kernel(name: str) -> Callable[..., torch.Tensor]:
    module, function = _KERNELS[name]
    return getattr(import_module(module), function)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k as the ops do; see `reference.rope.rope_ref`."""
    if q.is_cuda:
        from vllm_flashinfer_vit.kernels.rope import rope

        return rope(q, k, cos, sin)
    from vllm_flashinfer_vit.kernels.rope_ref import rope_ref

    return rope_ref(q, k, cos, sin)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: torch.Tensor | None,
    seq_len: int,
    scale: float,
    plan: str,
) -> torch.Tensor:
    """Attend within each sequence, rotating q and k first if cos and sin are given.

    Args:
        q: `[T, H, D]`, any strides.
        k: `[T, H_kv, D]`, any strides; H is a multiple of H_kv.
        v: `[T, H_kv, D]`, any strides.
        cos: `[T, R / 2]`, R the rotated part of D, or None.
        sin: `[T, R / 2]`, or None.
        cu_seqlens: `[N + 1] int32`, token prefix sums; None for T / seq_len equal
            sequences. A tail of zeros or repeated values stands for empty sequences.
        max_seqlen: `[] int`; on the CPU it bounds the sequence lengths, on the GPU it
            is not read, since that would stall the stream, and T bounds them.
        seq_len: Length of equal sequences, in tokens; 0 with `cu_seqlens`.
        scale: Softmax scale.
        plan: `choices.encode` of the layer's choices.

    Returns:
        `[T, H, D]`, contiguous, q's dtype.
    """
    if q.shape[0] == 0:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    cu_seqlens, longest = _lengths(q, cu_seqlens, max_seqlen, seq_len)
    name = select(plan, longest, _mean_len(q, cu_seqlens))
    return _attend(name, q, k, v, cos, sin, cu_seqlens, longest, scale)


def _lengths(
    q: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: torch.Tensor | None,
    seq_len: int,
) -> tuple[torch.Tensor, int]:
    """Return the prefix sums and what bounds the sequence lengths on the host."""
    num_tokens = q.shape[0]
    longest = num_tokens
    if cu_seqlens is None:
        longest = seq_len
        cu_seqlens = torch.arange(
            0, num_tokens + 1, seq_len, dtype=torch.int32, device=q.device
        )
    elif max_seqlen is not None and max_seqlen.is_cpu:
        # Some models hand over 0 where vLLM's default backend needs no length.
        longest = min(int(max_seqlen), num_tokens) or num_tokens
    return cu_seqlens, longest


def _mean_len(q: torch.Tensor, cu_seqlens: torch.Tensor) -> float:
    """Return how many rows there are for each sequence, also for empty ones."""
    return q.shape[0] / max(1, cu_seqlens.numel() - 1)


def _attend(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    longest: int,
    scale: float,
) -> torch.Tensor:
    """Run a kernel that computes in q's dtype."""
    kernel = _kernel(name)
    if cos is None or sin is None:
        return kernel(q, k, v, cu_seqlens, longest, scale)
    if name in _ROTATES and 2 * cos.shape[1] == q.shape[2]:
        return kernel(q, k, v, cu_seqlens, longest, scale, cos, sin)
    q, k = rotate(q, k, cos, sin)
    return kernel(q, k, v, cu_seqlens, longest, scale)


def _attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: torch.Tensor | None,
    seq_len: int,
    scale: float,
    plan: str,
) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


direct_register_custom_op(
    op_name="attention",
    op_func=_attention,
    fake_impl=_attention_fake,
    target_lib=_LIBRARY,
    dispatch_key="CompositeExplicitAutograd",
)


def attention(q: torch.Tensor, *args: Any) -> torch.Tensor:
    """Call the op; see `_attention` for the arguments.

    In eager mode its function is called past the dispatcher, which takes 9 us a layer
    to match ten arguments to the schema.
    """
    # A fake tensor, like any other subclass, is the dispatcher's to handle.
    if torch.compiler.is_compiling() or type(q) is not torch.Tensor:
        return torch.ops.vllm_flashinfer_vit.attention(q, *args)
    return _attention(q, *args)


def _fp8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: torch.Tensor | None,
    seq_len: int,
    scale: float,
    plan: str,
    method: str,
    save: bool,
    amax: torch.Tensor | None,
    history: torch.Tensor | None,
    position: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    """Attend as `_attention` does, in FP8 where the plan names an FP8 kernel.

    Args:
        q: As for `_attention`, like the arguments up to `plan`.
        k: See `q`.
        v: See `q`.
        cos: See `q`.
        sin: See `q`.
        cu_seqlens: See `q`.
        max_seqlen: See `q`.
        seq_len: See `q`.
        scale: See `q`.
        plan: See `q`.
        method: `static`, `dynamic` or `block`, see `fp8.Policy`.
        save: Whether passes count for the history that no FP8 kernel runs.
        amax: See `kernels.absmax.DynamicScales`; changed in place where passes count,
            like the arguments after it. None for `block` where they do not.
        history: See `amax`.
        position: See `amax`.
        scales: See `amax`; for `static` it is read only.

    Returns:
        `[T, H, D]`, contiguous, q's dtype.
    """
    if q.shape[0] == 0:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    cu_seqlens, longest = _lengths(q, cu_seqlens, max_seqlen, seq_len)
    name = select(plan, longest, _mean_len(q, cu_seqlens))
    is_fp8 = name in FP8_KERNELS
    if save or (is_fp8 and method == "dynamic"):
        from vllm_flashinfer_vit.kernels.absmax import DynamicScales

        assert amax is not None and history is not None
        assert position is not None and scales is not None
        state = DynamicScales(amax, history, position, scales)
        _observe(q, k, v, cos, sin, cu_seqlens, state)
    if not is_fp8:
        return _attend(name, q, k, v, cos, sin, cu_seqlens, longest, scale)
    if method == "block":
        scales = None
    head_dim, dtype = q.shape[2], q.dtype
    if name == "cudnn_fp8":
        from vllm_flashinfer_vit.kernels.cudnn_fp8 import padded_head_dim
        from vllm_flashinfer_vit.kernels.quantize_rows import quantize_rows

        assert scales is not None
        width = padded_head_dim(head_dim, q.device)
        rows = quantize_rows(q, k, v, cu_seqlens, scales, width, cos, sin)
        return _kernel(name)(*rows, scales, cu_seqlens, longest, scale, head_dim, dtype)
    if q.is_cuda:
        from vllm_flashinfer_vit.kernels.quantize import quantize_blocks as quantize
    else:
        from vllm_flashinfer_vit.kernels.quantize_ref import (
            quantize_blocks_ref as quantize,
        )
    quantized = quantize(q, k, v, cu_seqlens, cos, sin, scales)
    return _kernel(name)(
        quantized, cu_seqlens, q.shape[0], longest, scale, head_dim, dtype
    )


def _observe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    state: "DynamicScales",
) -> None:
    """Enter the abs-max of real rows into a layer's history, and renew its scales."""
    if q.is_cuda:
        from vllm_flashinfer_vit.kernels.absmax import absmax, update

        absmax(q, k, v, cu_seqlens, state.amax, cos, sin)
        update(state)
        return
    from vllm_flashinfer_vit.kernels.absmax_ref import absmax_ref, update_ref

    absmax_ref(q, k, v, cu_seqlens, state.amax, cos, sin)
    update_ref(state)


def _fp8_attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: torch.Tensor | None,
    seq_len: int,
    scale: float,
    plan: str,
    method: str,
    save: bool,
    amax: torch.Tensor | None,
    history: torch.Tensor | None,
    position: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


direct_register_custom_op(
    op_name="fp8_attention",
    op_func=_fp8_attention,
    mutates_args=["amax", "history", "position", "scales"],
    fake_impl=_fp8_attention_fake,
    target_lib=_LIBRARY,
    dispatch_key="CompositeExplicitAutograd",
)


def fp8_attention(q: torch.Tensor, *args: Any) -> torch.Tensor:
    """Call the op as `attention` does; see `_fp8_attention` for the arguments."""
    if torch.compiler.is_compiling() or type(q) is not torch.Tensor:
        return torch.ops.vllm_flashinfer_vit.fp8_attention(q, *args)
    return _fp8_attention(q, *args)

# SPDX-License-Identifier: Apache-2.0
"""The custom op `vllm_flashinfer_vit::attention`, opaque to torch.compile.

Inside the op nothing synchronises with the device, and every device tensor is derived
anew from `cu_seqlens`, so a captured graph stays right when its inputs change.
"""

import functools
from collections.abc import Callable
from importlib import import_module

import torch
from torch.library import Library
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_flashinfer_vit.choices import select

_LIBRARY = Library("vllm_flashinfer_vit", "DEF")

_KERNELS = {
    "cudnn": ("vllm_flashinfer_vit.kernels.cudnn", "attention"),
    "flash_attn": ("vllm_flashinfer_vit.kernels.flash_attn", "attention"),
    "reference": ("vllm_flashinfer_vit.reference.attention", "attention_ref"),
    "triton": ("vllm_flashinfer_vit.kernels.flash", "attention"),
    "triton_window": ("vllm_flashinfer_vit.kernels.window", "attention"),
}
# Kernels that rotate q and k themselves, if all of the head dim is rotated.
_ROTATES = frozenset({"triton_window"})


@functools.cache
def _kernel(name: str) -> Callable[..., torch.Tensor]:
    module, function = _KERNELS[name]
    return getattr(import_module(module), function)


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.is_cuda:
        from vllm_flashinfer_vit.kernels.rope import rope

        return rope(q, k, cos, sin)
    from vllm_flashinfer_vit.reference.rope import rope_ref

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
    num_tokens = q.shape[0]
    if num_tokens == 0:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    longest = num_tokens
    if cu_seqlens is None:
        longest = seq_len
        cu_seqlens = torch.arange(
            0, num_tokens + 1, seq_len, dtype=torch.int32, device=q.device
        )
    elif max_seqlen is not None and max_seqlen.device.type == "cpu":
        # Some models hand over 0 where vLLM's default backend needs no length.
        longest = min(int(max_seqlen), num_tokens) or num_tokens
    name = select(plan, longest)
    kernel = _kernel(name)
    if cos is None or sin is None:
        return kernel(q, k, v, cu_seqlens, longest, scale)
    if name in _ROTATES and 2 * cos.shape[1] == q.shape[2]:
        return kernel(q, k, v, cu_seqlens, longest, scale, cos, sin)
    q, k = _rotate(q, k, cos, sin)
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

attention = torch.ops.vllm_flashinfer_vit.attention

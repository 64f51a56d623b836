# SPDX-License-Identifier: Apache-2.0
"""The custom ops `vllm_flashinfer_vit::attention` and `fp8_attention`.

Both are opaque to torch.compile. Inside them nothing synchronises with the device, and
every device tensor is derived anew from `cu_seqlens`, so a captured graph stays right
when its inputs change.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch.library import Library
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.kernels.formats import DynamicScales
from vllm_flashinfer_vit.ops.batch import Batch, Ready, ready
from vllm_flashinfer_vit.ops.plan import Plan

_LIBRARY = Library("vllm_flashinfer_vit", "DEF")


class Fp8(NamedTuple):
    """How a batch is attended in FP8; the op's last arguments, in order.

    Attributes:
        method: Where scales come from: `static`, `dynamic` or `block`.
        save: Whether passes count for the history that no FP8 kernel runs.
        state: The layer's; changed in place where passes count. For `static` only its
            scales are read. None for `block` where passes do not count.
    """

    method: Literal["static", "dynamic", "block"]
    save: bool = False
    state: DynamicScales | None = None


@functools.cache
def _kernel(name: str) -> Callable[..., torch.Tensor]:
    return KERNELS[name].load()


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k as the ops do; see `kernels.rope_ref.rope_ref`."""
    if q.is_cuda:
        from vllm_flashinfer_vit.kernels.rope import rope

        return rope(q, k, cos, sin)
    from vllm_flashinfer_vit.kernels.rope_ref import rope_ref

    return rope_ref(q, k, cos, sin)


def attention(batch: Batch, scale: float, plan: Plan) -> torch.Tensor:
    """Attend within each sequence, turning q and k first if cos and sin are given.

    In eager mode the op's function is called past the dispatcher, which takes 9 us a
    layer to match ten arguments to the schema.

    Args:
        batch: The sequences.
        scale: Softmax scale.
        plan: Which kernel serves which batch.

    Returns:
        `[T, H, D]`, contiguous, q's dtype.
    """
    # A fake tensor, like any other subclass, is the dispatcher's to handle.
    if torch.compiler.is_compiling() or type(batch.q) is not torch.Tensor:
        return torch.ops.vllm_flashinfer_vit.attention(*batch, scale, plan.text)
    return _run(batch, scale, plan)


def fp8_attention(batch: Batch, scale: float, plan: Plan, fp8: Fp8) -> torch.Tensor:
    """Attend as `attention` does, in FP8 where the plan names an FP8 kernel.

    Args:
        batch: The sequences.
        scale: Softmax scale.
        plan: Which kernel serves which batch.
        fp8: Where scales come from.

    Returns:
        `[T, H, D]`, contiguous, q's dtype.
    """
    if torch.compiler.is_compiling() or type(batch.q) is not torch.Tensor:
        state = fp8.state or (None, None, None, None)
        return torch.ops.vllm_flashinfer_vit.fp8_attention(
            *batch, scale, plan.text, fp8.method, fp8.save, *state
        )
    return _run_fp8(batch, scale, plan, fp8)


def _run(batch: Batch, scale: float, plan: Plan) -> torch.Tensor:
    if batch.q.shape[0] == 0:
        return torch.empty_like(batch.q, memory_format=torch.contiguous_format)
    inputs = ready(batch)
    return _attend(plan.kernel_for(inputs.longest, inputs.mean_len), inputs, scale)


def _attend(name: str, inputs: Ready, scale: float) -> torch.Tensor:
    """Run a kernel that computes in q's dtype."""
    kernel = _kernel(name)
    q, k, v, cos, sin, cu_seqlens, longest = inputs
    if cos is None or sin is None:
        return kernel(q, k, v, cu_seqlens, longest, scale)
    if KERNELS[name].rotates and 2 * cos.shape[1] == q.shape[2]:
        return kernel(q, k, v, cu_seqlens, longest, scale, cos, sin)
    q, k = rotate(q, k, cos, sin)
    return kernel(q, k, v, cu_seqlens, longest, scale)


def _run_fp8(batch: Batch, scale: float, plan: Plan, fp8: Fp8) -> torch.Tensor:
    if batch.q.shape[0] == 0:
        return torch.empty_like(batch.q, memory_format=torch.contiguous_format)
    inputs = ready(batch)
    name = plan.kernel_for(inputs.longest, inputs.mean_len)
    record = KERNELS[name]
    if fp8.save or (record.is_fp8 and fp8.method == "dynamic"):
        assert fp8.state is not None
        _observe(inputs, fp8.state)
    if not record.is_fp8:
        return _attend(name, inputs, scale)
    q, k, v, cos, sin, cu_seqlens, longest = inputs
    num_tokens, _, head_dim = q.shape
    scales = None
    if fp8.method != "block":
        assert fp8.state is not None
        scales = fp8.state.scales
    if record.quantized == "rows":
        from vllm_flashinfer_vit.kernels.quantize_rows import quantize_rows

        assert scales is not None
        width = record.padded_head_dim(head_dim, q.device)
        rows = quantize_rows(q, k, v, cu_seqlens, scales, width, cos, sin)
        return _kernel(name)(
            *rows, scales, cu_seqlens, longest, scale, head_dim, q.dtype
        )
    if q.is_cuda:
        from vllm_flashinfer_vit.kernels.quantize import quantize_blocks as quantize
    else:
        from vllm_flashinfer_vit.kernels.quantize_ref import (
            quantize_blocks_ref as quantize,
        )
    quantized = quantize(q, k, v, cu_seqlens, cos, sin, scales)
    return _kernel(name)(
        quantized, cu_seqlens, num_tokens, longest, scale, head_dim, q.dtype
    )


def _observe(inputs: Ready, state: DynamicScales) -> None:
    """Enter the abs-max of real rows into a layer's history, and renew its scales."""
    q, k, v, cos, sin, cu_seqlens, _ = inputs
    if q.is_cuda:
        from vllm_flashinfer_vit.kernels.absmax import absmax, update

        absmax(q, k, v, cu_seqlens, state.amax, cos, sin)
        update(state)
        return
    from vllm_flashinfer_vit.kernels.absmax_ref import absmax_ref, update_ref

    absmax_ref(q, k, v, cu_seqlens, state.amax, cos, sin)
    update_ref(state)


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
    batch = Batch(q, k, v, cos, sin, cu_seqlens, max_seqlen, seq_len)
    return _run(batch, scale, Plan.decode(plan))


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
    batch = Batch(q, k, v, cos, sin, cu_seqlens, max_seqlen, seq_len)
    state = None
    if scales is not None:
        assert amax is not None and history is not None and position is not None
        state = DynamicScales(amax, history, position, scales)
    fp8 = Fp8(method, save, state)  # type: ignore[arg-type]
    return _run_fp8(batch, scale, Plan.decode(plan), fp8)


def _fake(q: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


direct_register_custom_op(
    op_name="attention",
    op_func=_attention,
    fake_impl=_fake,
    target_lib=_LIBRARY,
    dispatch_key="CompositeExplicitAutograd",
)

direct_register_custom_op(
    op_name="fp8_attention",
    op_func=_fp8_attention,
    mutates_args=["amax", "history", "position", "scales"],
    fake_impl=_fake,
    target_lib=_LIBRARY,
    dispatch_key="CompositeExplicitAutograd",
)

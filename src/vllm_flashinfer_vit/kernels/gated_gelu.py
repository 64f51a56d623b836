# SPDX-License-Identifier: Apache-2.0
"""The tanh GELU of one tensor times another, where the first one lies.

For Gemma 4, whose gate and up are separate layers: vLLM's own kernel takes both in one
tensor. Block programs, whose gated MLPs have one layer for both, do not run it.

Numerics: fp32 throughout, rounded once.
"""

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout
from vllm_flashinfer_vit.kernels._sigmoid import gelu_tanh
from vllm_flashinfer_vit.kernels.gated_gelu_ref import check_gated_gelu_inputs

# 8 values a thread are one load of 16 bytes from each input.
_BLOCK = 1024
_WARPS = 4


@triton.jit
def _gated_gelu_kernel(
    gate_ptr,
    up_ptr,
    stride_g,
    stride_u,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Activate a part of one row. Grid: (rows * BLOCKS,)"""
    program = tl.program_id(0).to(tl.int64)
    row = program // BLOCKS
    offs = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < WIDTH
    at = gate_ptr + row * stride_g + offs
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_u + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (gelu_tanh(gate) * up).to(gate_ptr.dtype.element_ty), mask=mask)


def gated_gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `gelu(gate) * up`.

    Args:
        gate: `[T, I]` fp32, fp16 or bf16, rows of any stride; overwritten.
        up: Like gate.

    Returns:
        The gate's memory.

    Raises:
        ValueError: The two are not alike, or columns are not contiguous.
    """
    launch = _launch(gate, up)
    if gate.numel():
        launch(gate, up)
    return gate


@cached_by_layout
def _launch(gate: torch.Tensor, up: torch.Tensor) -> Launch:
    check_gated_gelu_inputs(gate, up)
    if gate.stride(1) != 1 or up.stride(1) != 1:
        raise ValueError(
            f"columns must be contiguous, got strides {gate.stride()}, {up.stride()}"
        )
    rows, width = gate.shape
    blocks = triton.cdiv(width, _BLOCK)
    return Launch(
        _gated_gelu_kernel,
        rows * blocks,
        gate.stride(0),
        up.stride(0),
        WIDTH=width,
        BLOCKS=blocks,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )

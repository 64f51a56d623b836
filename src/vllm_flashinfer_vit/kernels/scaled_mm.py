# SPDX-License-Identifier: Apache-2.0
"""GEMMs of rows in FP8, scales and bias included: vLLM's CUTLASS op, and PyTorch's.

All take what `row_scales_ref.scaled_mm_ref` takes, write to memory that is there, and
wait for nothing. Scales and the bias are applied in fp32, and the output rounded once.
Where a weight has scales of blocks, vLLM's op takes no bias, which is then added to the
rounded output, as vLLM does, and rounded once more.
On Hopper the tensor cores keep fewer bits of a running sum of FP8 products than fp32
has. vLLM's op leaves sums there to their end ("fast accumulation"), so PyTorch's is
asked for the same. `tune` drops it where it is less exact than vLLM's op.
"""

import functools
from collections.abc import Callable

import torch

from vllm_flashinfer_vit.kernels._vllm_ops import compiled_op
from vllm_flashinfer_vit.kernels.gemms import TORCH
from vllm_flashinfer_vit.kernels.row_scales_ref import scaled_mm_ref

Launch = Callable[..., None]
_CUTLASS_OP = "cutlass_scaled_mm"


def torch_scaled_mm(
    out: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Multiply FP8 rows by an FP8 weight, by `torch._scaled_mm`.

    Args:
        out: `[T, N]` fp16 or bf16, contiguous; written.
        rows: `[T, K]` e4m3, contiguous.
        weight: `[K, N]` e4m3, columns contiguous; K and N multiples of 16.
        scales: fp32, `[T, 1]`, or one.
        weight_scale: fp32, `[1, N]` if `scales` are `[T, 1]`, else one.
        bias: `[N]` of the dtype of `out`, or None.

    Raises:
        RuntimeError: PyTorch or cuBLASLt refuses.
        ValueError: Scales are of other shapes.
    """
    torch._scaled_mm(
        rows, weight, scales, weight_scale, bias=bias, use_fast_accum=True, out=out
    )


def cutlass_op() -> Launch | None:
    """Return vLLM's `cutlass_scaled_mm`, None without it in this process or CUDA."""
    return compiled_op(_CUTLASS_OP)


def launch_of(gemm: str, device: torch.device, has_blocks: bool = False) -> Launch:
    """Return a GEMM; on a CPU the reference stands for vLLM's.

    Args:
        gemm: One of `GEMMS`.
        device: Where it runs.
        has_blocks: Whether its weights have scales of blocks, which vLLM's takes alone.
    """
    if gemm == TORCH:
        return torch_scaled_mm
    if device.type != "cuda":
        return scaled_mm_ref
    launch = cutlass_op()
    assert launch is not None
    return functools.partial(_then_bias, launch) if has_blocks else launch


def _then_bias(launch: Launch, out: torch.Tensor, *read: torch.Tensor | None) -> None:
    *operands, bias = read
    launch(out, *operands, None)
    if bias is not None:
        out.add_(bias)

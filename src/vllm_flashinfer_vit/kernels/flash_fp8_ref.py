# SPDX-License-Identifier: Apache-2.0
"""Attention over block-quantised q, k and v in plain PyTorch.

It shares with `kernels/flash_fp8.py` the error that e4m3 brings into q, k and v, and
differs in the weights, which stay fp32: what is left is the kernel's own error.
"""

import torch

from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.kernels.formats import BLOCK, QuantizedQKV
from vllm_flashinfer_vit.kernels.quantize_ref import key_order


def attention_fp8_ref(
    quantized: QuantizedQKV,
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    max_seqlen: int,
    scale: float,
    head_dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Attend within each sequence of a packed batch that has been quantised.

    Args:
        quantized: What `quantize_blocks` has returned for these `cu_seqlens`.
        cu_seqlens: `[N + 1]` int32, token prefix sums from 0, never falling except to
            a tail of zeros.
        num_tokens: T.
        max_seqlen: An upper bound of the sequence lengths in tokens.
        scale: Factor on the scores.
        head_dim: D.
        dtype: Of the output.

    Returns:
        `[T, H, D]` contiguous, in `dtype`. Rows of no sequence are zeros.
    """
    width = quantized.q.shape[2]
    q, k, v = dequantize_ref(quantized, cu_seqlens, num_tokens, width)
    v = torch.nn.functional.pad(v, (0, width - v.shape[2]))
    out = attention_ref(q, k, v, cu_seqlens, max_seqlen, scale)
    return out[..., :head_dim].to(dtype).contiguous()


def dequantize_ref(
    quantized: QuantizedQKV, cu_seqlens: torch.Tensor, num_tokens: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q `[T, H, D]`, k and v `[T, H_kv, D]` in fp32, zeros in rows of no
    sequence. The columns of q and k stay in their order: where some past D are none of
    the padding, give `D_qk`, of which v has no more than `D_v`."""
    v = torch.empty_like(quantized.v)
    v[..., key_order(v.shape[2]).to(v.device)] = quantized.v
    packed = (x[..., :head_dim] for x in (quantized.q, quantized.k, v.transpose(1, 2)))
    scales = (quantized.q_scale, quantized.k_scale, quantized.v_scale)
    offsets = cu_seqlens.clamp(max=num_tokens).tolist()
    outs = []
    for x8, x_scale in zip(packed, scales, strict=True):
        shape = (num_tokens, x8.shape[0], x8.shape[2])
        out = torch.zeros(shape, dtype=torch.float32, device=x8.device)
        for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
            for i, first in enumerate(range(start, end, BLOCK)):
                block = start // BLOCK + n + i
                count = min(BLOCK, end - first)
                rows = x8[:, block * BLOCK : block * BLOCK + count].float()
                rows = rows * x_scale[:, block, None, None]
                out[first : first + count] = rows.transpose(0, 1)
        outs.append(out)
    return outs[0], outs[1], outs[2]

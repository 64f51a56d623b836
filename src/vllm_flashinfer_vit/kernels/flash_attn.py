# SPDX-License-Identifier: Apache-2.0
"""Encoder attention by the FlashAttention that vLLM bundles, in two versions.

`attention` runs the version that vLLM picks; on Hopper that is 3, which computes head
dims 72 and 80 as 96. `attention_4` runs version 4, in CuTe DSL, whose kernel for Hopper
computes them as 80.

Both add what stock vLLM lacks in a CUDA graph's replay: cu_seqlens may end in zeros,
rows of no sequence come out as zeros, and a NaN in them reaches no sequence.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from vllm_flashinfer_vit.kernels._alignment import aligned
from vllm_flashinfer_vit.kernels.padding import mask_padding

Run = Callable[..., None]

# By the head dim that is computed, version 4's queries and keys of a tile, and whether
# the weights stay in registers: the fastest of twelve on an H200 (docs/results.md). It
# has its own choice for the others.
_TILES_4: Mapping[int, Mapping[str, Any]] = MappingProxyType(
    {80: {"tile_mn": (192, 112), "mma_pv_is_rs": True, "intra_wg_overlap": True}}
)


@functools.cache
def fa_version(head_dim: int) -> int:
    """Return the FlashAttention version that vLLM picks for this GPU and head dim.

    The first call decides. Made while vLLM builds a model, it follows the engine's
    `attention_config.flash_attn_version`.

    Raises:
        RuntimeError: vLLM has no FlashAttention for this GPU.
    """
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version = get_flash_attn_version(head_size=head_dim)
    if version is None:
        raise RuntimeError(
            f"vLLM has no FlashAttention for head dim {head_dim} on this GPU; choose "
            "another kernel with VLLM_FLASHINFER_VIT_KERNEL"
        )
    return version


@functools.cache
def _varlen_func() -> Callable[..., torch.Tensor]:
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    return flash_attn_varlen_func


@functools.cache
def _forward_4() -> Callable[..., Any]:
    # What it exports has no argument for the tile.
    from vllm.vllm_flash_attn.cute.interface import _flash_attn_fwd

    return _flash_attn_fwd


@functools.cache
def _compile_for_capture(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    v = torch.zeros(1, kv_heads, head_dim, dtype=dtype, device=device)
    out = torch.zeros(1, heads, head_dim, dtype=dtype, device=device)
    mask_padding(torch.zeros(2, dtype=torch.int32, device=device), v, out)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    """Attend within each sequence of a packed batch; may be captured in a CUDA graph.

    Args:
        q: `[T, H, D]` bf16 or fp16, D-stride 1, any other strides.
        k: `[T, H_kv, D]` like q, H a multiple of H_kv.
        v: `[T, H_kv, D]` like k. In a graph its rows of no sequence are zeroed.
        cu_seqlens: `[N + 1] int32` on q's device, token prefix sums. In a graph a tail
            of zeros or repeated values stands for empty sequences.
        max_seqlen: An upper bound of the sequence lengths, in tokens.
        scale: Softmax scale.

    Returns:
        `[T, H, D]`, contiguous, q's dtype. Rows of no sequence are zeros in a captured
        graph, and unspecified otherwise.

    Raises:
        RuntimeError: vLLM has no FlashAttention for this GPU or these arguments.
    """
    return _attend(_run, q, k, v, cu_seqlens, max_seqlen, scale)


def attention_4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    """Attend as `attention` does, by FlashAttention 4 on a Hopper GPU.

    The first call for a head dim and dtype compiles the kernel, for some seconds.

    Args:
        q: As for `attention`, like the other arguments.
        k: See `q`.
        v: See `q`.
        cu_seqlens: See `q`.
        max_seqlen: See `q`.
        scale: See `q`.

    Returns:
        As `attention`.

    Raises:
        ImportError: vLLM or the machine lacks the kernel or CuTe DSL.
    """
    return _attend(_run_4, q, k, v, cu_seqlens, max_seqlen, scale)


def _attend(
    run: Run,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    num_tokens, heads, head_dim = q.shape
    if num_tokens == 0 or cu_seqlens.shape[0] == 1:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if torch.cuda.is_current_stream_capturing():
        cu_seqlens = mask_padding(cu_seqlens, v, out)
    else:
        _compile_for_capture(heads, v.shape[1], head_dim, v.dtype, v.device)
    max_seqlen = max(1, min(max_seqlen, num_tokens))
    run(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
        causal=False,
        out=out,
    )
    return out


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> None:
    _varlen_func()(q, k, v, fa_version=fa_version(q.shape[2]), **kwargs)


def _run_4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> None:
    q, k, v = aligned(q), aligned(k), aligned(v)
    computed = -(-q.shape[2] // 16) * 16
    _forward_4()(q, k, v, **kwargs, **_TILES_4.get(computed, {}))

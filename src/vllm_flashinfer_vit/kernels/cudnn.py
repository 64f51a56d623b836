# SPDX-License-Identifier: Apache-2.0
"""Encoder attention by cuDNN, through FlashInfer's prefill graph.

FlashInfer describes the graph. The plans built from it are kept in `_cudnn.py`, not in
FlashInfer's graph cache, whose key leaves out the scale (before 0.6.16) and strides,
dtypes and V's dims (before 0.7.1), and which drops its oldest plan after 256, although
a captured CUDA graph may still run its kernels.

Sequences are found by int64 element offsets, so tensors may pass 2^31 elements. q, k
and v are read as views of one projection, or packed, v perhaps a view; other layouts
are copied. Declared shapes are bucketed (`buckets.py`). The shape override of
FlashInfer, 25 times slower on Hopper, wants token offsets: it is never used.

Numerics: fp32 scores and softmax, weights rounded to the input dtype, one rounding of
the output. Nothing is causal.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_flashinfer_vit.kernels._alignment import is_aligned
from vllm_flashinfer_vit.kernels._cudnn import PLANS, Plan, PlanKey
from vllm_flashinfer_vit.kernels.buckets import bucket_max_len, bucket_num_seqs


class _Backend(NamedTuple):
    """FlashInfer's private pieces, the same from 0.6.11 to 0.7.2."""

    build: Callable[..., tuple[Any, Any]]
    handle: Callable[[torch.cuda.Stream], Any]
    uids: tuple[int, ...]


@functools.cache
def _backend() -> _Backend:
    try:
        import cudnn
        from flashinfer.cudnn import prefill

        uids = prefill.UIDs
        return _Backend(
            # Unwrapped from FlashInfer's graph cache; see the module's docstring.
            build=cudnn.jit(heur_modes=[cudnn.heur_mode.A])(
                inspect.unwrap(prefill._build_prefill_graph)
            ),
            handle=prefill._create_cudnn_handle,
            uids=(
                uids.Q_UID.value,
                uids.K_UID.value,
                uids.V_UID.value,
                uids.O_UID.value,
                uids.ACTUAL_SEQ_LENS_Q_UID.value,
                uids.ACTUAL_SEQ_LENS_KV_UID.value,
                uids.RAGGED_Q_UID.value,
                uids.RAGGED_K_UID.value,
                uids.RAGGED_V_UID.value,
                uids.RAGGED_O_UID.value,
            ),
        )
    # A broken install of either package fails in any way at import.
    except Exception as error:
        raise RuntimeError(
            "cuDNN attention needs FlashInfer's cuDNN prefill, which cannot be loaded: "
            f"{type(error).__name__}: {error}. Run `vllm-flashinfer-vit doctor`."
        ) from error


def _build(key: PlanKey, tensors: tuple[torch.Tensor, ...]) -> Plan:
    q, k, v, _, lengths, _, offsets_q, offsets_k, offsets_v, offsets_o = tensors
    graph, _ = _backend().build(
        q=q,
        k_cache=k,
        v_cache=v,
        scale=key.scale,
        max_token_seq_q=key.max_len,
        max_sequence_kv=key.max_len,
        actual_seq_lens_q=lengths,
        actual_seq_lens_kv=lengths,
        bottom_right_causal_mask=False,
        return_lse=False,
        batch_offsets_q=offsets_q,
        batch_offsets_k=offsets_k,
        batch_offsets_v=offsets_v,
        batch_offsets_o=offsets_o,
        o_data_type=key.out_dtype,
    )
    return graph


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> Callable[[], torch.Tensor]:
    """Settle attention within each sequence of a packed batch.

    The first call for a shape bucket or layout builds a plan, which takes tens of
    milliseconds and cannot happen while a CUDA graph is captured. Whether one captures
    the calls is asked here, once: then cu_seqlens is read here, too, at each replay,
    and else by each call.

    Args:
        q: `[T, H, D]` bf16 or fp16, any strides. q, k and v are copied first unless
            they lie as the module says, aligned to 16 bytes.
        k: `[T, H_kv, D]` like q, H a multiple of H_kv.
        v: `[T, H_kv, D_v]` like k.
        cu_seqlens: `[N + 1] int32` on q's device, contiguous token prefix sums. A tail
            of zeros or repeated values stands for empty sequences.
        max_seqlen: An upper bound of the sequence lengths, in tokens.
        scale: Softmax scale.

    Returns:
        A call, for the current stream, that attends over what these tensors hold by
        then. It returns `[T, H, D_v]`, contiguous, q's dtype, the same tensor every
        time. Rows of no sequence are zeros in a captured graph, and unspecified
        otherwise.

    Raises:
        ValueError: The tensors do not fit each other.
        RuntimeError: cuDNN has no kernel for them, FlashInfer or cuDNN is missing, a
            plan would have to be built during capture, or a second GPU is used.
    """
    from vllm_flashinfer_vit.kernels.seqlens import prepare as prepare_seqlens

    _check(q, k, v, cu_seqlens)
    num_tokens, heads, _ = q.shape
    num_seqs = cu_seqlens.shape[0] - 1
    shape = (num_tokens, heads, v.shape[2])
    if num_tokens == 0 or num_seqs == 0:
        return torch.empty(shape, dtype=q.dtype, device=q.device).zero_
    given = (q, k, v)
    q, k, v = (
        x if is_read else x.new_empty(x.shape)
        for x, is_read in zip(given, _are_read(*given), strict=True)
    )
    copies = [(to, x) for to, x in zip((q, k, v), given, strict=True) if to is not x]
    key = PlanKey(
        num_seqs=bucket_num_seqs(num_seqs),
        max_len=bucket_max_len(max(1, min(max_seqlen, num_tokens))),
        dtype=q.dtype,
        out_dtype=q.dtype,
        q=(*q.shape[1:], *q.stride()),
        k=(*k.shape[1:], *k.stride()),
        v=(*v.shape[1:], *v.stride()),
        scale=scale,
    )
    row_strides = (q.stride(0), k.stride(0), v.stride(0), heads * v.shape[2])
    derive, derived = prepare_seqlens(cu_seqlens, num_tokens, key.num_seqs, row_strides)
    is_capturing = torch.cuda.is_current_stream_capturing()
    allocate = torch.zeros if is_capturing else torch.empty
    out = allocate(shape, dtype=q.dtype, device=q.device)
    tensors = (q, k, v, out, derived.lengths, derived.lengths, *derived.offsets)
    backend = _backend()
    plan = PLANS.plan(key, q.device, lambda: _build(key, tensors))
    execute = functools.partial(
        plan.execute,
        dict(zip(backend.uids, tensors, strict=True)),
        workspace=PLANS.workspace,
    )
    stream = torch.cuda.current_stream(q.device)
    if is_capturing:
        # Once in the graph: each replay derives anew.
        derive()

    def call() -> torch.Tensor:
        for to, x in copies:
            to.copy_(x)
        if not is_capturing:
            derive()
        # The handle is shared, and others may have moved it to their stream.
        execute(handle=backend.handle(stream))
        return out

    return call


def _are_read(*qkv: torch.Tensor) -> tuple[bool, ...]:
    """Say of q, k and v which a plan reads where they lie; of others it reads copies.

    cuDNN moves 16-byte vectors and does not check that it may. A plan is for one layout
    only: without copies each odd one, and each T of strides that grow with T, would
    need plans of its own.
    """
    projected = sum(x.shape[1] * x.shape[2] for x in qkv)
    views = tuple(_has_rows(x, projected) for x in qkv)
    if all(views):
        return views
    q, k, v = (_has_rows(x, x.shape[1] * x.shape[2]) for x in qkv)
    return q, k, v or views[2]


def _has_rows(x: torch.Tensor, stride: int) -> bool:
    return x.stride() == (stride, x.shape[2], 1) and is_aligned(x)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    if (
        any(x.dim() != 3 for x in (q, k, v))
        or not q.shape[0] == k.shape[0] == v.shape[0]
        or k.shape[1] != v.shape[1]
        or k.shape[2] != q.shape[2]
    ):
        raise ValueError(
            "q, k and v must be [T, H, D], [T, H_kv, D] and [T, H_kv, D_v], got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"{q.shape[1]} query heads are no multiple of {k.shape[1]} kv heads"
        )
    if q.dtype not in (torch.bfloat16, torch.float16) or not (
        q.dtype == k.dtype == v.dtype
    ):
        raise ValueError(
            f"q, k and v must all be bf16 or all fp16, got {q.dtype}, {k.dtype} and "
            f"{v.dtype}"
        )
    if not q.device == k.device == v.device == cu_seqlens.device:
        raise ValueError(
            "q, k, v and cu_seqlens must share one device, got "
            f"{q.device}, {k.device}, {v.device} and {cu_seqlens.device}"
        )

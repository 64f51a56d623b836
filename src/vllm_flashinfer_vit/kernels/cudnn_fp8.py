# SPDX-License-Identifier: Apache-2.0
"""FP8 encoder attention by cuDNN, on Hopper and Blackwell.

q, k and v are e4m3 with one scale each; `kernels/quantize_rows.py` writes them. The
graph is built with cudnn-frontend itself, since FlashInfer's builder refuses FP8 output
and Hopper has no other. There a second pass turns it into the activation dtype; on
Blackwell cuDNN writes that dtype at once. No cuDNN is known to work on Hopper: 9.19
ends the CUDA context, and 9.24 is refused by its test run.

Scales are read on the device, so a captured graph follows them. Hopper's output does
not saturate: it is a weighted mean of rows of v, so that |o| <= 448 times v's scale,
apart from the rounding of weights. cuDNN is told that v's scale is 1, and so returns o
in units of it.

Numerics: fp32 scores and softmax; weights are scaled by 256 and rounded to e4m3; on
Hopper the output is rounded to e4m3 too. Nothing is causal.
"""

import functools
from enum import IntEnum
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_flashinfer_vit.kernels._cudnn import PLANS, Plan, PlanKey
from vllm_flashinfer_vit.kernels._launch import Launch, cached_by_layout
from vllm_flashinfer_vit.kernels.buckets import bucket_max_len, bucket_num_seqs
from vllm_flashinfer_vit.kernels.seqlens import derive_seqlens
from vllm_flashinfer_vit.machine.versions import MIN_CUDNN_FP8_HOPPER, format_cudnn

_FP8 = torch.float8_e4m3fn
# Weights are at most 1 and mostly tiny: a power of two below 448 keeps them normal.
_WEIGHT_SCALE = 256.0
# cuDNN takes nothing else.
_HEAD_DIM_STEP = 16
# Hopper's kernels are of these widths: 80 or 96 columns take up to 1.2x what 128 take.
_HOPPER_HEAD_DIMS = (64, 128)

# Elements of the widest load of e4m3 that is a 16-byte store of the output.
_UNIT = 8
_BLOCK_UNITS = 256
_NUM_WARPS = 4


class _Uid(IntEnum):
    """Names of a graph's tensors."""

    Q = 1
    K = 2
    V = 3
    O = 4  # noqa: E741
    LENGTHS_Q = 5
    LENGTHS_KV = 6
    OFFSETS_Q = 7
    OFFSETS_K = 8
    OFFSETS_V = 9
    OFFSETS_O = 10
    DESCALE_Q = 11
    DESCALE_K = 12
    DESCALE_V = 13
    DESCALE_S = 14
    SCALE_S = 15
    SCALE_O = 16
    AMAX_S = 17
    AMAX_O = 18


@triton.jit
def _constants_kernel(out_ptr, WEIGHT_SCALE: tl.constexpr):
    """Write 1, the weights' scale and its inverse. Grid: (1,)"""
    tl.store(out_ptr, 1.0)
    tl.store(out_ptr + 1, WEIGHT_SCALE)
    tl.store(out_ptr + 2, 1 / WEIGHT_SCALE)


_CONSTANTS = Launch(_constants_kernel, 1, WEIGHT_SCALE=_WEIGHT_SCALE, num_warps=1)


def _constants(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Write 1, the weights' scale and its inverse, each `[1] fp32`.

    None is kept for the next call: vLLM's sleep mode would discard it.
    """
    out = torch.empty(3, dtype=torch.float32, device=device)
    _CONSTANTS(out)
    return out.split(1)


@functools.cache
def _frontend() -> tuple[ModuleType, Any]:
    """Return cudnn-frontend and a handle of the current device."""
    try:
        import cudnn

        return cudnn, cudnn.create_handle()
    # A broken install fails in any way at import.
    except Exception as error:
        raise RuntimeError(
            "cuDNN FP8 attention needs cudnn-frontend, which cannot be loaded: "
            f"{type(error).__name__}: {error}. Run `vllm-flashinfer-vit doctor`."
        ) from error


@functools.cache
def _writes_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] < 10


def padded_head_dim(head_dim: int, device: torch.device) -> int:
    """Return the head dim that q, k and v should be padded to with zeros.

    Args:
        head_dim: D, in elements.
        device: Where the attention runs.
    """
    if _writes_fp8(device):
        for width in _HOPPER_HEAD_DIMS:
            if head_dim <= width:
                return width
    return -(-head_dim // _HEAD_DIM_STEP) * _HEAD_DIM_STEP


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    head_dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Attend within each sequence of a packed batch; may be captured in a CUDA graph.

    The first call of a shape bucket builds a plan, which takes tens of milliseconds and
    cannot happen during capture.

    Args:
        q: `[T, H, Dp] float8_e4m3fn`, contiguous, columns from `head_dim` on zero. Dp
            should be `padded_head_dim`, and must be a multiple of 16.
        k: `[T, H_kv, Dp]` like q, H a multiple of H_kv.
        v: `[T, H_kv, Dp]` like k.
        scales: `[3] fp32`, contiguous, positive: what q, k and v are multiples of.
        cu_seqlens: `[N + 1] int32` on q's device, contiguous token prefix sums. A tail
            of zeros or repeated values stands for empty sequences.
        max_seqlen: An upper bound of the sequence lengths, in tokens.
        scale: Softmax scale.
        head_dim: D, the columns of the output.
        dtype: bf16 or fp16, of the output.

    Returns:
        `[T, H, D]`, contiguous, `dtype`. Rows of no sequence are zeros.

    Raises:
        ValueError: The arguments do not fit each other.
        RuntimeError: cuDNN has no kernel for them, is missing or too old, a plan would
            have to be built during capture, or a second GPU is used.
    """
    _check(q, k, v, scales, cu_seqlens, head_dim, dtype)
    num_tokens, heads, _ = q.shape
    num_seqs = cu_seqlens.shape[0] - 1
    device = q.device
    if num_tokens == 0 or num_seqs == 0:
        return torch.zeros((num_tokens, heads, head_dim), dtype=dtype, device=device)
    key = PlanKey(
        num_seqs=bucket_num_seqs(num_seqs),
        max_len=bucket_max_len(max(1, min(max_seqlen, num_tokens))),
        dtype=_FP8,
        out_dtype=_FP8 if _writes_fp8(device) else dtype,
        q=(*q.shape[1:], *q.stride()),
        k=(*k.shape[1:], *k.stride()),
        v=(*v.shape[1:], *v.stride()),
        scale=scale,
    )
    strides = (q.stride(0), k.stride(0), v.stride(0), q.stride(0))
    derived = derive_seqlens(cu_seqlens, num_tokens, key.num_seqs, strides)
    cudnn, handle = _frontend()
    plan = PLANS.plan(key, device, lambda: _build(key))
    one, weight_scale, weight_descale = _constants(device)
    is_fp8 = key.out_dtype == _FP8
    is_done = not is_fp8 and q.shape[2] == head_dim
    allocate = torch.zeros if is_done else torch.empty
    out = allocate(q.shape, dtype=key.out_dtype, device=device)
    tensors = {
        _Uid.Q: q,
        _Uid.K: k,
        _Uid.V: v,
        _Uid.O: out,
        _Uid.LENGTHS_Q: derived.lengths,
        _Uid.LENGTHS_KV: derived.lengths,
        _Uid.OFFSETS_Q: derived.offsets[0],
        _Uid.OFFSETS_K: derived.offsets[1],
        _Uid.OFFSETS_V: derived.offsets[2],
        _Uid.OFFSETS_O: derived.offsets[3],
        _Uid.DESCALE_Q: scales[0:1],
        _Uid.DESCALE_K: scales[1:2],
        _Uid.DESCALE_V: one if is_fp8 else scales[2:3],
        _Uid.DESCALE_S: weight_descale,
        _Uid.SCALE_S: weight_scale,
        _Uid.SCALE_O: one,
    }
    cudnn.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
    plan.execute(
        {uid.value: tensor for uid, tensor in tensors.items()},
        workspace=PLANS.workspace,
        handle=handle,
    )
    if is_done:
        return out
    return _finish(out, scales, derived.offsets[3], head_dim, dtype)


def _build(key: PlanKey) -> Plan:
    cudnn, handle = _frontend()
    # Here, where every caller comes by: the process would not survive trying.
    if key.out_dtype == _FP8 and cudnn.backend_version() < MIN_CUDNN_FP8_HOPPER:
        raise RuntimeError(
            f"FP8 on Hopper needs cuDNN {format_cudnn(MIN_CUDNN_FP8_HOPPER)}; 9.19 "
            "runs an illegal instruction there, which ends the CUDA context"
        )
    types = {
        _FP8: cudnn.data_type.FP8_E4M3,
        torch.bfloat16: cudnn.data_type.BFLOAT16,
        torch.float16: cudnn.data_type.HALF,
    }
    graph = cudnn.pygraph(
        handle=handle,
        io_data_type=types[_FP8],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )

    def vector(uid: _Uid, length: int, data_type: Any) -> Any:
        return graph.tensor(
            name=uid.name,
            dim=(length, 1, 1, 1),
            stride=(1, 1, 1, 1),
            data_type=data_type,
        ).set_uid(uid.value)

    def packed(uid: _Uid, offsets: _Uid, layout: tuple[int, ...]) -> Any:
        heads, width, row, head, _ = layout
        tensor = graph.tensor(
            name=uid.name,
            dim=(key.num_seqs, heads, key.max_len, width),
            stride=(key.max_len * row, head, row, 1),
            data_type=types[_FP8],
        ).set_uid(uid.value)
        int64 = cudnn.data_type.INT64
        return tensor.set_ragged_offset(vector(offsets, key.num_seqs + 1, int64))

    def scalar(uid: _Uid) -> Any:
        return vector(uid, 1, cudnn.data_type.FLOAT)

    out, _, *amaxes = graph.sdpa_fp8(
        name="sdpa_fp8",
        q=packed(_Uid.Q, _Uid.OFFSETS_Q, key.q),
        k=packed(_Uid.K, _Uid.OFFSETS_K, key.k),
        v=packed(_Uid.V, _Uid.OFFSETS_V, key.v),
        descale_q=scalar(_Uid.DESCALE_Q),
        descale_k=scalar(_Uid.DESCALE_K),
        descale_v=scalar(_Uid.DESCALE_V),
        descale_s=scalar(_Uid.DESCALE_S),
        scale_s=scalar(_Uid.SCALE_S),
        scale_o=scalar(_Uid.SCALE_O),
        generate_stats=False,
        attn_scale=key.scale,
        use_padding_mask=True,
        seq_len_q=vector(_Uid.LENGTHS_Q, key.num_seqs, cudnn.data_type.INT32),
        seq_len_kv=vector(_Uid.LENGTHS_KV, key.num_seqs, cudnn.data_type.INT32),
    )
    # Nobody asks for the largest score and output, but the operation has them.
    for uid, amax in zip((_Uid.AMAX_S, _Uid.AMAX_O), amaxes, strict=True):
        amax.set_uid(uid.value).set_output(False).set_data_type(cudnn.data_type.FLOAT)
        amax.set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1))
    heads, width, row, head, _ = key.q
    out.set_uid(_Uid.O.value).set_output(True).set_data_type(types[key.out_dtype])
    out.set_dim((key.num_seqs, heads, key.max_len, width))
    out.set_stride((key.max_len * row, head, row, 1))
    out.set_ragged_offset(
        vector(_Uid.OFFSETS_O, key.num_seqs + 1, cudnn.data_type.INT64)
    )
    graph.build([cudnn.heur_mode.A])
    return graph


# One variant for all lengths: it is compiled before any capture.
@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs"],
    do_not_specialize_on_alignment=["scales_ptr"],
)
def _finish_kernel(
    padded_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,
    num_tokens,
    num_seqs,
    H: tl.constexpr,
    D_UNITS: tl.constexpr,
    PADDED_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    IS_SCALED: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
):
    """Write BLOCK_UNITS runs of UNIT elements of the output.

    Grid: (cdiv(num_tokens * H * D_UNITS, BLOCK_UNITS),)
    """
    ROW: tl.constexpr = H * D_UNITS
    first = tl.program_id(0).to(tl.int64) * BLOCK_UNITS
    item = tl.arange(0, BLOCK_UNITS)
    offs_out = first + item
    item += (first % ROW).to(tl.int32)
    offs_t = first // ROW + item // ROW
    head = offs_t * H + (item % ROW) // D_UNITS
    offs_in = (head * PADDED_UNITS + item % D_UNITS) * UNIT

    offs_u = tl.arange(0, UNIT)[None, :]
    is_real = (offs_in < tl.load(offsets_ptr + num_seqs))[:, None]
    x = tl.load(padded_ptr + (offs_in[:, None] + offs_u), mask=is_real, other=0.0)
    if IS_SCALED:
        x = x.to(tl.float32) * tl.load(scales_ptr + 2)
    tl.store(
        out_ptr + (offs_out[:, None] * UNIT + offs_u),
        x.to(out_ptr.dtype.element_ty),
        mask=(offs_t < num_tokens)[:, None],
    )


def _finish(
    padded: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    head_dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Drop the padded columns and, of e4m3, multiply by v's scale and round.

    Args:
        padded: `[T, H, Dp]`, contiguous, e4m3 or `dtype`.
        scales: `[3] fp32`, of q, k and v.
        offsets: `[Nb + 1, 1, 1, 1] int64` of the sequences, in elements of `padded`.
            After the last one the output is zeros.
        head_dim: D <= Dp.
        dtype: Of the output.

    Returns:
        `[T, H, D]`, contiguous.
    """
    shape = (*padded.shape[:2], head_dim)
    out = torch.empty(shape, dtype=dtype, device=padded.device)
    launch = _finish_launch(padded, offsets.shape[0] - 1, head_dim, dtype)
    launch(padded, scales, offsets, out)
    return out


@cached_by_layout
def _finish_launch(
    padded: torch.Tensor, num_seqs: int, head_dim: int, dtype: torch.dtype
) -> Launch:
    # A launch keeps the variant that it compiled, which writes one dtype.
    num_tokens, heads, width = padded.shape
    units = num_tokens * heads * (head_dim // _UNIT)
    return Launch(
        _finish_kernel,
        triton.cdiv(units, _BLOCK_UNITS),
        num_tokens,
        num_seqs,
        H=heads,
        D_UNITS=head_dim // _UNIT,
        PADDED_UNITS=width // _UNIT,
        UNIT=_UNIT,
        IS_SCALED=padded.dtype == _FP8,
        BLOCK_UNITS=_BLOCK_UNITS,
        num_warps=_NUM_WARPS,
    )


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    found = [(tuple(x.shape), x.stride(), x.dtype) for x in (q, k, v)]
    if any(x.dim() != 3 or x.dtype != _FP8 or not x.is_contiguous() for x in (q, k, v)):
        raise ValueError(f"q, k, v must be contiguous [T, H, Dp] {_FP8}, got {found}")
    if (
        k.shape != v.shape
        or k.shape[::2] != q.shape[::2]
        or k.shape[1] == 0
        or q.shape[1] % k.shape[1] != 0
    ):
        raise ValueError(
            "k and v must be [T, H_kv, Dp] with the T and Dp of q and H_kv a divisor "
            f"of H, got {found}"
        )
    if head_dim % _UNIT or not 0 < head_dim <= q.shape[2]:
        raise ValueError(
            f"the head dim must be a multiple of {_UNIT} up to {q.shape[2]}, the width "
            f"of q, got {head_dim}"
        )
    if q.shape[2] % _HEAD_DIM_STEP:
        raise ValueError(
            f"q must be padded to a multiple of {_HEAD_DIM_STEP} columns, got "
            f"{q.shape[2]}"
        )
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"the output must be bf16 or fp16, got {dtype}")
    if (
        scales.shape != (3,)
        or scales.dtype != torch.float32
        or not scales.is_contiguous()
    ):
        raise ValueError(
            f"scales must be contiguous [3] fp32, got {tuple(scales.shape)} "
            f"{scales.dtype}"
        )
    devices = {x.device for x in (q, k, v, scales, cu_seqlens)}
    if len(devices) > 1:
        raise ValueError(
            f"the tensors must share one device, got {', '.join(map(str, devices))}"
        )

# SPDX-License-Identifier: Apache-2.0
"""q, k and v to e4m3 in plain PyTorch: what the kernels must equal.

The lengths are read on the host, so it cannot be captured in a CUDA graph.
"""

import torch

from vllm_flashinfer_vit.kernels.formats import (
    BLOCK,
    E4M3_MAX,
    FP32_TINY,
    QuantizedQKV,
    cut_off_above,
    qk_max,
)
from vllm_flashinfer_vit.kernels.rope_ref import rope_ref


def quantize_blocks_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    interleaved: bool = False,
    counts: torch.Tensor | None = None,
) -> QuantizedQKV:
    """Turn q and k, and quantise q, k and v in blocks of 128 tokens of a sequence.

    Args:
        q: `[T, H, D]` floating point, any strides.
        k: `[T, H_kv, D]` like q.
        v: `[T, H_kv, D]` like q.
        cu_seqlens: `[N + 1]` int32, token prefix sums; where it does not rise is an
            empty sequence.
        cos: `[T, R / 2]` to turn q and k by, or None; so is sin.
        sin: See `cos`.
        scales: `[3]` fp32 for q, k and v, or None for block scales.
        interleaved: As for `rope_ref`.
        counts: As the kernel takes it, or None.

    Returns:
        As the kernel, with zeros and scales of 0 in the blocks of no sequence.
    """
    num_tokens, _, head_dim = q.shape
    q, k = _turned(q, k, cos, sin, interleaved)
    offsets = cu_seqlens.clamp(max=num_tokens).tolist()
    num_blocks = num_tokens // BLOCK + len(offsets) - 1
    outs, out_scales = [], []
    for i, x in enumerate((q, k, v)):
        largest = E4M3_MAX if i == 2 else qk_max(head_dim)
        given = None if scales is None else scales[i] * (E4M3_MAX / largest)
        x8 = torch.zeros(
            (x.shape[1], num_blocks, BLOCK, head_dim),
            dtype=torch.float8_e4m3fn,
            device=x.device,
        )
        x_scale = torch.zeros(x8.shape[:2], dtype=torch.float32, device=x.device)
        for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
            block = start // BLOCK + n
            for first in range(start, end, BLOCK):
                rows = x[first : min(first + BLOCK, end)].transpose(0, 1)  # [H, L, D]
                amax = finite_absmax(rows.flatten(1))
                scale = scale_of(amax, largest) if given is None else given
                x_scale[:, block] = scale
                inverse = 1 / x_scale[:, block]
                if counts is not None:
                    count_ref(counts[:, i], amax * inverse, largest)
                inverse = inverse[:, None, None]
                x8[:, block, : rows.shape[1]] = to_e4m3_ref(rows, inverse, largest)
                block += 1
        outs.append(x8.flatten(1, 2))
        out_scales.append(x_scale)
    q8, k8 = (_pad(x8, 32) for x8 in outs[:2])
    v8 = _pad(outs[2], 16).transpose(1, 2)  # [H_kv, D_v, Tp]
    v8 = v8[..., key_order(v8.shape[2]).to(v8.device)].contiguous()
    return QuantizedQKV(q8, k8, v8, *out_scales)


def quantize_rows_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scales: torch.Tensor,
    head_dim_padded: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn q and k, and quantise q, k and v by one scale for each, rows staying rows.

    Args:
        q: As `quantize_blocks_ref` takes it; so are the others.
        k: See `q`.
        v: See `q`.
        cu_seqlens: See `q`; rows from its largest entry on become zeros.
        scales: `[3]` fp32 for q, k and v.
        head_dim_padded: Dp, at least D.
        cos: See `q`.
        sin: See `q`.
        interleaved: See `q`.
        counts: As the kernel takes it, or None.

    Returns:
        As the kernel.
    """
    q, k = _turned(q, k, cos, sin, interleaved)
    end = int(cu_seqlens.max())
    outs = []
    for i, (x, inverse) in enumerate(zip((q, k, v), 1 / scales, strict=True)):
        out = torch.zeros(
            (x.shape[0], x.shape[1], head_dim_padded),
            dtype=torch.float8_e4m3fn,
            device=x.device,
        )
        out[:end, :, : x.shape[2]] = to_e4m3_ref(x[:end], inverse)
        outs.append(out)
        if counts is None:
            continue
        for first in range(0, min(end, len(x)), BLOCK):
            rows = x[first : min(first + BLOCK, end)].transpose(0, 1)
            amax = finite_absmax(rows.flatten(1))
            count_ref(counts[:, i], amax * inverse, E4M3_MAX)
    return outs[0], outs[1], outs[2]


def scale_of(amax: torch.Tensor, largest: float = E4M3_MAX) -> torch.Tensor:
    """Return the scales that take largest absolute values to `largest`, 1 for 0."""
    # By a tensor: for a number PyTorch multiplies by its reciprocal on a GPU.
    scale = (amax / torch.full_like(amax, largest)).clamp_min(FP32_TINY)
    return torch.where(amax > 0, scale, 1.0)


def to_e4m3_ref(
    x: torch.Tensor, inverse: torch.Tensor, largest: float = E4M3_MAX
) -> torch.Tensor:
    """Return x times the reciprocal of its scale, saturated; NaN for NaN and Inf."""
    scaled = (x.float() * inverse).clamp(-largest, largest)
    return torch.where(x.isfinite(), scaled, float("nan")).to(torch.float8_e4m3fn)


def count_ref(counts: torch.Tensor, amax: torch.Tensor, largest: float) -> None:
    """Count blocks, and those that are cut off.

    Args:
        counts: `[2]` int64, added to in place.
        amax: `[H]` fp32, the blocks' largest scaled values.
        largest: What a scaled value can be at most.
    """
    is_cut_off = amax > cut_off_above(largest)
    counts += torch.stack([torch.ones_like(is_cut_off), is_cut_off]).sum(dim=1)


def column_order(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Return the column `[D]` int64 of a head that each column of q and k holds."""
    pair = torch.arange(head_dim // 2)
    first = torch.where(pair < rotary_dim // 2, pair, pair + rotary_dim // 2)
    apart = torch.where(
        pair < rotary_dim // 2, rotary_dim // 2, (head_dim - rotary_dim) // 2
    )
    return torch.stack([first, first + apart], dim=1).flatten()


def key_order(num_rows: int) -> torch.Tensor:
    """Return the key `[num_rows]` int64 that each position of v holds."""
    position = torch.arange(num_rows)
    h, low, b, e = (
        position // 16 % 2,
        position // 4 % 4,
        position // 2 % 2,
        position % 2,
    )
    return position // 32 * 32 + 16 * h + 8 * b + 2 * low + e


def finite_absmax(x: torch.Tensor) -> torch.Tensor:
    """Return the largest finite absolute values `[R]` fp32 of `[R, C]`, 0 for none."""
    x = x.float().abs()
    x = torch.where(x.isfinite(), x, 0.0)
    return torch.cat([x, x.new_zeros(x.shape[0], 1)], dim=1).amax(dim=1)


def _turned(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn q and k if there are angles, and order their columns as they are stored."""
    rotary_dim = 0
    if cos is not None and sin is not None:
        q, k = rope_ref(q, k, cos, sin, interleaved)
        rotary_dim = 2 * cos.shape[1]
    order = column_order(q.shape[2], rotary_dim).to(q.device)
    return q[..., order], k[..., order]


def _pad(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Append zeros to the last dimension."""
    columns = -x.shape[-1] % multiple
    zeros = torch.zeros((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
    return torch.cat([x, zeros], dim=-1)

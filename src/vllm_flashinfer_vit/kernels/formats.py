# SPDX-License-Identifier: Apache-2.0
"""What kernels and their references agree on: sizes, tensors that they pass on, checks.

Nothing here needs Triton, so that a reference runs where there is none; and what needs
only a number loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

if TYPE_CHECKING:
    import torch

# Of an MLP; `swiglu` takes stacked [gate; up].
Activation = Literal["swiglu", "quick_gelu", "tanh_gelu", "gelu"]
# What PyTorch calls these two.
GELU_APPROXIMATE = {"tanh_gelu": "tanh", "gelu": "none"}
# Scales of rows in e4m3: one for all, or each row, or each group of a row, its own.
RowScales = Literal["one", "own", "groups"]
# Tokens of a sequence that share a scale in `QuantizedQKV`.
BLOCK = 128
# Columns of a row that share a scale in "groups". A weight's blocks are as wide.
GROUP = 128
# Tokens of the longest sequence that the window kernel takes.
MAX_WINDOW = 128
# Passes that a dynamic scale remembers, as many as vLLM's own.
HISTORY = 16
# The largest number in e4m3.
E4M3_MAX = 448.0
# The least scale of a row in e4m3, as vLLM has it: `_FP8_MIN_SCALING_FACTOR` of its
# vllm/model_executor/layers/quantization/input_quant_fp8.py.
MIN_ROW_SCALE = 1.0 / (E4M3_MAX * 512.0)
# The same of a group: `eps` of `per_token_group_quant_fp8` in its `fp8_utils.py`.
MIN_GROUP_SCALE = 1e-10 / E4M3_MAX
# By how much rounding to e4m3 may make the norm of a row larger: 1/16 of each value,
# and for those below 2^-6 of a unit half of their steps, 2^-10.
ROUNDED = 1 + 2.0**-4 + 2.0**-10
# The least normal number in fp32, and so the least scale.
FP32_TINY = 2.0**-126


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return a dtype's name in tables and reports, `bfloat16`.

    Args:
        dtype: A torch dtype or its name already.
    """
    return str(dtype).removeprefix("torch.")


def qk_max(head_dim: int) -> float:
    """Return the largest q and k, a number in e4m3: 28, and 22 at head dim 128.

    The Hopper kernel has its scores in fp16, where a sum of so many products must fit.
    """
    # From 16 to 32, numbers in e4m3 are the even ones.
    return min(28.0, 2.0 * (math.isqrt(65504 // head_dim) // 2))


def cut_off_above(largest: float) -> float:
    """Return what a scaled value that ends at `largest` must exceed to be cut off.

    Up to half a step beyond, e4m3 would round it to `largest` even if it went on.

    Args:
        largest: A number in e4m3, a normal one.
    """
    # Numbers in e4m3 from 2^n to 2^(n + 1) are 2^(n - 3) apart.
    return largest + 2.0 ** (math.frexp(largest)[1] - 5)


class QuantizedQKV(NamedTuple):
    """q, k and v in e4m3, `x ~ x8 * scale`, in blocks of 128 tokens of a sequence.

    No element of q and k is above `qk_max` of D, none of v above 448.

    Sequence n starts at block `cu_seqlens[n] // 128 + n`; NB = T // 128 + N blocks are
    enough for every batch, and Tp = 128 * NB. Blocks of no sequence are not written.

    Attributes:
        q: `[H, Tp, D_qk]` contiguous, D_qk being D rounded up to 32. Columns from D on,
            and rows of a sequence's last block after its end, are zeros. Columns 2 j
            and 2 j + 1 hold the pair j that the rotary embedding turns: columns j and
            j + R / 2 of the head, or for R / 2 <= j < D / 2, which it leaves, columns
            j + R / 2 and j + D / 2. Interleaved pairs lie as they did in the head.
            Scores do not see an order that q and k share: a projection that writes them
            has another, also of the padding (`gemms.quantizing_gemm.column_order`).
        k: `[H_kv, Tp, D_qk]` like q.
        v: `[H_kv, D_v, Tp]` contiguous, D_v being D rounded up to 16, with the same
            zeros. Position 16 h + 4 l + 2 b + e of each 32 holds key 16 h + 8 b + 2 l +
            e (h, b, e below 2, l below 4): a thread that has computed the scores of
            some keys on Hopper holds them as it needs them to weight these keys.
        q_scale: `[H, NB]` fp32.
        k_scale: `[H_kv, NB]` fp32.
        v_scale: `[H_kv, NB]` fp32.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor


class DeviceScales(NamedTuple):
    """One layer's FP8 scales and what they come from, all of it on the device.

    Attributes:
        amax: `[3]` fp32, the largest absolute values of q, k and v since `update`.
        history: `[16, 3]` fp32, those of the last passes.
        position: `[1]` int32, the row of `history` that is written next.
        scales: `[3]` fp32, what one e4m3 unit stands for; 1 before the first pass.
        clip_counts: `[2, 3]` int64, blocks of q, k and v that static scales were for,
            and those of them that they cut off, since the last reading. A block is 128
            rows of a head.
    """

    amax: torch.Tensor
    history: torch.Tensor
    position: torch.Tensor
    scales: torch.Tensor
    clip_counts: torch.Tensor

    @classmethod
    def on(cls, device: torch.device | str) -> Self:
        """Return the state of a layer that has seen nothing."""
        import torch

        return cls(
            amax=torch.zeros(3, dtype=torch.float32, device=device),
            history=torch.zeros(HISTORY, 3, dtype=torch.float32, device=device),
            position=torch.zeros(1, dtype=torch.int32, device=device),
            scales=torch.ones(3, dtype=torch.float32, device=device),
            clip_counts=torch.zeros(2, 3, dtype=torch.int64, device=device),
        )


def check_blocks(
    q: torch.Tensor,
    v: torch.Tensor,
    num_tokens: int,
    num_seqs: int,
    head_dim: int,
    scale: float,
) -> int:
    """Check what the FP8 attention kernels demand.

    Args:
        q: `[H, Tp, D_qk]` of a `QuantizedQKV`.
        v: `[H_kv, D_v, Tp]` of it.
        num_tokens: T.
        num_seqs: N.
        head_dim: D.
        scale: Factor on the scores.

    Returns:
        NB, the number of blocks.

    Raises:
        ValueError: q or v is not that of `QuantizedQKV` for these sizes, or `scale` is
            not above 0.
    """
    num_blocks = num_tokens // BLOCK + num_seqs
    d_v = v.shape[1]
    if q.shape[1] != num_blocks * BLOCK or not d_v - 16 < head_dim <= d_v:
        raise ValueError(
            f"q {tuple(q.shape)} and v {tuple(v.shape)} are not the blocks of "
            f"{num_tokens} tokens, {num_seqs} sequences and head dim {head_dim}"
        )
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    return num_blocks


def check_rope_inputs(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Check that q and k can be turned by cos and sin.

    Raises:
        ValueError: q and k are not `[T, H, D]` and `[T, H_kv, D]`, or cos and sin are
            not `[T, R / 2]` with R <= D.
    """
    if (
        q.dim() != 3
        or k.dim() != 3
        or k.shape[0] != q.shape[0]
        or k.shape[2] != q.shape[2]
    ):
        raise ValueError(
            "q and k must be [T, H, D] and [T, H_kv, D], "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if (
        cos.dim() != 2
        or cos.shape != sin.shape
        or cos.shape[0] != q.shape[0]
        or not 0 < 2 * cos.shape[1] <= q.shape[2]
    ):
        raise ValueError(
            f"cos and sin must be [T, R / 2] with T={q.shape[0]} and R <= "
            f"{q.shape[2]}, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )


def check_number_of_terms(terms: Sequence[torch.Tensor]) -> None:
    """Check that a sum has two or three terms.

    Raises:
        ValueError: It has another number.
    """
    if not 2 <= len(terms) <= 3:
        raise ValueError(f"terms must be two or three, got {len(terms)}")


def check_sum_norm_inputs(
    terms: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    layer_scales: Sequence[torch.Tensor],
) -> None:
    """Check that terms can be added and their sum normalised.

    Raises:
        ValueError: The terms are not `[..., C]` of one shape and dtype; weight, bias or
            a layer scale is not `[C]`; or there is not one of these for each branch.
    """
    x = terms[0]
    found = [(tuple(term.shape), term.dtype) for term in terms]
    if x.dim() == 0 or len(set(found)) > 1:
        raise ValueError(f"terms must be [..., C] of one shape and dtype, got {found}")
    if weight.shape != x.shape[-1:] or (
        bias is not None and bias.shape != weight.shape
    ):
        raise ValueError(
            f"weight and bias must be [{x.shape[-1]}], got {tuple(weight.shape)} and "
            f"{None if bias is None else tuple(bias.shape)}"
        )
    if layer_scales and (
        len(layer_scales) != len(terms) - 1
        or any(scale.shape != weight.shape for scale in layer_scales)
    ):
        raise ValueError(
            f"layer scales must be none, or {len(terms) - 1} of [{x.shape[-1]}], got "
            f"{[tuple(scale.shape) for scale in layer_scales]}"
        )


class Bound(NamedTuple):
    """How a norm's rows bound what an MLP's activation makes of them.

    No value of row t is above `448 scales[t]`: see `blocks.act_bound`.

    Attributes:
        factors: `[2]` fp32: `scales = factors[0] * |norm of the row| + factors[1]`.
        scales: `[T, 1]` fp32; written.
    """

    factors: torch.Tensor
    scales: torch.Tensor


def check_bound(bound: Bound, num_rows: int) -> None:
    """Check what the scales of an activation's rows are made of, and written to.

    Raises:
        ValueError: They are of other dtypes, shapes or strides.
    """
    import torch

    found = [(tuple(x.shape), x.dtype) for x in bound]
    expected = [((2,), torch.float32), ((num_rows, 1), torch.float32)]
    if found != expected or not all(x.is_contiguous() for x in bound):
        raise ValueError(
            f"a bound must be [2] and [{num_rows}, 1], fp32 and contiguous, got {found}"
        )


def num_groups(columns: int) -> int:
    """Return how many scales a row has in "groups"; its last group may be short."""
    return -(-columns // GROUP)


def check_row_scales(rows: torch.Tensor, scales: torch.Tensor) -> RowScales:
    """Check rows in e4m3 and their scales.

    Args:
        rows: `[..., C]`, T rows in all.
        scales: One element in at most one dim for all rows, `[T, 1]` for each its own,
            or `[T, num_groups(C)]` with contiguous columns for each group its own.

    Returns:
        Which of these they are; "own" where a row is one group.

    Raises:
        ValueError: They are of other dtypes, shapes or strides.
    """
    import torch

    num_rows, groups = rows.numel() // rows.shape[-1], num_groups(rows.shape[-1])
    form: RowScales | None = None
    if scales.dim() < 2 and scales.numel() == 1:
        form = "one"
    elif tuple(scales.shape) == (num_rows, 1):
        form = "own"
    elif tuple(scales.shape) == (num_rows, groups) and scales.t().is_contiguous():
        form = "groups"
    is_typed = rows.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    if form is None or not is_typed:
        raise ValueError(
            f"rows must be e4m3, scales fp32 and one or [{num_rows}, 1] or, in "
            f"contiguous columns, [{num_rows}, {groups}], got {rows.dtype}, "
            f"{scales.dtype} and {tuple(scales.shape)} with strides {scales.stride()}"
        )
    return form

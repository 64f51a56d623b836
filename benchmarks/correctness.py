# SPDX-License-Identifier: Apache-2.0
"""How wrong a result is, the references for that, and what is not timed for it."""

from collections.abc import Sequence

import torch

# An attention kernel with fp32 accumulation stays an order of magnitude below these.
GATES = {"bf16": 2e-2, "fp16": 4e-3}
# FP8 attention is off by 0.04 to 0.06 on inputs from N(0, 1).
FP8_GATE = 0.1


class WrongResultError(RuntimeError):
    """A provider's output is too far from the fp32 reference to be timed."""


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Return ||out - ref|| / ||ref|| over all elements, summed in fp64.

    Args:
        out: `[R, ...]`, any floating dtype.
        ref: As `out`, fp32.

    Raises:
        WrongResultError: The shapes differ.
    """
    if out.shape != ref.shape:
        raise WrongResultError(
            f"output is {tuple(out.shape)}, reference is {tuple(ref.shape)}"
        )
    off = norm = 0.0
    # In slices, since a fp64 copy of a whole output would be four times its size.
    for part, ref_part in zip(out.split(4096), ref.split(4096), strict=True):
        ref_part = ref_part.double()
        off += (part.double() - ref_part).square().sum().item()
        norm += ref_part.square().sum().item()
    return (off / norm) ** 0.5


def check_error(rel_err: float, limit: float) -> None:
    """Refuse to time a wrong kernel.

    Raises:
        WrongResultError: The error is over the limit, or not a number.
    """
    if not rel_err <= limit:
        raise WrongResultError(f"wrong result: relative error {rel_err:.2e}")


def attention_fp32(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Attend within each sequence in fp32.

    Written apart from the package's own reference, which some benchmarks time.

    Args:
        q: `[T, H, D]`, any floating dtype and strides; so are k and v.
        k: See `q`.
        v: See `q`.
        lens: Sequence lengths in tokens; their sum is at most T.
        scale: Softmax scale.

    Returns:
        The output of all sequences, `[sum of lens, H, D] fp32`.
    """
    outputs = []
    begin = 0
    for length in lens:
        if not length:
            continue
        end = begin + length
        keys = k[begin:end].float().permute(1, 2, 0)  # [H, D, L]
        values = v[begin:end].float().transpose(0, 1)  # [H, L, D]
        # Scores of one slice take at most 2 GiB.
        for part in q[begin:end].split(max(1, 2**29 // (q.shape[1] * length))):
            scores = part.float().transpose(0, 1) @ keys
            probs = scores.mul_(scale).softmax(-1)
            outputs.append((probs @ values).transpose(0, 1))
        begin = end
    return torch.cat(outputs)

# SPDX-License-Identifier: Apache-2.0
"""Dynamic scales in plain PyTorch: what `kernels/absmax.py` must equal."""

import torch

from vllm_flashinfer_vit.kernels.formats import HISTORY, DeviceScales
from vllm_flashinfer_vit.kernels.quantize_ref import finite_absmax, scale_of
from vllm_flashinfer_vit.kernels.rope_ref import rope_ref


def absmax_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    amax: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """Raise `amax` to the largest finite absolute values of turned q and k, and of v.

    Args:
        q: `[T, H, D]` floating point, any strides.
        k: `[T, H_kv, D]` like q.
        v: `[T, H_kv, D]` like q.
        cu_seqlens: `[N + 1]` int32; rows from its largest entry on have no part.
        amax: `[3]` fp32, not negative; changed in place.
        cos: `[T, R / 2]` to turn q and k by, or None; so is sin.
        sin: See `cos`.
        interleaved: As for `rope_ref`.
    """
    if cos is not None and sin is not None:
        q, k = rope_ref(q, k, cos, sin, interleaved)
    end = int(cu_seqlens.max())
    seen = [finite_absmax(x[:end].reshape(1, -1)) for x in (q, k, v)]
    amax.copy_(torch.maximum(amax, torch.cat(seen)))


def update_ref(state: DeviceScales) -> None:
    """End a pass: move `state.amax` into the history, and derive the scales.

    Args:
        state: Changed in place.
    """
    state.history[int(state.position)] = state.amax
    state.scales.copy_(scale_of(state.history.amax(dim=0)))
    state.amax.zero_()
    state.position.copy_((state.position + 1) % HISTORY)

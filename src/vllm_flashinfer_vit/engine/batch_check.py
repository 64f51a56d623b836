# SPDX-License-Identifier: Apache-2.0
"""Checks of what an attention layer is called with, on the host alone."""

from collections.abc import Callable

import torch

from vllm_flashinfer_vit.ops.batch import Batch


def check(batch: Batch, dtype: torch.dtype, where: Callable[[], str]) -> None:
    """Refuse tensors that do not fit each other, or not their layer.

    Args:
        batch: q, k and v of the layer's heads.
        dtype: The layer's.
        where: Names the layer, for messages.

    Raises:
        ValueError: They do not; it says what to do.
    """
    q, k, v, cu_seqlens = batch.q, batch.k, batch.v, batch.cu_seqlens
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"{where()}: query, key and value are {q.dtype}, {k.dtype}, "
            f"{v.dtype}; they must share one dtype"
        )
    if q.dtype != dtype:
        raise ValueError(
            f"{where()}: built for {dtype}, called with {q.dtype}; "
            "convert the input or set --dtype to the activation dtype"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"{where()}: query, key and value are on {q.device}, {k.device}, "
            f"{v.device}; they must share one device"
        )
    if cu_seqlens is None:
        return
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.stride() != (1,):
        raise ValueError(
            f"{where()}: cu_seqlens is {cu_seqlens.dtype} of shape "
            f"{tuple(cu_seqlens.shape)} and stride {cu_seqlens.stride()}; it must "
            "be contiguous int32 of shape [N + 1]"
        )
    if cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{where()}: cu_seqlens has {cu_seqlens.shape[0]} entries, so "
            "there is no sequence; was the list of grids empty?"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(
            f"{where()}: cu_seqlens is on {cu_seqlens.device}, the query on "
            f"{q.device}; move it once per forward pass, not per layer"
        )

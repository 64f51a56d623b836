# SPDX-License-Identifier: Apache-2.0
"""What the blocks of `known_stacks` are given to turn q and k.

Each function takes angles `[T, D / 2]` in fp32 and the stream's dtype, and returns what
the tower that it is of makes of them, by the names of the blocks' parameters.
"""

import inspect
from typing import Any

import torch

Tensors = dict[str, Any]


def tables(angles: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """Return tables in the stream's dtype."""
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return {"rotary_pos_emb_cos": cos, "rotary_pos_emb_sin": sin}


def plain(angles: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """Return the angles as they are."""
    return {"rotary_pos_emb": angles}


def polar(angles: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """Return complex numbers, as Kimi's towers do."""
    return {"rope_freqs_cis": torch.polar(torch.ones_like(angles), angles)}


def pair(name: str, angles: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """Return tables in fp32, whose halves are alike."""
    doubled = angles.repeat(1, 2)
    return {name: (doubled.cos(), doubled.sin())}


def pixtral(angles: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """Return complex numbers, or the same as pairs where a release takes those."""
    from vllm.model_executor.models import pixtral

    turns = torch.polar(torch.ones_like(angles), angles)
    # The sources say which.
    is_real = "freqs_cis.dtype == torch.float32" in inspect.getsource(pixtral)
    return {"freqs_cis": torch.view_as_real(turns) if is_real else turns}


def planes(angles: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """Return tables in fp32 of three axes, each of which has a third of the columns."""
    turned = angles[:, : angles.shape[1] // 3 * 3].expand(3, -1, -1)
    return {"rotary_cos": turned.cos(), "rotary_sin": turned.sin()}


def muse(angles: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """Return pairs in fp32, as Muse Spark's tower does."""
    return {"freq_cis": torch.stack([angles.cos(), angles.sin()], -1)}


def of_all_heads(angles: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """Return tables in fp32, `[T, 1, D / 2]`."""
    return {"cos": angles.cos()[:, None], "sin": angles.sin()[:, None]}


def of_rounded(angles: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """Return tables of angles that were rounded first."""
    return {"cos": angles.to(dtype).cos(), "sin": angles.to(dtype).sin()}

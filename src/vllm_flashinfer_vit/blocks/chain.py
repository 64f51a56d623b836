# SPDX-License-Identifier: Apache-2.0
"""A tower's blocks with residual sums and the norm after them as one op.

A block adds both of its branches to the stream at once, which is rounded once.

The sum that a block ends with is normalized by the next block. So a block returns its
sum with the norm attached to it, and the next one takes that instead of its own.
Whatever else reads the sum in between, as deepstack does, finds it whole.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch

# Takes a norm, what to add and whether the sum is wanted; returns it and its norm.
SumNorm = Callable[
    [Any, tuple[torch.Tensor, ...], bool], tuple[torch.Tensor | None, torch.Tensor]
]

# Attribute of a tensor: its values, normalized for the next block.
_NORMED = "vllm_flashinfer_vit_normed"
# What `_forward` was written for; blocks of Qwen2-VL lack the last one.
_PARAMETERS = (
    "self",
    "x",
    "cu_seqlens",
    "rotary_pos_emb_cos",
    "rotary_pos_emb_sin",
    "max_seqlen",
    "sequence_lengths",
)


def has_known_forward(block: torch.nn.Module) -> bool:
    """Whether a block takes the arguments that chained ones do."""
    return _is_known(type(block).forward)


@functools.cache
def _is_known(forward: Callable[..., Any]) -> bool:
    found = tuple(inspect.signature(forward).parameters)
    return found in (_PARAMETERS, _PARAMETERS[:-1])


def is_compiled(block: torch.nn.Module) -> bool:
    """Whether a compiler runs a block, and fuses these ops and more than these."""
    return not getattr(block, "do_not_compile", True)


def can_chain(block: Any) -> bool:
    """Whether a block's LayerNorms can be a part of the sums before them."""
    return (
        not is_compiled(block)
        and has_known_forward(block)
        and all(
            type(norm) is torch.nn.LayerNorm and norm.bias is not None
            for norm in (block.norm1, block.norm2)
        )
        and runs_triton()
    )


def runs_triton() -> bool:
    """Whether vLLM runs on a GPU that Triton compiles for."""
    from vllm.platforms import current_platform

    return current_platform.is_cuda()


def sum_norm(
    norm: Any, terms: tuple[torch.Tensor, ...], keep_sum: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Add and normalize by one kernel; see `kernels.add_norm.sum_norm`.

    Args:
        norm: A LayerNorm with bias, or vLLM's RMSNorm.
        terms: What to add, alike in shape and dtype.
        keep_sum: Whether the sum is wanted.

    Returns:
        The sum or None, and its norm.
    """
    from vllm_flashinfer_vit.kernels import add_norm

    if isinstance(norm, torch.nn.LayerNorm):
        return add_norm.sum_norm(terms, norm.weight, norm.bias, norm.eps, keep_sum)
    eps = norm.variance_epsilon
    return add_norm.sum_norm(terms, norm.weight, None, eps, keep_sum)


@contextmanager
def chained(blocks: Iterable[torch.nn.Module], sum_norm: SumNorm) -> Iterator[None]:
    """Run a tower's blocks by chained forwards while the context lasts.

    Args:
        blocks: In order; with `norm1`, `attn`, `norm2` and `mlp`, as the Qwen-VL
            towers have them.
        sum_norm: The fused op.
    """
    blocks = list(blocks)
    norms: list[Any] = [block.norm1 for block in blocks[1:]]
    for block, norm in zip_longest(blocks, norms):
        # Not by setattr, which would look through the module's parameters first.
        vars(block)["forward"] = functools.partial(_forward, block, norm, sum_norm)
    try:
        yield
    finally:
        for block in blocks:
            del vars(block)["forward"]


def _forward(
    block: Any,
    next_norm: torch.nn.Module | None,
    sum_norm: SumNorm,
    x: torch.Tensor,
    **attention: Any,
) -> torch.Tensor:
    normed = vars(x).pop(_NORMED, None)
    if normed is None:
        normed = block.norm1(x)
    attended = block.attn(normed, **attention)
    _, normed = sum_norm(block.norm2, (x, attended), False)
    terms = x, attended, block.mlp(normed)
    if next_norm is None:
        return x + attended + terms[2]
    total, normed = sum_norm(next_norm, terms, True)
    assert total is not None
    vars(total)[_NORMED] = normed
    return total

# SPDX-License-Identifier: Apache-2.0
"""What Qwen2-VL, Qwen2.5-VL and Qwen3-VL are patched with alike.

vLLM is imported where a patch runs: the list of patches can be read without it.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vllm_flashinfer_vit.engine.owner import leaves_rotary
from vllm_flashinfer_vit.machine.versions import SUPPORTED_VLLM
from vllm_flashinfer_vit.models.frame_cache import FrameCache
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.patches.patch import Patch

Function = Callable[..., Any]
Grids = Sequence[Sequence[int]]

# 160 bytes a patch: the tables of 400,000 patches.
_MAX_ROTARY_BYTES = 64 * 2**20
# Attribute of a tower: its `FrameCache` of rotary tables.
ROTARY_CACHE = "vllm_flashinfer_vit_rotary"

_MODELS = "vllm.model_executor.models"
_MLP_PARAMETERS = (
    "self",
    "in_features",
    "hidden_features",
    "bias",
    "act_fn",
    "quant_config",
    "prefix",
)


def is_served(attention: Any) -> bool:
    """Whether a vision attention module runs on this package's layer."""
    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

    return isinstance(attention.attn, FlashInferViTAttention)


def is_served_flat(attention: Any, x: torch.Tensor) -> bool:
    """Whether it does, and the rows of its projection are the tokens in order.

    Args:
        attention: A vision attention module.
        x: `[S, B, C]`, its input; with B > 1 the tokens of all B take turns.
    """
    return is_served(attention) and x.shape[1] == 1


def attend_and_project(attention: Any, batch: Batch) -> torch.Tensor:
    """Return `[T, 1, C]`, a vision attention module's output for a batch."""
    context = attention.attn.attend(batch)
    output, _ = attention.proj(context.view(context.shape[0], 1, -1))
    return output


def after_init(change: Callable[[Any], object]) -> Callable[[Function], Function]:
    """Return what wraps a constructor: `change` gets what is built for FLASHINFER."""

    def replace(original: Function) -> Function:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            from vllm_flashinfer_vit.engine.selection import flashinfer_requested

            if flashinfer_requested():
                change(self)

        return __init__

    return replace


def fused_rotary(
    family: str,
    attention: str,
    replace: Callable[[Function], Function],
    *more_parameters: str,
) -> Patch:
    """Return the patch that has attention run straight from the QKV projection.

    Args:
        family: vLLM's module of the model.
        attention: The class of its vision attention.
        replace: Takes its `forward` and returns the new one.
        more_parameters: What `forward` takes beside the usual ones.
    """

    def marked(original: Function) -> Function:
        return leaves_rotary(replace(original))

    return Patch(
        name=f"{family}-fused-rotary",
        target=f"{_MODELS}.{family}:{attention}.forward",
        why="stock copies q and k and rotates them by a separate kernel",
        vllm_range=SUPPORTED_VLLM,
        remove_when="vLLM's vision attention hands q, k, v and the rotary tables to "
        "one op",
        parameters=(
            "self",
            "x",
            "cu_seqlens",
            "rotary_pos_emb_cos",
            "rotary_pos_emb_sin",
            "max_seqlen",
            *more_parameters,
        ),
        replace=marked,
    )


def quack_qkv(family: str, attention: str) -> Patch:
    """Return the patch that has QuACK run the QKV projection."""
    return Patch(
        name=f"{family}-quack-qkv",
        target=f"{_MODELS}.{family}:{attention}.__init__",
        why="cuBLAS takes longer than QuACK for the QKV projection of large batches",
        vllm_range=SUPPORTED_VLLM,
        remove_when="cuBLAS is as fast for this layer on Hopper",
        parameters=(
            "self",
            "embed_dim",
            "num_heads",
            "projection_size",
            "quant_config",
            "prefix",
        ),
        replace=after_init(_fuse_qkv),
    )


def _fuse_qkv(attention: Any) -> None:
    from vllm_flashinfer_vit.blocks.methods import fuse

    fuse(attention.qkv, torch.nn.Identity(), None)


def mlp_patch(
    name: str,
    mlp: str,
    change: Callable[[Any], object],
    *,
    why: str,
    remove_when: str,
    parameters: tuple[str, ...] = _MLP_PARAMETERS,
    after: tuple[str, ...] = (),
) -> Patch:
    """Return a patch of an MLP's constructor.

    Args:
        name: The patch's, `<family>-<what>`; the family is vLLM's module of the model.
        mlp: The class of the family's vision MLP.
        change: Takes an MLP that was built for FLASHINFER.
        why: As for `Patch`.
        remove_when: As for `Patch`.
        parameters: As for `Patch`.
        after: As for `Patch`.
    """
    family = name.partition("-")[0]
    return Patch(
        name=name,
        target=f"{_MODELS}.{family}:{mlp}.__init__",
        why=why,
        vllm_range=SUPPORTED_VLLM,
        remove_when=remove_when,
        parameters=parameters,
        replace=after_init(change),
        after=after,
    )


def aligned_mlp(
    family: str, mlp: str, rows: str, change: Callable[[Any], object]
) -> Patch:
    """Return the patch that pads an MLP's rows; `rows` says which are unaligned."""
    return mlp_patch(
        f"{family}-aligned-mlp",
        mlp,
        change,
        why=f"rows of no multiple of 8 values do not fit 16-byte loads: {rows}",
        remove_when="vLLM pads this layer, or cuBLAS is as fast for such rows",
    )


def fused_mlp(
    family: str, mlp: str, change: Callable[[Any], object], **options: Any
) -> Patch:
    """Return the patch that has QuACK run an MLP's first GEMM with its activation."""
    return mlp_patch(
        f"{family}-fused-mlp",
        mlp,
        change,
        why="stock writes the first GEMM's output and reads it again for the "
        "activation",
        remove_when="vLLM runs an activation within the GEMM in front of it",
        **options,
    )


def tower_forward(
    name: str,
    tower: str,
    running: Callable[[Any], AbstractContextManager[None]],
    *,
    why: str,
    remove_when: str,
) -> Patch:
    """Return a patch that runs a tower within a context.

    Args:
        name: The patch's.
        tower: `module:Class` in vLLM's models.
        running: Takes the tower and returns the context.
        why: As for `Patch`.
        remove_when: As for `Patch`.
    """

    def replace(original: Function) -> Function:
        @functools.wraps(original)
        def forward(
            self: Any,
            x: torch.Tensor,
            grid_thw: list[list[int]] | None,
            *,
            encoder_metadata: dict[str, torch.Tensor] | None = None,
        ) -> torch.Tensor:
            with running(self):
                return original(self, x, grid_thw, encoder_metadata=encoder_metadata)

        return forward

    return Patch(
        name=name,
        target=f"{_MODELS}.{tower}.forward",
        why=why,
        vllm_range=SUPPORTED_VLLM,
        remove_when=remove_when,
        parameters=("self", "x", "grid_thw", "encoder_metadata"),
        replace=replace,
    )


def add_norm(family: str, tower: str) -> Patch:
    """Return the patch that runs residual sums and LayerNorms as one op."""
    return tower_forward(
        f"{family}-add-norm",
        f"{family}:{tower}",
        _chained,
        why="stock adds and normalizes by two kernels, which read the sum once more",
        remove_when="vLLM has an op for a residual sum and its LayerNorm",
    )


def _chained(tower: Any) -> AbstractContextManager[None]:
    from vllm_flashinfer_vit.blocks.chain import can_chain, chained, sum_norm

    block = tower.blocks[0]
    if not (is_served(block.attn) and can_chain(block)):
        return nullcontext()
    return chained(tower.blocks, sum_norm)


def kept_rotary(family: str, tower: str) -> Patch:
    """Return the patch that keeps a tower's rotary tables by the size of a frame."""
    return Patch(
        name=f"{family}-kept-rotary",
        target=f"{_MODELS}.{family}:{tower}.rot_pos_emb",
        why="stock computes rotary positions anew for every image of every batch",
        vllm_range=SUPPORTED_VLLM,
        remove_when="vLLM keeps the rotary tables of frame sizes on the device",
        parameters=("self", "grid_thw"),
        replace=_keep_rotary,
    )


def _keep_rotary(original: Function) -> Function:
    @functools.wraps(original)
    def rot_pos_emb(self: Any, grid_thw: Grids) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_served(self.blocks[0].attn):
            return original(self, grid_thw)
        cache = vars(self).get(ROTARY_CACHE)
        if cache is None:
            cache = vars(self)[ROTARY_CACHE] = FrameCache(_MAX_ROTARY_BYTES)
        all_cos, all_sin = [], []
        for t, h, w in grid_thw:
            make = functools.partial(original, self, [[1, h, w]])
            cos, sin = cache.get(h, w, make)
            all_cos.append(cos if t == 1 else cos.repeat(t, 1))
            all_sin.append(sin if t == 1 else sin.repeat(t, 1))
        # Copies even one table: CUDA graphs write into the tensors they captured.
        return torch.cat(all_cos), torch.cat(all_sin)

    return rot_pos_emb

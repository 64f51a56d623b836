# SPDX-License-Identifier: Apache-2.0
"""Towers that vLLM takes from Transformers as they are: Gemma 4's.

Transformers looks up what attends, and what makes the mask, by a name in the tower's
config. Here both have a name of this package: attention is its layer, and in a mask's
place the blocks get `cu_seqlens`, made once in a pass without waiting for the device.
`gemma4` runs the rest of its blocks.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_flashinfer_vit.models import gemma4
from vllm_flashinfer_vit.ops.batch import row_offsets
from vllm_flashinfer_vit.patches.patch import Patch
from vllm_flashinfer_vit.settings import Settings

logger = init_logger("vllm.plugins.flashinfer_vit")

MODULE = "vllm.model_executor.models.interfaces"
# By which Transformers finds both functions.
NAME = "vllm_flashinfer_vit"
# Attribute of an attention module: the layer that attends for it.
_LAYER = "vllm_flashinfer_vit_attention"
_PATCH = "transformers-towers"
# Classes whose attention takes no more than a mask of tokens after which rows end.
_KNOWN = frozenset({"Gemma4VisionAttention"})


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **unread: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, as Transformers' attention functions do.

    Args:
        module: An attention module that is served.
        query: `[B, H, S, D]`, any strides.
        key: `[B, H_kv, S, D]`, any strides.
        value: As `key`.
        attention_mask: What `offsets` returned.
        **unread: The scale, which the module has, too, and what is for training.

    Returns:
        `[B, S, H, D]`, and no weights.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    layer = getattr(module, _LAYER)
    return layer(q, k, v, cu_seqlens=attention_mask, max_seqlen=q.shape[1]), None


def offsets(
    batch_size: int,
    q_length: int,
    attention_mask: torch.Tensor | None = None,
    **unread: Any,
) -> torch.Tensor | None:
    """Return `cu_seqlens` where Transformers' mask functions return a mask.

    Args:
        batch_size: B.
        q_length: S.
        attention_mask: `[B, S] bool`, True for tokens; all padding comes after them.
        **unread: What other kinds of masks need.

    Returns:
        See `row_offsets`; None if there is no padding.
    """
    if attention_mask is None:
        return None
    return row_offsets(attention_mask.sum(-1, dtype=torch.int32), q_length)


def serve(model: torch.nn.Module, off: frozenset[str] = frozenset()) -> None:
    """Have this package serve the Transformers towers among a model's parts.

    Args:
        model: The model.
        off: Names of `OPTIMISATIONS` that are left out.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from vllm.model_executor.layers.attention.mm_encoder_attention import (
        MMEncoderAttention,
    )

    for name, tower in model.named_children():
        if not isinstance(tower, PreTrainedModel):
            continue
        modules = [
            (path, module)
            for path, module in tower.named_modules()
            if type(module).__name__ in _KNOWN
        ]
        if not modules:
            logger.info_once(
                "%s is Transformers' own %s, which FLASHINFER does not serve: it "
                "attends as without vllm-flashinfer-vit.",
                name,
                type(tower).__name__,
            )
            continue
        # A model marks each of its towers, and has the earlier ones by then.
        if any(hasattr(module, _LAYER) for _, module in modules):
            continue
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, offsets)
        for path, module in modules:
            config: Any = module.config
            layer = MMEncoderAttention(
                config.num_attention_heads,
                module.head_dim,
                module.scaling,
                config.num_key_value_heads,
                prefix=f"{name}.{path}",
            )
            setattr(module, _LAYER, layer)
        tower.config._attn_implementation = NAME
        if "gemma4_blocks" not in off:
            _serve_blocks(tower, [getattr(module, _LAYER) for _, module in modules])


def _serve_blocks(tower: Any, attentions: list[torch.nn.Module]) -> None:
    if reason := gemma4.unfit(tower):
        logger.info_once(
            "The blocks of Transformers' own %s run as such, but for attention: %s.",
            type(tower).__name__,
            reason,
        )
        return
    # Of this tower alone, where modules look for it first.
    vars(tower.encoder)["forward"] = gemma4.Encoder(tower.encoder, attentions, offsets)


def _serve_what_is_marked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @contextmanager
    def _mark_tower_model(
        self: Any, vllm_config: Any, modalities: Any, *, targets: Any = None
    ) -> Iterator[None]:
        from vllm_flashinfer_vit.engine.selection import flashinfer_requested

        with original(self, vllm_config, modalities, targets=targets):
            yield
        off = Settings.from_env().disabled_patches
        if flashinfer_requested() and _PATCH not in off:
            serve(self, off)

    return _mark_tower_model


PATCHES = (
    Patch(
        name=_PATCH,
        target=f"{MODULE}:SupportsMultiModal._mark_tower_model",
        why="towers of Transformers attend by PyTorch's SDPA, and making its mask "
        "waits for the device",
        remove_when="vLLM has such towers attend by MMEncoderAttention",
        parameters=("self", "vllm_config", "modalities", "targets"),
        stands_for=(),
        replace=_serve_what_is_marked,
    ),
)

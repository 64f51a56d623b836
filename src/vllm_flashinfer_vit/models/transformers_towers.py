# SPDX-License-Identifier: Apache-2.0
"""Towers that vLLM takes from Transformers as they are: Gemma 4's, and others.

Transformers looks up what attends, and what makes the mask, by a name in the tower's
config. Here both have a name of this package. Gemma 4's tower gets `cu_seqlens` in a
mask's place, made once in a pass without waiting for the device, and `gemma4` runs the
rest of its blocks. Other towers, most of which vLLM's Transformers backend builds, get
the mask of PyTorch's SDPA; where there is one SDPA attends, as without this package.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
# The same with SDPA's mask. By "flash" in it, towers would pack images without a mask.
MASKED = "vllm_encoder_attention"
# Attribute of an attention module: the layer that attends for it.
_LAYER = "vllm_flashinfer_vit_attention"
_PATCH = "transformers-towers"
# Classes whose attention takes no more than a mask of tokens after which rows end.
_KNOWN = frozenset({"Gemma4VisionAttention"})
# What PyTorch's SDPA can be given beside a mask, which no encoder's layer takes.
_ELSE = ("position_bias", "cache")


class _Heads(NamedTuple):
    """What an attention module computes."""

    heads: int
    head_dim: int
    scale: float
    kv_heads: int


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, as Transformers' attention functions do.

    Args:
        module: An attention module of a tower that is served.
        query: `[B, H, S, D]`, any strides.
        key: `[B, H_kv, S, D]`, any strides.
        value: As `key`.
        attention_mask: What `offsets` returned, None, or a mask of PyTorch's SDPA.
        **given: What that function takes, too.

    Returns:
        `[B, S, H, D]`, and no weights.
    """
    if not _is_ours(module, query, key, attention_mask, given):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, **given
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    layer = getattr(module, _LAYER)
    return layer(q, k, v, cu_seqlens=attention_mask, max_seqlen=q.shape[1]), None


def _is_ours(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    given: dict[str, Any],
) -> bool:
    """Whether a module's layer computes what it is asked for; say so once if not."""
    layer: Any = getattr(module, _LAYER, None)
    if layer is None:
        return False
    if attention_mask is not None:
        # A mask of PyTorch's SDPA has four dimensions, and is of any form.
        return attention_mask.dim() == 1
    refused = _refused(layer, query, key, given)
    if refused and not torch.compiler.is_compiling():
        logger.info_once(
            "%s attends by PyTorch's SDPA, as without vllm-flashinfer-vit: %s.",
            type(module).__name__,
            refused,
        )
    return refused is None


def _refused(
    layer: Any, query: torch.Tensor, key: torch.Tensor, given: dict[str, Any]
) -> str | None:
    """Return why a layer does not compute what is asked for, None if it does."""
    if given.get("is_causal"):
        return "it is causal"
    if named := [name for name in _ELSE if given.get(name) is not None]:
        return f"it has a {' and a '.join(named)}"
    # Over ranks a module may have a part of its heads.
    sizes = (query.shape[1], key.shape[1], query.shape[3], key.shape[2])
    wanted = (layer.num_heads, layer.num_kv_heads, layer.head_size, query.shape[2])
    if sizes != wanted:
        return f"it has other sizes than its layer, {sizes} and not {wanted}"
    if (scale := given.get("scaling")) not in (None, layer.scale):
        return f"it scales by {scale} and not by {layer.scale}"
    if query.dtype != layer.dtype:
        return f"its activations are {query.dtype} and not {layer.dtype}"
    return None


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


def serve(
    model: torch.nn.Module,
    off: frozenset[str] = frozenset(),
    targets: type | tuple[type, ...] | None = None,
) -> None:
    """Have this package serve the Transformers towers among a model's parts.

    Args:
        model: The model.
        off: Names of `OPTIMISATIONS` that are left out.
        targets: The towers' classes, anywhere in the model: vLLM's Transformers backend
            names them. None: they are the model's direct parts.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    from vllm.model_executor.layers.attention.mm_encoder_attention import (
        MMEncoderAttention,
    )

    for name, tower in _towers(model, targets):
        modules = {path: module for path, module in tower.named_modules() if path}
        # A model marks each of its towers, and has the earlier ones by then.
        if any(hasattr(module, _LAYER) for module in modules.values()):
            continue
        heads = {path: found for path, m in modules.items() if (found := _heads_of(m))}
        layers = {
            path: layer
            for path, found in heads.items()
            if (layer := _layer(found, f"{name}.{path}")) is not None
        }
        if not layers:
            # Kimi-VL's is vLLM's own, and derives from Transformers' base class.
            if not any(isinstance(m, MMEncoderAttention) for m in modules.values()):
                logger.info_once(
                    "%s is a %s, which FLASHINFER does not serve: it attends as "
                    "without vllm-flashinfer-vit.",
                    name,
                    type(tower).__name__,
                )
            continue
        for path, layer in layers.items():
            setattr(modules[path], _LAYER, layer)
        # Offsets in a mask's place are for layers alone. vLLM's backend may share a
        # module's heads out over ranks, and puts its own layers into blocks.
        known = [path for path, m in modules.items() if type(m).__name__ in _KNOWN]
        is_known = targets is None and bool(known) and layers.keys() >= set(known)
        AttentionInterface.register(NAME, attend)
        AttentionInterface.register(MASKED, attend)
        AttentionMaskInterface.register(NAME, offsets)
        AttentionMaskInterface.register(MASKED, sdpa_mask)
        # Of a tower alone, and not of a whole model's parts: it is handed on to those.
        for path in layers:
            modules[path].config._attn_implementation = NAME if is_known else MASKED
        if is_known and "gemma4_blocks" not in off:
            _serve_blocks(tower, list(layers.values()))


def _towers(
    model: torch.nn.Module, targets: type | tuple[type, ...] | None
) -> Iterator[tuple[str, Any]]:
    from transformers import PreTrainedModel

    found = model.named_children() if targets is None else model.named_modules()
    for name, tower in found:
        is_meant = targets is None or isinstance(tower, targets)
        if is_meant and isinstance(tower, PreTrainedModel):
            yield name, tower


def _heads_of(module: torch.nn.Module) -> _Heads | None:
    """Return what a module attends with, None if a layer cannot attend for it."""
    # By the name that Transformers' modules look attention up in.
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
        return None
    config: Any = getattr(module, "config", None)
    # Transformers chooses another one where SDPA would not be right.
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return None
    if getattr(module, "is_causal", True):
        return None
    places = (module, "num_heads"), (config, "num_attention_heads")
    heads = next((n for at, name in places if (n := getattr(at, name, None))), None)
    head_dim = getattr(module, "head_dim", None)
    scale = getattr(module, "scaling", getattr(module, "scale", None))
    if not (heads and head_dim) or not isinstance(scale, float):
        return None
    groups = getattr(module, "num_key_value_groups", 1)
    return _Heads(heads, head_dim, scale, heads // groups)


def _layer(heads: _Heads, prefix: str) -> torch.nn.Module | None:
    """Return a layer that attends, None where vLLM's own would do it.

    Args:
        heads: What it computes.
        prefix: Its name.

    Raises:
        NotServedError: As for any layer, see `FlashInferViTAttention`.
    """
    from vllm.model_executor.layers.attention.mm_encoder_attention import (
        MMEncoderAttention,
    )

    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

    layer = MMEncoderAttention(*heads, prefix=prefix)
    return layer if isinstance(layer, FlashInferViTAttention) else None


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
        from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention
        from vllm_flashinfer_vit.engine.selection import flashinfer_requested

        with original(self, vllm_config, modalities, targets=targets):
            yield
        settings = Settings.from_env()
        off = settings.disabled_patches
        if not flashinfer_requested():
            if settings.fix_graph_padding:
                # Gemma 4's tower has no layer of vLLM's that would ask for it.
                FlashInferViTAttention.hooks.graph_patches()
        elif _PATCH not in off:
            serve(self, off, targets)

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

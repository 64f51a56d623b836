# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoint folders of models other than Qwen's, without weights.

As those of make_checkpoint.py: the vision tower has its published dimensions, the
language model after it is small, and the tokenizer knows bytes and special tokens only.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from make_checkpoint import byte_tokenizer
from vllm_flashinfer_vit.towers.resolve import resolve
from vllm_flashinfer_vit.towers.whole import ModelSpec
from vllm_flashinfer_vit.towers.whole_models import WHOLE_MODELS

_PADDING, _START, _END = "<pad>", "<bos>", "<eos>"
# Of every language model; heads of 128 unless a model has its own.
SMALL = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}


@dataclass(frozen=True)
class OtherModel:
    """A model whose folder can be written.

    Attributes:
        architecture: The model's class in vLLM.
        image: What stands for an image in a prompt.
        video: What stands for a video; empty if none is asked.
        named: The tokenizer's attributes that are special tokens.
        special_tokens: Other special tokens.
        config: Takes ids by special token and the number of blocks or None, and returns
            the model's config.
        processor: Takes the tokenizer, and returns what `save_pretrained` writes beside
            the config: the model's processor, or what vLLM makes one of.
        modality: What vLLM calls an image: `image`, or `vision_chunk`, which is an
            image or frames of a video.
    """

    architecture: str
    image: str
    video: str
    named: Mapping[str, str]
    special_tokens: tuple[str, ...]
    config: Callable[[Mapping[str, int], int | None], transformers.PretrainedConfig]
    processor: Callable[[transformers.PreTrainedTokenizerFast], Any]
    modality: str = "image"


def make_other_checkpoint(
    folder: Path, model: OtherModel, depth: int | None = None
) -> None:
    """Write config, tokenizer and processor of a model.

    The process knows the config's class from then on.

    Args:
        folder: Made if it does not exist.
        model: One of `OTHER_MODELS` of engine_models.py.
        depth: Blocks of the vision tower; None for all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special = (_PADDING, _START, _END, *model.named.values(), *model.special_tokens)
    tokenizer = byte_tokenizer(
        special,
        bos_token=_START,
        eos_token=_END,
        pad_token=_PADDING,
        extra_special_tokens=dict(model.named),
    )
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    config = model.config(ids, depth)
    config.architectures = [model.architecture]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    if config.model_type not in transformers.CONFIG_MAPPING:
        # Otherwise a published model's is code of its repository.
        transformers.AutoConfig.register(config.model_type, type(config))
    tokenizer.save_pretrained(folder)
    model.processor(tokenizer).save_pretrained(folder)
    generation = {
        "do_sample": False,
        "eos_token_id": ids[_END],
        "pad_token_id": ids[_PADDING],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))


def vision(model: str, depth: int | None) -> Mapping[str, Any]:
    """Return the dimensions of a tower, or of its first blocks.

    Args:
        model: A name in `WHOLE_MODELS`.
        depth: How many blocks; None for all.
    """
    whole = WHOLE_MODELS[model]
    return {**whole.vision, whole.depth: depth or whole.vision[whole.depth]}


def image_processor(model: str) -> Any:
    """Return the image processor of a model in `WHOLE_MODELS`."""
    spec = resolve(model, random_weights=True)
    assert isinstance(spec, ModelSpec)
    return spec.image_processor()

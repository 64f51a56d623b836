# SPDX-License-Identifier: Apache-2.0
"""Writes a Qwen-VL checkpoint folder without weights, for engines with dummy weights.

The vision tower has the true dimensions of a published model, the language model after
it is small, and the tokenizer knows bytes and the special tokens only. Or the language
model has its true dimensions, too, and the tokenizer as many tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from vllm_flashinfer_vit.towers.spec import NAMED_MODELS

_SMALL = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
# From the published config.json of each model.
_QWEN2_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
_QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 5e6,
    "tie_word_embeddings": False,
}
TRUE_LLMS = {"qwen2_vl": _QWEN2_7B, "qwen2_5_vl": _QWEN2_7B, "qwen3_vl": _QWEN3_8B}
# vLLM puts a placeholder of its own in front of the text for each image.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
IMAGE_TOKEN, VIDEO_TOKEN = "<|image_pad|>", "<|video_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
TURN_START, TURN_END, PADDING = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (
    PADDING,
    TURN_START,
    TURN_END,
    VISION_START,
    VISION_END,
    "<|vision_pad|>",
    IMAGE_TOKEN,
    VIDEO_TOKEN,
)
STEMS = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}


def make_checkpoint(folder: Path, model: str, true_llm: bool = False) -> None:
    """Write config, tokenizer and processor of a model.

    Args:
        folder: Made if it does not exist.
        model: A name in `NAMED_MODELS`.
        true_llm: Whether the language model has its true dimensions.
    """
    family, vision_config = NAMED_MODELS[model]
    folder.mkdir(parents=True, exist_ok=True)
    llm = TRUE_LLMS[family] if true_llm else _SMALL
    tokenizer = _tokenizer(llm["vocab_size"] if true_llm else 0)
    config = _config(family, dict(vision_config), tokenizer, llm)
    config.architectures = [f"{STEMS[family]}ForConditionalGeneration"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    _processor(family, vision_config["patch_size"], tokenizer).save_pretrained(folder)
    generation = {
        "do_sample": False,
        "eos_token_id": config.text_config.eos_token_id,
        "pad_token_id": config.text_config.bos_token_id,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))


def byte_tokenizer(
    special_tokens: Sequence[str],
    size: int = 0,
    cls: type[transformers.PreTrainedTokenizerFast] = (
        transformers.PreTrainedTokenizerFast
    ),
    **fields: Any,
) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and special tokens.

    Args:
        special_tokens: What is one token each.
        size: At least so many tokens: a model's answer must have text.
        cls: The tokenizer's class.
        **fields: More of its constructor's arguments.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    named = len(letters) + len(special_tokens)
    letters += [f"token{i}" for i in range(size - named)]
    bare = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    bare.add_special_tokens([AddedToken(t, special=True) for t in special_tokens])
    return cls(tokenizer_object=bare, **fields)


def _tokenizer(size: int) -> transformers.PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(
        SPECIAL_TOKENS,
        size,
        transformers.Qwen2TokenizerFast,
        bos_token=None,
        eos_token=TURN_END,
        pad_token=PADDING,
        unk_token=None,
    )
    tokenizer.image_token, tokenizer.video_token = IMAGE_TOKEN, VIDEO_TOKEN
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _config(
    family: str,
    vision: dict[str, Any],
    tokenizer: transformers.PreTrainedTokenizerFast,
    llm: dict[str, Any],
) -> transformers.PretrainedConfig:
    # Qwen2-VL calls the width that it hands to the language model `hidden_size`.
    width = "hidden_size" if family == "qwen2_vl" else "out_hidden_size"
    vision[width] = llm["hidden_size"]
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": llm["rope_theta"]}
    if family == "qwen3_vl":
        rope |= {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
    else:
        rope |= {"mrope_section": [16, 24, 24], "type": "mrope"}
    text = {
        **llm,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_scaling": rope,
        "bos_token_id": ids[PADDING],
        "eos_token_id": ids[TURN_END],
    }
    return getattr(transformers, f"{STEMS[family]}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[IMAGE_TOKEN],
        video_token_id=ids[VIDEO_TOKEN],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=llm["tie_word_embeddings"],
    )


def _processor(
    family: str, patch_size: int, tokenizer: transformers.PreTrainedTokenizerFast
) -> transformers.ProcessorMixin:
    is_qwen3 = family == "qwen3_vl"
    pixels = {
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    videos = "Qwen3VL" if is_qwen3 else "Qwen2VL"
    # In pixels, from each model's preprocessor_config.json.
    sizes = (256 * 256, 4096 * 4096) if is_qwen3 else (56 * 56, 3584 * 3584)
    return getattr(transformers, f"{STEMS[family]}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(
            size=dict(zip(("shortest_edge", "longest_edge"), sizes, strict=True)),
            **pixels,
        ),
        tokenizer=tokenizer,
        video_processor=getattr(transformers, f"{videos}VideoProcessor")(**pixels),
    )

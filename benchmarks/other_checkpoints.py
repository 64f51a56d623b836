# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoint folders of models other than Qwen's, without weights.

As those of make_checkpoint.py: the vision tower has its published dimensions, the
language model after it is small, and the tokenizer knows bytes and special tokens only.
"""

import json
from pathlib import Path

from make_checkpoint import byte_tokenizer
from other_models import OTHER_MODELS

_PADDING, _START, _END = "<pad>", "<bos>", "<eos>"


def make_other_checkpoint(folder: Path, model: str, depth: int | None = None) -> None:
    """Write config, tokenizer and processor of a model.

    Args:
        folder: Made if it does not exist.
        model: A name in `OTHER_MODELS`.
        depth: Blocks of the vision tower; None for all.
    """
    this = OTHER_MODELS[model]
    folder.mkdir(parents=True, exist_ok=True)
    special = (_PADDING, _START, _END, *this.named.values(), *this.special_tokens)
    tokenizer = byte_tokenizer(
        special,
        bos_token=_START,
        eos_token=_END,
        pad_token=_PADDING,
        extra_special_tokens=dict(this.named),
    )
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    config = this.config(ids, depth)
    config.architectures = [this.architecture]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    this.processor(tokenizer).save_pretrained(folder)
    generation = {
        "do_sample": False,
        "eos_token_id": ids[_END],
        "pad_token_id": ids[_PADDING],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))

# SPDX-License-Identifier: Apache-2.0
"""Writes a Qwen-VL checkpoint whose answers depend on the images.

The vision tower has its true size, the language model is small, as in
make_checkpoint.py. Weights are random, and such that the last token sees what the
images show: with vLLM's dummy weights every image has the same answer.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from make_checkpoint import make_checkpoint
from soak_inputs import LARGEST, SMALLEST

# Logits then have a standard deviation of about 1.5, as a trained model's.
_EMBEDDING_STD = 0.05
# Twice the usual width: attention is peaked, as after training.
_QK_STD, _QK = 0.04, (".qkv.", ".q_proj.", ".k_proj.")
_STD = 0.02


def write_checkpoint(folder: Path, model: str, patch: int, seed: int) -> None:
    """Write a checkpoint folder that vLLM loads with its own loader.

    Args:
        folder: Made if it does not exist.
        model: A name in `NAMED_MODELS`.
        patch: Side of the model's patches in pixels.
        seed: With a weight's name, decides its values.
    """
    make_checkpoint(folder, model)
    _keep_sizes(folder, patch)
    write_weights(folder, seed)


def _keep_sizes(folder: Path, patch: int) -> None:
    """Let the processor leave every size as it is that requests have."""
    size = {
        "shortest_edge": (SMALLEST * patch) ** 2,
        "longest_edge": (LARGEST * patch) ** 2,
    }
    path = folder / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["size"] = size
    path.write_text(json.dumps(config, indent=2))


def write_weights(folder: Path, seed: int) -> None:
    """Write weights of the model that a folder's `config.json` describes.

    Args:
        folder: A checkpoint folder without weights.
        seed: See `write_checkpoint`.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        shell = getattr(transformers, config.architectures[0])(config)
    weights = {
        name: _values(name, tensor, seed)
        for name, tensor in shell.state_dict().items()
        # It is the embedding.
        if not name.startswith("lm_head.")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _values(name: str, like: Any, seed: int) -> torch.Tensor:
    if like.dim() == 1 and not name.endswith("bias"):
        return torch.ones(like.shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    if "embed_tokens" in name:
        std = _EMBEDDING_STD
    else:
        std = _QK_STD if any(part in name for part in _QK) else _STD
    values = torch.empty(like.shape, dtype=torch.float32)
    return values.normal_(std=std, generator=generator).bfloat16()

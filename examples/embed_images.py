# SPDX-License-Identifier: Apache-2.0
"""Encodes images in one batch with a model's vision tower, without an engine.

    python examples/embed_images.py examples/images --model CHECKPOINT_FOLDER
    python examples/embed_images.py examples/images --random-weights --depth 2

It runs on a GPU if there is one, else on the CPU. Random weights need no checkpoint:
the embeddings then mean nothing. `vllm-flashinfer-vit encode` does more: it compares
backends, and saves the embeddings.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_flashinfer_vit.commands.images import (
    check_any,
    image_files,
    image_processor,
    read_patches,
)
from vllm_flashinfer_vit.towers.model_tower import build
from vllm_flashinfer_vit.towers.resolve import resolve
from vllm_flashinfer_vit.towers.spec import TowerError, TowerSpec


def embed(
    spec: TowerSpec, images: Sequence[Path], max_pixels: int | None
) -> dict[str, torch.Tensor]:
    """Return the embeddings of images by name, each `[tokens, hidden]`.

    Args:
        spec: The tower.
        images: Image files, and folders of them.
        max_pixels: Larger images are shrunk to it; None: the model's own limit.
    """
    files = image_files(images)
    on_gpu = torch.cuda.is_available()
    processor = image_processor(spec, max_pixels)
    tower = build(
        spec,
        backend="FLASHINFER",
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        device="cuda" if on_gpu else "cpu",
        image_processor=processor,
    )
    left_out: list[str] = []
    read = [
        read_patches(file, processor, tower.processor_kwargs, left_out)
        for file in files
    ]
    patches = [one for one in read if one is not None]
    for line in left_out:
        print(line, file=sys.stderr)
    check_any(patches, left_out)
    # As an engine does: images lie one after another, and none attends to another.
    pixels = torch.cat([one.pixel_values for one in patches])
    embeddings = tower.encode(pixels, [one.grid for one in patches])
    sizes = [len(one.pixel_values) // spec.merge_size**2 for one in patches]
    parts = embeddings.split(sizes)
    return {one.name: part for one, part in zip(patches, parts, strict=True)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what the tower makes of each image."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--model", default="Qwen/Qwen3-VL-8B-Instruct")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--depth", type=int, help="build only the first blocks")
    parser.add_argument("--max-pixels", type=int, help="shrink larger images")
    args = parser.parse_args(arguments)
    try:
        spec = resolve(args.model, random_weights=args.random_weights, depth=args.depth)
        if not isinstance(spec, TowerSpec):
            parser.error(
                f"the tower of {spec.model} takes other arguments than patches and "
                "grids; use `vllm-flashinfer-vit encode`"
            )
        embeddings = embed(spec, args.images, args.max_pixels)
    # Of images and of checkpoints.
    except TowerError as error:
        parser.error(str(error))
    for name, embedding in embeddings.items():
        tokens, hidden = embedding.shape
        print(f"{name}: {tokens} tokens of {hidden} values")


if __name__ == "__main__":
    main()

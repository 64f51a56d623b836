# SPDX-License-Identifier: Apache-2.0
"""Asks a model about images, with vLLM's Python interface. Needs a GPU.

    python examples/offline_inference.py examples/images/coffee.jpg

With vLLM 0.25.1 to 0.27.1 set VLLM_USE_V2_MODEL_RUNNER=0: the newer runner of these
releases has no encoder CUDA graphs.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image


def engine_arguments(model: str) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`."""
    return {
        "model": model,
        "max_model_len": 16384,
        # Switches vllm-flashinfer-vit on; for FP8 attention add
        # "mm_encoder_attn_dtype": "fp8".
        "mm_encoder_attn_backend": "FLASHINFER",
        "compilation_config": {"cudagraph_mm_encoder": True},
    }


def conversation(image: Path, question: str) -> list[dict[str, Any]]:
    """Return a question about an image file, as `LLM.chat` takes it."""
    opened = Image.open(image).convert("RGB")
    content = [
        {"type": "image_pil", "image_pil": opened},
        {"type": "text", "text": question},
    ]
    return [{"role": "user", "content": content}]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print an answer for each image."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--model", default="Qwen/Qwen3-VL-8B-Instruct")
    parser.add_argument("--question", default="What is in this image?")
    args = parser.parse_args(arguments)

    from vllm import LLM, SamplingParams

    conversations = [conversation(image, args.question) for image in args.images]
    llm = LLM(**engine_arguments(args.model))
    answers = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=128))
    for image, answer in zip(args.images, answers, strict=True):
        print(f"{image}: {answer.outputs[0].text}")


# The engine starts processes that import this file again.
if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The checkpoint of the soak: loaders take it, and answers depend on the images."""

import io
import json
import random
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from _benchmarks import BENCHMARKS  # noqa: F401
from PIL import Image

from make_checkpoint import CHAT_TEMPLATE, VISION_END, VISION_START
from soak_checkpoint import write_checkpoint, write_weights
from soak_client import MAX_DIFFERENCE, difference
from soak_inputs import LARGEST, TOP_LOGPROBS, _jpeg
from vllm_flashinfer_vit.towers.spec import NAMED_MODELS, resolve_spec
from vllm_flashinfer_vit.towers.tower import build_tower

DEPTH = 2


MODELS = ["Qwen2-VL-7B", "Qwen2.5-VL-7B", "Qwen3-VL-8B"]


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model, of a tower of few blocks."""
    model = f"Qwen/{request.param}-Instruct"
    folder = tmp_path_factory.mktemp("checkpoint")
    with mock.patch("soak_checkpoint.write_weights"):
        write_checkpoint(folder, model, NAMED_MODELS[model][1]["patch_size"], seed=0)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"]["depth"] = DEPTH
    for name in ("deepstack_visual_indexes", "fullatt_block_indexes"):
        if name in config["vision_config"]:
            config["vision_config"][name] = [DEPTH - 1]
    path.write_text(json.dumps(config))
    write_weights(folder, seed=0)
    return folder


def test_vllm_loads_the_tower(folder: Path) -> None:
    spec = resolve_spec(str(folder))
    tower = build_tower(
        spec, backend="TORCH_SDPA", dtype=torch.float32, device="cpu", plugin=False
    )
    weights = dict(tower.visual.named_parameters())
    qkv = weights[f"blocks.{DEPTH - 1}.attn.qkv.weight"]
    assert qkv.std().item() == pytest.approx(0.04, rel=0.02)


def image(seed: int, patch: int) -> Image.Image:
    data = _jpeg(random.Random(seed), (8 * patch, 6 * patch))
    return Image.open(io.BytesIO(data))


def test_answers_depend_on_the_images_and_little_on_the_dtype(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    patch = config.vision_config.patch_size
    model_cls = getattr(transformers, config.architectures[0])
    model, info = model_cls.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    processor = transformers.AutoProcessor.from_pretrained(folder)
    assert processor.image_processor.size["longest_edge"] == (LARGEST * patch) ** 2
    placeholder = f"{VISION_START}{processor.image_token}{VISION_END}"
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{placeholder}What is this?"}],
        chat_template=CHAT_TEMPLATE,
        tokenize=False,
    )

    def answer(seed: int, dtype: torch.dtype) -> dict[str, float]:
        inputs = processor(text=text, images=image(seed, patch), return_tensors="pt")
        inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
        with torch.no_grad():
            logits = model.to(dtype)(**inputs).logits[0, -1].float()
        top = logits.log_softmax(-1).topk(TOP_LOGPROBS)
        return dict(
            zip(map(str, top.indices.tolist()), top.values.tolist(), strict=True)
        )

    right = answer(0, torch.float32)
    assert difference(answer(1, torch.float32), right) > MAX_DIFFERENCE
    assert difference(answer(0, torch.bfloat16), right) < MAX_DIFFERENCE / 2

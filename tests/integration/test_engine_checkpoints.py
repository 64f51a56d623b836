# SPDX-License-Identifier: Apache-2.0
"""The folders that engine_check.py starts engines from, as far as a CPU can tell.

Processors, their dummy inputs and the check's own prompts run as in an engine; vLLM's
models are built with two blocks, and embed the image prompt with stock's attention and
with this package.
"""

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from _towers import cpu_only, small_tower
from packaging.version import Version

from cases import relative_error

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import engine_models  # noqa: E402
from engine_models import OTHER_MODELS  # noqa: E402
from engines import fill_tower  # noqa: E402
from other_checkpoints import make_other_checkpoint  # noqa: E402

# vLLM 0.25.1 fails with them and the Transformers that it is tested with.
NEWER = (
    "zai-org/GLM-OCR",
    "zai-org/GLM-4.1V-9B-Thinking",
    "mistral-community/pixtral-12b",
    "google/gemma-3-4b-it",
    "moonshotai/Kimi-K2.5",
    "llava-hf/llava-1.5-7b-hf",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
)
# Of the image prompt: what 448 rows and 672 columns of pixels make.
TOKENS = {
    # Rows and columns of 28 pixels.
    "zai-org/GLM-4.1V-9B-Thinking": 16 * 24,
    "zai-org/GLM-OCR": 16 * 24,
    "PaddlePaddle/PaddleOCR-VL": 16 * 24,
    "moonshotai/Kimi-K2.5": 16 * 24,
    "rednote-hilab/dots.ocr": 16 * 24,
    # Patches of 16 pixels.
    "mistral-community/pixtral-12b": 28 * 42,
    # Of any image.
    "google/gemma-3-4b-it": 256,
    # Squares of 48 pixels, at most 280: 13 rows and 20 columns.
    "google/gemma-4-31B-it": 13 * 20,
    "llava-hf/llava-1.5-7b-hf": 24 * 24,
    # Tiles of 144 tokens: two rows, two columns and the whole image.
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 144 * (2 * 2 + 1),
    # Tiles of 256 tokens: two rows, three columns and the whole image.
    "OpenGVLab/InternVL3-8B": 256 * (2 * 3 + 1),
}
# A packed tower and a dense one; the others take half a minute each.
USUAL = ("PaddlePaddle/PaddleOCR-VL", "google/gemma-3-4b-it")
NEEDS_NEWER = pytest.mark.skipif(
    Version(vllm.__version__) < Version("0.33"),
    reason="does not run with this vLLM and Transformers",
)


def _model(name: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(name, marks=[*marks, *([NEEDS_NEWER] if name in NEWER else [])])


MODELS = [_model(name) for name in OTHER_MODELS]
FEW_FIRST = [
    _model(name) if name in USUAL else _model(name, pytest.mark.extended)
    for name in OTHER_MODELS
]


@functools.cache
def checkpoint(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="vit-checkpoint-"))
    make_other_checkpoint(folder, OTHER_MODELS[name], depth=2)
    return folder


def engine_config(name: str, backend: str) -> Any:
    """Return an engine's configuration, with the check's arguments."""
    from vllm.engine.arg_utils import EngineArgs

    # It makes the process one of vLLM's, on the CPU and with this package.
    small_tower("qwen2_vl")
    return EngineArgs(
        model=str(checkpoint(name)),
        load_format="dummy",
        dtype="float32",
        max_model_len=8192,
        max_num_seqs=4,
        limit_mm_per_prompt={
            "image": 3,
            "video": int("video" in engine_models.prompts(name)),
        },
        mm_encoder_attn_backend=backend,
        kv_cache_memory_bytes=2**28,
        enforce_eager=True,
        seed=0,
    ).create_engine_config()


def processed(config: Any, prompt: dict[str, Any]) -> Any:
    """Return what an engine makes of a prompt."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.tokenizers import cached_tokenizer_from_config

    processor = MULTIMODAL_REGISTRY.create_processor(config.model_config)
    tokens = cached_tokenizer_from_config(config.model_config).encode(prompt["prompt"])
    items = processor.info.parse_mm_data(prompt["multi_modal_data"])
    return processor(tokens, items)


@pytest.mark.parametrize("name", FEW_FIRST)
def test_an_engine_profiles_and_takes_the_prompts(name: str) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    config = engine_config(name, "FLASHINFER")
    assert config.model_config.architecture == OTHER_MODELS[name].architecture
    budget = MultiModalBudget(config, MULTIMODAL_REGISTRY)
    asked = engine_models.prompts(name)
    modalities = {OTHER_MODELS[name].modality, *(set(asked) & {"video"})}
    assert set(budget.mm_max_toks_per_item) == modalities
    for prompt in asked.values():
        found = processed(config, prompt)
        ((modality, given),) = prompt["multi_modal_data"].items()
        count = len(given) if isinstance(given, list) else 1
        placeholders = found["mm_placeholders"][modality]
        assert len(placeholders) == count
        assert len(found["prompt_token_ids"]) < 8192 - 8
        vocabulary = config.model_config.get_vocab_size()
        assert max(found["prompt_token_ids"]) < vocabulary
        if prompt is asked["image"]:
            assert placeholders[0].get_num_embeds() == TOKENS[name]


def embeddings(name: str, backend: str) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return the image prompt's, those without attention, and facts of the tower."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    from vllm_flashinfer_vit.towers.config import current_config

    config = engine_config(name, backend)
    modality = OTHER_MODELS[name].modality
    images = processed(config, engine_models.prompts(name)["image"])["mm_kwargs"]
    ((_, _, inputs),) = group_and_batch_mm_kwargs(
        [(modality, image) for image in images[modality]], device=torch.device("cpu")
    )
    with current_config(config), torch.inference_mode():
        model: Any = get_model_loader(config.load_config).load_model(
            vllm_config=config, model_config=config.model_config
        )
        # An engine profiles before the check fills in weights.
        model.embed_multimodal(**inputs)
        fill_tower(model)
        engine_models.record_inputs(model)
        model.embed_multimodal(**inputs)
        return (
            engine_models.embed(model),
            engine_models.embed_without_attention(model),
            engine_models.describe_tower(model),
        )


@cpu_only
@pytest.mark.extended
@pytest.mark.parametrize("name", MODELS)
def test_both_engines_embed_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gemma-4" in name and Version(vllm.__version__) < Version("0.33"):
        pytest.skip("this vLLM's language model wants a compiled operator")
    # Gemma 4 sizes its batches by it.
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (2**36, 2**36))
    expected, blind, stock = embeddings(name, "TORCH_SDPA")
    got, our_blind, ours = embeddings(name, "FLASHINFER")
    assert relative_error(got, expected) < 1e-5
    # Attention matters, and is left out in both in the same way.
    assert relative_error(blind, expected) > 0.2
    assert relative_error(our_blind, blind) < 1e-5
    assert ours["layer_class"] == "FlashInferViTAttention"
    assert ours["kernels"]
    assert stock["layer_class"] in ("MMEncoderAttention", "")
    assert stock["kernels"] == ""

# SPDX-License-Identifier: Apache-2.0
"""Towers of vLLM's Transformers backend: their attention runs by this package's layer.

The backend names a tower's class; here a part of a model stands for its whole.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from _blocks import log_of
from _models import OpCount, engine, noise
from _towers import DEVICE, cpu_only
from torch import nn

from cases import relative_error
from vllm_flashinfer_vit.engine import selection
from vllm_flashinfer_vit.engine.selection import NotServedError
from vllm_flashinfer_vit.models import transformers_towers
from vllm_flashinfer_vit.settings import ENV_STRICT
from vllm_flashinfer_vit.towers.tower import Tower

TOLERANCE = 1e-5
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}

pytestmark = cpu_only


class Case(NamedTuple):
    """A tower, and what it is asked.

    Attributes:
        name: Of its class, and of its configuration's.
        fields: Of its configuration.
        ask: Calls it.
        calls: How often this package's layers attend in a call.
    """

    name: tuple[str, str]
    fields: dict[str, Any]
    ask: Callable[[Any], Any]
    calls: int


def pixels(images: int, height: int = 56, width: int = 56) -> torch.Tensor:
    return noise(images, 3 * height, width).view(images, 3, height, width)


def two_images(tower: Any) -> torch.Tensor:
    return tower(pixels(2)).last_hidden_state


def half_an_image() -> torch.Tensor:
    """Return which of 4 x 4 patches are of an image that is half as wide."""
    return (torch.arange(4) < 2).repeat(1, 4, 1)


GEMMA = {
    "hidden_size": 144,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 72,
    "patch_size": 4,
    "position_embedding_size": 64,
    "pooling_kernel_size": 3,
}


def gemma(tokens: tuple[int, int]) -> Callable[[Any], Any]:
    """Ask Gemma 4's tower for two images, 3 patches wide, of so many patches of 18."""
    place = torch.arange(18)
    at = torch.stack([place % 3, place // 3], -1).repeat(2, 1, 1)
    for image, count in enumerate(tokens):
        at[image, count:] = -1
    patches = noise(2, 18, 48).sigmoid()
    return lambda tower: tower(patches, at).last_hidden_state


QWEN = {
    "depth": 2,
    "embed_dim": 64,
    "num_heads": 2,
    "hidden_size": 64,
    "patch_size": 4,
    "mlp_ratio": 2,
}
CASES = {
    "SigLIP": Case(
        ("SiglipVisionModel", "SiglipVisionConfig"),
        SMALL,
        two_images,
        2,
    ),
    "CLIP": Case(
        ("CLIPVisionModel", "CLIPVisionConfig"),
        SMALL,
        two_images,
        2,
    ),
    "InternVL": Case(
        ("InternVLVisionModel", "InternVLVisionConfig"),
        {**SMALL, "image_size": (56, 56), "patch_size": (14, 14)},
        two_images,
        2,
    ),
    "Idefics3, whole images": Case(
        ("Idefics3VisionTransformer", "Idefics3VisionConfig"),
        SMALL,
        two_images,
        2,
    ),
    # A mask of patches, and one of images that are packed: by PyTorch's SDPA.
    "Idefics3, padded": Case(
        ("Idefics3VisionTransformer", "Idefics3VisionConfig"),
        SMALL,
        lambda tower: tower(pixels(1), half_an_image()).last_hidden_state[
            half_an_image().flatten(1)
        ],
        0,
    ),
    "Pixtral": Case(
        ("PixtralVisionModel", "PixtralVisionConfig"),
        {**SMALL, "head_dim": 32},
        lambda tower: (
            tower(pixels(2), image_sizes=[(56, 56), (28, 42)]).last_hidden_state
        ),
        0,
    ),
    "Gemma 4": Case(
        ("Gemma4VisionModel", "Gemma4VisionConfig"), GEMMA, gemma((18, 18)), 2
    ),
    "Gemma 4, padded": Case(
        ("Gemma4VisionModel", "Gemma4VisionConfig"), GEMMA, gemma((18, 9)), 0
    ),
    # Transformers cuts a packed batch into its images.
    "Qwen2-VL": Case(
        ("Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig"),
        QWEN,
        lambda tower: (
            tower(
                noise(40, 96), grid_thw=torch.tensor([[1, 4, 4], [1, 6, 4]])
            ).last_hidden_state
        ),
        4,
    ),
}


def build(case: Case, tower: Tower) -> Any:
    """Build a model that holds the tower somewhere, and fill its weights."""
    import transformers
    from vllm.model_executor.models.interfaces import SupportsMultiModal
    from vllm.utils.torch_utils import set_default_torch_dtype

    chosen, config = (
        getattr(transformers, name, None) or _inner(name) for name in case.name
    )

    class Model(nn.Module, SupportsMultiModal):
        def __init__(self) -> None:
            super().__init__()
            marked = self._mark_tower_model(
                tower.vllm_config, {"image"}, targets=chosen
            )
            with marked:
                inner = nn.Module()
                inner.vision = chosen._from_config(config(**case.fields))
                self.model = inner

    with tower.running(), set_default_torch_dtype(tower.dtype), tower.device:
        built = Model()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in built.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in name and name.endswith("weight")
        parameter.data.copy_(1 + 0.1 * drawn if is_norm else 0.1 * drawn)
    return built.model.vision.eval()


def _inner(name: str) -> Any:
    """Return a class that Transformers does not show at its top."""
    from transformers.models.idefics3 import modeling_idefics3
    from transformers.models.qwen2_vl import configuration_qwen2_vl, modeling_qwen2_vl

    places = modeling_idefics3, modeling_qwen2_vl, configuration_qwen2_vl
    return next(getattr(at, name) for at in places if hasattr(at, name))


@pytest.fixture(scope="module")
def flashinfer() -> Iterator[Tower]:
    yield engine("FLASHINFER", device=DEVICE)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_tower_of_transformers(name: str, flashinfer: Tower) -> None:
    case = CASES[name]
    stock = build(case, engine("TORCH_SDPA"))
    ours = build(case, flashinfer)
    with torch.inference_mode():
        expected = case.ask(stock)
        with OpCount() as count:
            found = case.ask(ours)
    assert relative_error(found, expected) < TOLERANCE
    assert count.calls == case.calls
    assert list(ours.state_dict()) == list(stock.state_dict())


@pytest.mark.parametrize("is_strict", [False, True])
def test_heads_that_no_kernel_takes(
    is_strict: bool, flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NotServedError("no kernel takes head dim 32")

    lines = log_of(transformers_towers, monkeypatch)
    # Some kernel of a CPU takes every head dim.
    monkeypatch.setattr(selection, "resolve", refuse)
    if is_strict:
        monkeypatch.setenv(ENV_STRICT, "1")
        with pytest.raises(NotServedError, match="no kernel takes head dim 32"):
            build(CASES["SigLIP"], flashinfer)
        return
    tower = build(CASES["SigLIP"], flashinfer)
    assert tower.config._attn_implementation == "sdpa"
    assert "model.vision is a SiglipVisionModel" in lines[-1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"is_causal": True}, "it is causal"),
        ({"scaling": 0.5}, "it scales by 0.5 and not by 0.17"),
        (
            {"position_bias": torch.full((1, 1, 16, 16), 0.5).triu()},
            "it has a position_bias",
        ),
        # Whether there is one changes with the batch.
        ({"attention_mask": torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()}, None),
    ],
    ids=["causal", "scale", "bias", "mask"],
)
def test_what_no_layer_computes_is_left_to_sdpa(
    given: dict[str, Any],
    said: str | None,
    flashinfer: Tower,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    tower = build(CASES["SigLIP"], flashinfer)
    module = next(m for m in tower.modules() if hasattr(m, transformers_towers._LAYER))
    q, k, v = (noise(1, 2 * 16, 32).view(1, 2, 16, 32) for _ in range(3))
    plain = {"attention_mask": None, "scaling": module.scale}
    lines = log_of(transformers_towers, monkeypatch)
    with OpCount() as count:
        found, _ = transformers_towers.attend(module, q, k, v, **(plain | given))
        ours, _ = transformers_towers.attend(module, q, k, v, **plain)
    expected, _ = sdpa_attention_forward(module, q, k, v, **(plain | given))
    assert torch.equal(found, expected)
    assert count.calls == 1
    # Whoever asked for FLASHINFER reads that it does not attend.
    assert len(lines) == (said is not None)
    assert said is None or f"SDPA, as without vllm-flashinfer-vit: {said}" in lines[0]
    # The call differs from what the layer computes.
    assert relative_error(found, ours) > 1e-3


def test_a_part_of_the_heads_is_left_to_sdpa(flashinfer: Tower) -> None:
    tower = build(CASES["SigLIP"], flashinfer)
    module = next(m for m in tower.modules() if hasattr(m, transformers_towers._LAYER))
    half = noise(1, 16, 32).view(1, 1, 16, 32)
    with OpCount() as count:
        out, _ = transformers_towers.attend(
            module, half, half, half, scaling=module.scale
        )
    assert count.calls == 0 and out.shape == (1, 16, 1, 32)


def test_the_language_model_beside_gemma_4_stays(flashinfer: Tower) -> None:
    """A whole model stands for its parts, and hands its attention on to them."""
    from transformers import AutoModel, Gemma4Config
    from vllm.model_executor.models.interfaces import SupportsMultiModal
    from vllm.utils.torch_utils import set_default_torch_dtype

    vision = {
        "hidden_size": 144,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 72,
        "patch_size": 4,
    }
    text = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 128,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 0,
    }
    whole = Gemma4Config(vision_config=vision, text_config=text, audio_config=None)
    with torch.device("meta"):
        chosen = type(AutoModel.from_config(whole).vision_tower)

    class Model(nn.Module, SupportsMultiModal):
        def __init__(self) -> None:
            super().__init__()
            marked = self._mark_tower_model(
                flashinfer.vllm_config, {"image", "video"}, targets=chosen
            )
            with marked:
                self.model = AutoModel.from_config(whole)

    ready = set_default_torch_dtype(flashinfer.dtype)
    with flashinfer.running(), ready, flashinfer.device:
        built = Model().model
    own = transformers_towers.MASKED
    assert built.vision_tower.config._attn_implementation == own
    others = {whole._attn_implementation, whole.text_config._attn_implementation}
    assert not others & {own, transformers_towers.NAME}
    attention = built.vision_tower.encoder.layers[0].self_attn
    assert type(attention.vllm_flashinfer_vit_attention).__name__ == (
        "FlashInferViTAttention"
    )
    # vLLM's backend puts layers of its own into the blocks.
    assert "forward" not in vars(built.vision_tower.encoder)

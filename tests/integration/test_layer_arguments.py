# SPDX-License-Identifier: Apache-2.0
"""The layer with a newer vLLM, whose `MMEncoderAttention` takes more arguments."""

import inspect
from typing import Any

import pytest
from _layers import HEADS, build
from _models import engine
from _towers import cpu_only

from vllm_flashinfer_vit.choices.usable import NotServedError
from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

pytestmark = cpu_only


@pytest.fixture(autouse=True)
def newer_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the constructor another argument, among those that it has."""
    from vllm.model_executor.layers.attention import MMEncoderAttention

    older = MMEncoderAttention.__init__

    def __init__(
        self: Any,
        num_heads: int,
        head_size: int,
        window: int | None = None,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        prefix: str = "",
    ) -> None:
        older(self, num_heads, head_size, scale, num_kv_heads, prefix)
        self.window = window

    assert "window" not in inspect.signature(older).parameters
    monkeypatch.setattr(MMEncoderAttention, "__init__", __init__)


def test_without_flashinfer_vllm_builds_its_own_as_without_the_package() -> None:
    tower = engine("TORCH_SDPA")
    layer = build(tower, window=8, scale=0.5, num_kv_heads=2)
    assert not isinstance(layer, FlashInferViTAttention)
    assert (layer.window, layer.scale, layer.num_kv_heads) == (8, 0.5, 2)
    # What is left out is vLLM's default.
    layer = build(tower, scale=0.5)
    assert (layer.window, layer.scale, layer.num_kv_heads) == (None, 0.5, HEADS)


def test_with_flashinfer_it_is_an_error_that_names_layer_and_argument() -> None:
    with pytest.raises(NotServedError, match=r"'a\.layer': .* window, which"):
        build(engine("FLASHINFER"), window=8)


def test_what_no_model_gives_keeps_no_layer_from_being_served() -> None:
    layer = build(engine("FLASHINFER"), scale=0.5, num_kv_heads=2)
    assert isinstance(layer, FlashInferViTAttention)
    assert (layer.window, layer.scale, layer.num_kv_heads) == (None, 0.5, 2)

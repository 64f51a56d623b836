# SPDX-License-Identifier: Apache-2.0
"""What the plugin hands to layers: calls by which they have vLLM patched."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_flashinfer_vit.settings import Settings


def _none_applied(settings: Settings) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Hooks:
    """What a layer calls while it is built, so that vLLM is patched; unset, nothing.

    Attributes:
        model_patches: For every FLASHINFER layer; returns the names of the patches in
            place that code may hold which vLLM compiles.
        fp8_patches: For a layer that keeps track of its FP8 scales.
        graph_patches: For an engine without FLASHINFER whose encoder CUDA graphs are
            to be padded as with it.
        refusal: Why no layer may serve FLASHINFER in this process, or None.
    """

    model_patches: Callable[[Settings], tuple[str, ...]] = _none_applied
    fp8_patches: Callable[[Settings], object] = _none_applied
    graph_patches: Callable[[], object] = lambda: None
    refusal: str | None = None

# SPDX-License-Identifier: Apache-2.0
"""What tests of the patches of images share: processors, images, and the patches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY

from vllm_flashinfer_vit.patches.patch import Patch, apply_fitting, revert_group


@contextmanager
def applied_anew(patches: Sequence[Patch]) -> Iterator[None]:
    """Apply patches, all of which fit, and put all back, as it was before."""
    before = [patch for patch in patches if patch.applied]
    revert_group(patches)
    assert not apply_fitting(patches)
    yield
    revert_group(patches)
    apply_fitting(before)


def build(checkpoint: Path, backend: str | None = "FLASHINFER") -> Any:
    """Return what prepares images in an engine that asks for a backend."""
    asked: Any = {"mm_encoder_attn_backend": backend, "mm_processor_cache_gb": 0}
    return MULTIMODAL_REGISTRY.create_processor(ModelConfig(str(checkpoint), **asked))


def drawn(sizes: Sequence[tuple[int, int]]) -> list[Image.Image]:
    """Return images of random bytes, by their rows and columns."""
    generator = np.random.default_rng(0)
    values = (generator.integers(0, 256, (*s, 3), dtype=np.uint8) for s in sizes)
    return [Image.fromarray(value) for value in values]

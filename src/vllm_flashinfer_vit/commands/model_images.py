# SPDX-License-Identifier: Apache-2.0
"""Images for models that are built whole, as their own image processors make them."""

import math
from typing import Any

from PIL import Image

from vllm_flashinfer_vit.towers.whole import Cut, ModelSpec


class ModelProcessor:
    """A model's image processor, and what the model takes of its result."""

    def __init__(self, spec: ModelSpec, max_pixels: int | None) -> None:
        """Take the model's processor.

        Args:
            spec: Of the model.
            max_pixels: Larger images are shrunk to it first, since each processor has
                limits of its own kind, and some make every image as large.

        Raises:
            TowerError: The installed packages have no such processor.
        """
        self._spec = spec
        self._max_pixels = max_pixels
        self._processor: Any = spec.image_processor()

    def __call__(self, image: Image.Image) -> Cut:
        """Return an image as the model takes it.

        Raises:
            ValueError: The processor refuses the image.
        """
        features = self._processor(images=[self._shrunk(image)], return_tensors="pt")
        return self._spec.whole.cut(features, self._spec.vision_config)

    def _shrunk(self, image: Image.Image) -> Image.Image:
        pixels = image.width * image.height
        if self._max_pixels is None or pixels <= self._max_pixels:
            return image
        scale = math.sqrt(self._max_pixels / pixels)
        width, height = (max(int(n * scale), 1) for n in image.size)
        return image.resize((width, height), Image.Resampling.BICUBIC)

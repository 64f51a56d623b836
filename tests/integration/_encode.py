# SPDX-License-Identifier: Apache-2.0
"""Options and images of the `encode` job's tests."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vllm_flashinfer_vit.commands.encode import Options

MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"


def options(*given: Path, **changes: Any) -> Options:
    values: dict[str, Any] = {
        "images": given,
        "model": MODEL,
        "random_weights": True,
        "depth": 1,
        "dtype": "fp32",
        "device": "cpu",
        "max_pixels": 112 * 112,
    }
    return Options(**(values | changes))


def save_image(path: Path, width: int, height: int) -> Path:
    generator = np.random.default_rng(0)
    values = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path

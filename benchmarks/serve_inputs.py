# SPDX-License-Identifier: Apache-2.0
"""What bench_serve.py sends: requests with images, as `vllm bench serve` reads them.

Images are drawn: smooth colours with grain stand for photographs, lines of dark marks
on white for pages. As JPEG they are about as large, and take about as long to decode,
as the real ones; what a tower makes of them does not matter. No two are the same, since
servers keep what they have seen.
"""

import base64
import io
import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from rich.progress import track

# Rows and columns of patches.
Grid = tuple[int, int]
MERGE = 2
QUESTION = "What is this?"
# Of the smooth part of a photograph, pixels for each of its values.
_SMOOTH = 32
_GRAIN = 6
# Of a page, in pixels.
_LINE, _LETTER = 24, 8
_QUALITY = 90


@dataclass(frozen=True)
class Workload:
    """Requests of one kind.

    Attributes:
        kinds: The images of a request; each request is one of these.
        is_page: Whether the images are pages.
    """

    kinds: tuple[tuple[Grid, ...], ...]
    is_page: bool = False

    def request(self, seed: int) -> tuple[Grid, ...]:
        """Return the images of the request of this number."""
        return random.Random(seed).choice(self.kinds)


_THUMBNAILS = ((20, 20),) * 20
WORKLOADS = {
    "thumbnails": Workload((_THUMBNAILS,)),
    "photograph": Workload((((64, 64),),)),
    "page": Workload((((124, 124),),), is_page=True),
    "large page": Workload((((188, 188),),), is_page=True),
    "mixture": Workload(
        (
            ((16, 16),),
            ((22, 38),),
            ((64, 64),),
            ((68, 120),),
            ((124, 124),),
            ((36, 36),) * 4,
            _THUMBNAILS,
        )
    ),
}


def image_tokens(workload: Workload, seeds: Sequence[int]) -> int:
    """Return the tokens that the language model gets for the images of requests."""
    grids = (grid for seed in seeds for grid in workload.request(seed))
    return sum(rows * columns // MERGE**2 for rows, columns in grids)


def write_requests(
    path: Path, workload: Workload, patch_size: int, seeds: Sequence[int]
) -> None:
    """Write requests for the dataset `custom_image` of `vllm bench serve`.

    Args:
        path: A file that ends in `.jsonl`.
        workload: What they are.
        patch_size: Of the model, in pixels.
        seeds: One a request. Equal ones give equal images.
    """
    jobs = [(workload, patch_size, seed) for seed in seeds]
    with ThreadPoolExecutor() as pool, path.open("w", encoding="utf-8") as file:
        lines = track(pool.map(_request, jobs), "drawing images", total=len(jobs))
        file.writelines(lines)


def _request(job: tuple[Workload, int, int]) -> str:
    workload, patch_size, seed = job
    generator = np.random.default_rng(seed)
    draw = page if workload.is_page else photograph
    parts: list[dict[str, object]] = [{"type": "text", "text": QUESTION}]
    for rows, columns in workload.request(seed):
        url = _jpeg(draw, rows * patch_size, columns * patch_size, generator)
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return json.dumps({"content": parts}) + "\n"


def _jpeg(
    draw: Callable[[int, int, np.random.Generator], Image.Image],
    height: int,
    width: int,
    generator: np.random.Generator,
) -> str:
    buffer = io.BytesIO()
    draw(height, width, generator).save(buffer, "JPEG", quality=_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def photograph(height: int, width: int, generator: np.random.Generator) -> Image.Image:
    """Draw smooth colours with grain."""
    small = (-(-height // _SMOOTH), -(-width // _SMOOTH), 3)
    colours = Image.fromarray(generator.integers(0, 256, small, dtype=np.uint8))
    smooth = np.asarray(colours.resize((width, height), Image.Resampling.BICUBIC))
    grain = generator.normal(0, _GRAIN, (height, width, 1))
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))


def page(height: int, width: int, generator: np.random.Generator) -> Image.Image:
    """Draw lines of dark marks on white."""
    lines, letters = -(-height // _LINE), -(-width // _LETTER)
    marks = generator.random((lines, _LINE // 2, letters, _LETTER)) < 0.5
    # Half of a line's height is empty, and so is a sixth of its letters.
    marks &= generator.random((lines, 1, letters, 1)) < 5 / 6
    rows = np.zeros((lines, _LINE, letters * _LETTER), dtype=bool)
    rows[:, : _LINE // 2] = marks.reshape(lines, _LINE // 2, -1)
    dark = rows.reshape(lines * _LINE, -1)[:height, :width]
    grey = np.where(dark, 32, 255).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")

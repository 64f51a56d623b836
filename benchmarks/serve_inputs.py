# SPDX-License-Identifier: Apache-2.0
"""What bench_serve.py sends: images and videos, as `vllm bench serve` reads them.

Images are drawn: smooth colours with grain stand for photographs, lines of dark marks
on white for pages. As JPEG they are about as large, and take about as long to decode,
as the real ones; what a tower makes of them does not matter. A video is a window that
moves over such a photograph. No two are the same, since servers keep what they have
seen.
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
# Frames of a video for each frame of patches.
TEMPORAL = 2
# The name under which servers serve.
NAME = "model"
QUESTION = "What is this?"
# Of the smooth part of a photograph, pixels for each of its values.
_SMOOTH = 32
_GRAIN = 6
# Of a page, in pixels.
_LINE, _LETTER = 24, 8
_QUALITY = 90
# Of a video: vLLM samples two frames a second for Qwen's models, so it takes them all.
_FPS = 2
# Pixels by which its window moves from frame to frame.
_STEP = 4
# The limits that Qwen3-VL's checkpoint sets for a whole video. Those of the processor's
# class, which a checkpoint without weights has, would make it smaller.
_VIDEO_PIXELS = {"shortest_edge": 4096, "longest_edge": 25165824}


@dataclass(frozen=True)
class Workload:
    """Requests of one kind.

    Attributes:
        kinds: The images of a request; each request is one of these.
        is_page: Whether the images are pages.
        frames: Frames of patches of each. With more than one, a request is one video.
    """

    kinds: tuple[tuple[Grid, ...], ...]
    is_page: bool = False
    frames: int = 1

    @property
    def is_video(self) -> bool:
        """Whether its requests are videos."""
        return self.frames > 1

    def request(self, seed: int) -> tuple[Grid, ...]:
        """Return the images, or the video, of the request of this number."""
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
    # The case video16x1024 of tower_cases.py.
    "video": Workload((((32, 32),),), frames=16),
}
IMAGE_WORKLOADS = tuple(name for name, kind in WORKLOADS.items() if not kind.is_video)


def image_tokens(workload: Workload, seeds: Sequence[int]) -> int:
    """Return the tokens that the language model gets for the images of requests.

    Those of a video's frames count, and the text between them, its times, does not.
    """
    grids = (grid for seed in seeds for grid in workload.request(seed))
    return sum(workload.frames * rows * columns // MERGE**2 for rows, columns in grids)


def write_dataset(
    folder: Path,
    workload: Workload,
    patch_size: int,
    seeds: Sequence[int],
    answer_tokens: int = 1,
) -> list[str]:
    """Write requests.

    Args:
        folder: Where. Servers must be allowed to read videos from it.
        workload: What they are.
        patch_size: Of the model, in pixels.
        seeds: One a request. Equal ones give equal images and videos.
        answer_tokens: How long each answer is to be.

    Returns:
        The arguments with which `vllm bench serve` reads and sends them.

    Raises:
        RuntimeError: OpenCV cannot write a video.
    """
    if not workload.is_video:
        path = folder / "requests.jsonl"
        write_requests(path, workload, patch_size, seeds)
        reader, options = "custom_image", ["--custom-output-len", str(answer_tokens)]
    else:
        # `custom_image` refuses every part but text and images, and `sharegpt` hands on
        # the address of a video file.
        path = folder / "requests.json"
        write_videos(path, workload, patch_size, seeds)
        body = {"mm_processor_kwargs": {"size": _VIDEO_PIXELS}}
        reader = "sharegpt"
        options = ["--sharegpt-output-len", str(answer_tokens)]
        options += ["--extra-body", json.dumps(body)]
    return ["--dataset-name", reader, "--dataset-path", str(path), *options]


def write_requests(
    path: Path, workload: Workload, patch_size: int, seeds: Sequence[int]
) -> None:
    """Write requests with images for the dataset `custom_image`, one a line.

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


def write_videos(
    path: Path, workload: Workload, patch_size: int, seeds: Sequence[int]
) -> None:
    """Write requests of one video each for the dataset `sharegpt`, videos beside them.

    Args:
        path: A JSON file.
        workload: What they are.
        patch_size: Of the model, in pixels.
        seeds: One a request. Equal ones give equal videos.

    Raises:
        RuntimeError: OpenCV cannot write a video.
    """
    jobs = [(path.parent.absolute(), workload, patch_size, seed) for seed in seeds]
    with ThreadPoolExecutor() as pool:
        drawn = track(pool.map(_video_request, jobs), "drawing videos", len(jobs))
        path.write_text(json.dumps(list(drawn)), encoding="utf-8")


def _video_request(job: tuple[Path, Workload, int, int]) -> dict[str, object]:
    folder, workload, patch_size, seed = job
    ((rows, columns),) = workload.request(seed)
    path = folder / f"video-{seed}.mp4"
    height, width = rows * patch_size, columns * patch_size
    count = TEMPORAL * workload.frames
    write_video(path, height, width, count, np.random.default_rng(seed))
    # Of the two turns of a conversation only the first one is sent.
    turns = [{"value": QUESTION}] * 2
    return {"conversations": turns, "video": path.as_uri()}


def write_video(
    path: Path, height: int, width: int, count: int, generator: np.random.Generator
) -> None:
    """Write an MPEG-4 video of a window that moves over a photograph.

    Args:
        path: A file that ends in `.mp4`.
        height: Of a frame, in pixels, an even number as the next one.
        width: Of a frame, in pixels.
        count: How many frames, at two a second.
        generator: Draws the photograph.

    Raises:
        RuntimeError: OpenCV cannot write it.
    """
    # vLLM brings it along; images do without.
    import cv2

    way = _STEP * (count - 1)
    # OpenCV has blue first.
    pixels = np.asarray(photograph(height + way, width + way, generator))[..., ::-1]
    code = cv2.VideoWriter.fourcc(*"mp4v")
    writer = cv2.VideoWriter(str(path), code, _FPS, (width, height))
    if not writer.isOpened():
        raise RuntimeError(f"OpenCV {cv2.__version__} cannot write {path} as MPEG-4")
    for start in range(0, way + 1, _STEP):
        window = pixels[start : start + height, start : start + width]
        writer.write(np.ascontiguousarray(window))
    writer.release()


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

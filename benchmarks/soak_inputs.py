# SPDX-License-Identifier: Apache-2.0
"""What soak.py sends: requests that servers must answer, and some to be refused.

Everything follows from a seed and a request's number. Images have random sizes in
pixels, so that the processor resizes most of them, and none is sent twice.
"""

import base64
import io
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from serve_inputs import MERGE, NAME, QUESTION

# Height and width in pixels.
Size = tuple[int, int]
MAX_IMAGES = 20
# Sides in patches; no image is larger, and smaller ones are enlarged.
LARGEST, SMALLEST = 124, MERGE
# The processor refuses longer ones.
MAX_RATIO = 200
# Each such request is compared with the judge's answer. It is odd, so that the two
# servers, which are asked in turns, have as many of them.
SAMPLE_EVERY = 41
TOP_LOGPROBS = 20
_BAD_SHARE = 0.1
_CANCELLED_SHARE = 0.1
_CANCELLED_AFTER_S = 0.05
_MOST_TOKENS = 8
# Of an image, pixels for each of its random values.
_CELL = 8
# Of what is no image.
_NOISE_BYTES = 500


@dataclass(frozen=True)
class Request:
    """A request before its images are drawn.

    Attributes:
        seed: Of the run.
        number: Its place in the run.
        kind: A key of `KINDS`.
        sizes: Its images.
        bad: A key of `BAD`, of what comes after the images; None if it is to be
            answered.
        cancel_after_s: When its client goes away; None if it waits.
        is_sampled: Whether it asks for log-probabilities.
        max_tokens: Of the answer.
    """

    seed: int
    number: int
    kind: str
    sizes: tuple[Size, ...]
    bad: str | None
    cancel_after_s: float | None
    is_sampled: bool
    max_tokens: int


def _side(rng: random.Random, least: int, most: int, patch: int) -> int:
    """Return a side in pixels, small ones more often; `least` and `most` in patches."""
    return round(patch * least * (most / least) ** rng.random())


def _images(least: int, most: int, counts: range) -> Callable[..., list[Size]]:
    def draw(rng: random.Random, patch: int) -> list[Size]:
        count = rng.choice(counts)
        sides = [
            [_side(rng, least, most, patch) for _ in range(2)] for _ in range(count)
        ]
        return [(height, width) for height, width in sides]

    return draw


def _tiny(rng: random.Random, patch: int) -> list[Size]:
    return [(rng.randint(1, 2 * patch), rng.randint(1, 2 * patch))]


def _low(rng: random.Random, patch: int) -> list[Size]:
    """One merge unit high or wide."""
    unit = MERGE * patch
    return [_turned(rng, (unit, unit * rng.randint(1, MAX_RATIO)))]


def _strip(rng: random.Random, patch: int) -> list[Size]:
    """As long as the processor takes."""
    height = rng.randint(1, 3 * MERGE * patch)
    return [_turned(rng, (height, MAX_RATIO * height))]


def _turned(rng: random.Random, size: Size) -> Size:
    return size if rng.random() < 0.5 else (size[1], size[0])


# With how often each is drawn.
KINDS: Mapping[str, tuple[int, Callable[[random.Random, int], list[Size]]]] = {
    "thumbnails": (28, _images(2, 20, range(1, MAX_IMAGES + 1))),
    "photograph": (27, _images(20, 64, range(1, 2))),
    "mixture": (16, _images(2, 48, range(2, 7))),
    "page": (4, _images(96, LARGEST, range(1, 2))),
    "tiny": (8, _tiny),
    "low": (9, _low),
    "strip": (8, _strip),
}


def _truncated(rng: random.Random, patch: int) -> list[str]:
    whole = _jpeg(rng, (8 * patch, 8 * patch))
    return [_url(whole[: int(rng.uniform(0.01, 0.9) * len(whole))])]


def _too_long(rng: random.Random, patch: int) -> list[str]:
    height = rng.randint(1, 8)
    size = _turned(rng, (height, height * rng.randint(MAX_RATIO + 1, 2 * MAX_RATIO)))
    return [_url(_jpeg(rng, size))]


# What makes a request one that a server must refuse: addresses of images.
BAD: Mapping[str, Callable[[random.Random, int], list[str]]] = {
    "truncated": _truncated,
    "no image": lambda rng, patch: [_url(rng.randbytes(_NOISE_BYTES))],
    "empty": lambda rng, patch: [_url(b"")],
    "too long": _too_long,
    "unknown scheme": lambda rng, patch: ["gopher://localhost/image.jpg"],
    "no base64": lambda rng, patch: ["data:image/jpeg;base64,@@@@"],
    "too many": lambda rng, patch: [_url(_jpeg(rng, (8, 8)))] * (MAX_IMAGES + 1),
}


def draw_request(seed: int, number: int, patch: int) -> Request:
    """Return a run's request of this number.

    Args:
        seed: The run's.
        number: From 0 on.
        patch: Side of a patch in pixels.
    """
    rng = random.Random(f"{seed} {number}")
    names = list(KINDS)
    (kind,) = rng.choices(names, [KINDS[name][0] for name in names])
    sizes = KINDS[kind][1](rng, patch)
    is_sampled = number % SAMPLE_EVERY == 0
    bad, cancel_after_s = None, None
    chance = rng.random()
    if not is_sampled and chance < _BAD_SHARE:
        bad = rng.choice(list(BAD))
        # Sometimes there are good images, too.
        sizes = sizes[: rng.randint(0, 2)]
    elif not is_sampled and chance < _BAD_SHARE + _CANCELLED_SHARE:
        cancel_after_s = rng.uniform(0, _CANCELLED_AFTER_S)
    return Request(
        seed=seed,
        number=number,
        kind=kind,
        sizes=tuple(sizes),
        bad=bad,
        cancel_after_s=cancel_after_s,
        is_sampled=is_sampled,
        max_tokens=1 if is_sampled else rng.randint(1, _MOST_TOKENS),
    )


def body(request: Request, patch: int) -> bytes:
    """Draw a request's images and return what is sent.

    Args:
        request: From `draw_request`.
        patch: Side of a patch in pixels.
    """
    rng = random.Random(f"{request.seed} {request.number} images")
    urls = [_url(_jpeg(rng, size)) for size in request.sizes]
    if request.bad is not None:
        urls += BAD[request.bad](rng, patch)
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}} for url in urls
    ]
    document: dict[str, Any] = {
        "model": NAME,
        "messages": [
            {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}
        ],
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    if request.is_sampled:
        # By their ids, since a token can be a part of a character.
        document |= {
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
            "return_tokens_as_token_ids": True,
        }
    return json.dumps(document).encode()


def _jpeg(rng: random.Random, size: Size) -> bytes:
    """Draw colours that flow into each other, a few in each patch."""
    generator = np.random.default_rng(rng.getrandbits(64))
    height, width = size
    cells = (-(-height // _CELL), -(-width // _CELL), 3)
    small = Image.fromarray(generator.integers(0, 256, cells, dtype=np.uint8))
    buffer = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG")
    return buffer.getvalue()


def _url(data: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()

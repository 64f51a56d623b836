# SPDX-License-Identifier: Apache-2.0
"""What is asked of encoder graphs: fixed cases, and random mixtures."""

import random
from collections.abc import Sequence

MAX_TOKENS = 16384
MERGE = 2
# Modality and grids in patches; the first seven are those of the stock survey.
CASES: dict[str, tuple[str, list[list[int]]]] = {
    "image 16x16": ("image", [[1, 16, 16]]),
    "image 26x38": ("image", [[1, 26, 38]]),
    "3 images mixed": ("image", [[1, 16, 16], [1, 26, 38], [1, 32, 32]]),
    "image 64x64": ("image", [[1, 64, 64]]),
    "8 x (32x32)": ("image", [[1, 32, 32]] * 8),
    "5 x (20x20)": ("image", [[1, 20, 20]] * 5),
    "video 4x16x24": ("video", [[4, 16, 24]]),
    "image 32x32": ("image", [[1, 32, 32]]),
    "20 x (20x20)": ("image", [[1, 20, 20]] * 20),
    "video 160x4x4": ("video", [[160, 4, 4]]),
}
# The mixtures that a total time is reported for, so that engines which did not get
# through all of them are compared over the same ones.
PREFIXES = (100, 200, 300)

Request = tuple[str, list[list[int]]]


def mixtures(count: int, seed: int, max_tokens: int = MAX_TOKENS) -> list[Request]:
    """Return random requests: images of many sizes, a quarter of them videos."""
    rng = random.Random(seed)

    def side() -> int:
        # Log-uniform: as many images below 24 x 24 patches as above.
        return 2 * round(2 ** rng.uniform(1.6, 5.5))

    requests: list[Request] = []
    while len(requests) < count:
        if rng.random() < 0.25:
            h, w = side(), side()
            frames = rng.randint(1, 16)
            modality, grids = "video", [[frames, h, w]]
        else:
            grids = [[1, side(), side()] for _ in range(rng.randint(1, 8))]
            modality = "image"
        if patches(grids) <= max_tokens * MERGE**2:
            requests.append((modality, grids))
    return requests


def patches(grids: Sequence[Sequence[int]]) -> int:
    """Return the patches of a request."""
    return sum(t * h * w for t, h, w in grids)


def prefixes(count: int) -> list[int]:
    """Return the numbers of mixtures to report total times for, `count` being all."""
    return [*(prefix for prefix in PREFIXES if prefix < count), count]

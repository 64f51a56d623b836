# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of towers run: models, and the grids of each case."""

import random
from collections import defaultdict

Grids = tuple[tuple[int, int, int], ...]

# Frames, rows and columns of patches of each image. 8160 patches are 1920 x 1080 pixels
# in patches of 16; the mixed images are those of op_problems.py.
CASES: dict[str, Grids] = {
    "1x256": ((1, 16, 16),),
    "1x1024": ((1, 32, 32),),
    "1x4096": ((1, 64, 64),),
    "1x8160": ((1, 68, 120),),
    "1x15376": ((1, 124, 124),),
    "1x35344": ((1, 188, 188),),
    "8x1024": ((1, 32, 32),) * 8,
    "8x4096": ((1, 64, 64),) * 8,
    "20x400": ((1, 20, 20),) * 20,
    "video16x1024": ((16, 32, 32),),
    "mixed": (
        (1, 16, 16),
        (1, 36, 36),
        (1, 44, 80),
        (1, 68, 120),
        (1, 64, 64),
        (1, 22, 38),
    ),
}
# Of towers that take images of one size: 224 x 224 pixels in patches of 14 and a first
# token (BLIP-2), 336 x 336 and one (CLIP), 384 x 384 (SigLIP; Molmo2 and Moondream 3
# of 378 x 378), 448 x 448 (AIMv2; InternViT and RADIO, without their first tokens),
# Step-VL's crops of 504 x 504, Gemma 4's largest image, 728 x 728 (Step-VL's whole
# image), and 896 x 896 pixels (Gemma 3). Llama 4's tiles have CLIP's size. DeepSeek-OCR
# makes 101 tokens of a crop of 640 x 640 pixels, and 257 of a whole image.
DENSE_CASES: dict[str, Grids] = {
    f"{images}x{rows * columns}": ((1, rows, columns),) * images
    for rows, columns in (
        *((1, 101), (1, 257), (1, 577), (27, 27), (32, 32)),
        *((36, 36), (42, 60), (52, 52), (64, 64)),
    )
    for images in (1, 8, 32)
}
# Of Qwen3-Omni's audio encoder: clips of 30 seconds. A row is a second, of 13 tokens;
# blocks attend in windows of 8 seconds, which stand for the frames of a video.
AUDIO_CASES: dict[str, Grids] = {
    f"{clips}x30s": ((3, 8, 13), (1, 6, 13)) * clips for clips in (1, 8, 32)
}
SMOKE_CASES: dict[str, Grids] = {"1x64": ((1, 8, 8),), "video2x48": ((2, 6, 8),)}
# Sizes of a case that are timed as new ones: the first shows about how long they take,
# and an even number of samples follows.
NEW_SIZES = 13
MODELS = (
    "Qwen/Qwen2-VL-7B-Instruct",
    "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen/Qwen3-VL-8B-Instruct",
)


def of_new_sizes(grids: Grids) -> tuple[list[Grids], list[Grids]]:
    """Return batches like one, each with another size of its last image or video.

    It has up to a quarter of its patches more or less, and half to twice its rows.

    Returns:
        Batches to encode first, the largest of them at the start; and `NEW_SIZES` to be
        timed, or fewer where a case has no more. Of these, spread evenly over all, each
        has a number of patches of its own. The order is random, and always the same.
    """
    *others, (frames, rows, columns) = grids
    area = rows * columns
    by_area: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for height in range(rows // 4 * 2, 2 * rows + 1, 2):
        for width in range(2, 4 * columns, 2):
            if 0 < abs(height * width - area) <= area // 4:
                by_area[height * width].append((height, width))
    shuffle = random.Random(0).shuffle
    *areas, largest = sorted(by_area)
    places = ((2 * i + 1) * len(areas) // (2 * NEW_SIZES) for i in range(NEW_SIZES))
    timed = [by_area.pop(areas[place])[0] for place in dict.fromkeys(places)]
    first = [size for area in areas for size in by_area.get(area, ())]
    shuffle(timed)
    shuffle(first)
    before, new = (
        [(*others, (frames, *size)) for size in sizes]
        for sizes in ((*by_area[largest], *first), timed)
    )
    return before, new

# SPDX-License-Identifier: Apache-2.0
"""What FP8 attention is measured on: drawn q, k and v, and drawn images."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from environment import device


class QKV(NamedTuple):
    """One pass of a layer: q, k and v, each `[T, H, D]` bf16 and rotated."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Size(NamedTuple):
    """How much is drawn."""

    tokens: int
    heads: int
    grid: int  # rows and columns of patches of an image
    depth: int | None  # blocks of a tower


FULL = Size(tokens=4096, heads=16, grid=68, depth=None)
SMOKE = Size(tokens=256, heads=4, grid=16, depth=2)


class Input(NamedTuple):
    """A kind of q, k and v.

    Attributes:
        text: What it is, for the page.
        change: Makes it, in place, of `[T, H, D]` from N(0, 1). The generator, on the
            CPU, draws what is the same in all passes.
    """

    text: str
    change: Callable[[torch.Tensor, torch.Generator], None]


def _outliers(x: torch.Tensor, fixed: torch.Generator) -> None:
    channels = x.view(x.shape[0], -1)
    picked = torch.randperm(channels.shape[1], generator=fixed)[:2].to(x.device)
    magnitude = (25 + 75 * torch.rand(2, generator=fixed)).to(x.device)
    sign = (torch.randint(0, 2, (2,), generator=fixed) * 2 - 1).to(x.device)
    channels[:, picked] = magnitude * (sign + 0.2 * channels[:, picked])


def _skewed(x: torch.Tensor, fixed: torch.Generator) -> None:
    x[..., ::4] -= 8


def _massive(x: torch.Tensor, fixed: torch.Generator) -> None:
    picked = torch.randperm(x.shape[0], generator=fixed)[:4].to(x.device)
    x[picked] *= 1000


INPUTS: Mapping[str, Input] = {
    "normal": Input("N(0, 1)", lambda x, fixed: None),
    "outliers": Input(
        "N(0, 1), but two channels each of q, k and v, out of those of all heads, hold "
        "m (s + 0.2 n) with n from N(0, 1); the magnitude m, 25 to 100, and the sign s "
        "are drawn once for a channel, as a bias fixes them in a model",
        _outliers,
    ),
    "skewed": Input(
        "N(0, 1), but every fourth channel is N(-8, 1), all negative", _skewed
    ),
    "massive": Input(
        "N(0, 1), but four tokens are a thousand times as large", _massive
    ),
}


def draw(name: str, seed: int, index: int, size: Size, head_dim: int) -> QKV:
    """Draw a pass.

    Args:
        name: A key of `INPUTS`.
        seed: Which layer; it fixes what is the same in all passes.
        index: Which pass.
        size: How much.
        head_dim: D.
    """
    fixed = torch.Generator().manual_seed(seed)
    random = torch.Generator(device()).manual_seed(1000 * seed + index)
    shape = (size.tokens, size.heads, head_dim)
    parts = []
    for _ in range(3):
        x = torch.randn(shape, generator=random, device=device())
        INPUTS[name].change(x, fixed)
        parts.append(x.bfloat16())
    return QKV(*parts)


def draw_image(seed: int, side: int) -> Any:
    """Draw an RGB image: soft colours, fine texture, hard-edged boxes."""
    from PIL import Image

    random = torch.Generator().manual_seed(seed)
    soft = torch.rand(1, 3, 6, 6, generator=random)
    pixels = torch.nn.functional.interpolate(
        soft, (side, side), mode="bicubic", align_corners=False
    )[0]
    pixels += 0.1 * torch.randn(3, side, side, generator=random)
    for _ in range(12):
        top, left, height, width = torch.randint(
            0, side // 2, (4,), generator=random
        ).tolist()
        colour = torch.rand(3, 1, 1, generator=random)
        pixels[:, top : top + height, left : left + width] = colour
    rgb = (pixels.clamp(0, 1) * 255).byte().permute(1, 2, 0)
    return Image.fromarray(rgb.numpy())


class Images:
    """Drawn images as a model's image processor cuts them into patches."""

    def __init__(self, spec: Any, size: Size) -> None:
        """Load the processor."""
        from vllm_flashinfer_vit.commands.images import image_processor

        self._processor = image_processor(spec, None)
        self._side = spec.patch_size * size.grid

    def __call__(self, seed: int) -> tuple[torch.Tensor, list[list[int]]]:
        """Return patches and grids of an image."""
        image = draw_image(seed, self._side)
        found = self._processor(images=[image], return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"].tolist()

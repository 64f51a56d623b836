# SPDX-License-Identifier: Apache-2.0
"""Cuts images and videos into patches, in the process that prepares them.

Transformers' processors of the Qwen-VL and GLM-V families do it by one copy of single
values, from pixels whose channels lie side by side. Here channels are split first, then
whole runs are copied: a patch's pixels of one row and channel. The values and their
order are the same. vLLM gives a processor one thread, unless OMP_NUM_THREADS is set.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_flashinfer_vit.patches.patch import Patch
from vllm_flashinfer_vit.settings import Settings

logger = init_logger("vllm.plugins.flashinfer_vit")

MODULE = "vllm.multimodal.processing.context"
_PATCH = "image-patches"
# What a processor's own method takes after its images or videos.
_SIZES = ("patch_size", "merge_size", "temporal_patch_size")
# Shapes that one is tried with; a video's frames do not fill its last patch.
_TRIALS = {"images": (2, 3, 12, 8), "videos": (2, 3, 3, 12, 8)}

Patchify = Callable[..., tuple[torch.Tensor, *tuple[int, ...]]]


def cut(
    frames: torch.Tensor, patch: int, merge: int, temporal: int, is_video: bool
) -> tuple[torch.Tensor, int, int, int]:
    """Cut frames into patches; the `merge` x `merge` that a merger takes are in a row.

    Args:
        frames: `[B, F, C, H, W]` on the CPU, not empty, any dtype and strides; H and W
            are multiples of `patch * merge`. An image is one frame.
        patch: Pixels of a patch's side.
        merge: Patches of a side that a merger takes together.
        temporal: Frames of a patch.
        is_video: Whether frames follow each other, the last one once more where they
            do not suffice; an image's frame stands for all frames of its patches.

    Returns:
        `[B, G * H / patch * W / patch, C * temporal * patch * patch]`, contiguous;
        then G, of frames, and rows and columns of patches.
    """
    if pad := -frames.shape[1] % temporal if is_video else 0:
        frames = torch.cat([frames, frames[:, -1:].expand(-1, pad, -1, -1, -1)], 1)
    batch, count, channels, height, width = frames.shape
    distinct = temporal if is_video else 1
    grid = (count // distinct, height // patch, width // patch)
    # One element of a type of as many bytes as a run has.
    run = np.dtype((np.void, patch * frames.element_size()))
    runs = _planes(frames).view(run)
    turned = runs.reshape(
        (batch, grid[0], distinct, channels)
        + (grid[1] // merge, merge, patch)
        + (grid[2] // merge, merge)
    ).transpose(0, 1, 4, 7, 5, 8, 3, 2, 6)
    # NumPy asks for huge pages, which PyTorch does not: half of the copy's time.
    out = np.empty((*turned.shape[:7], temporal, patch), run)
    out[...] = turned
    patches = torch.from_numpy(out.view(np.uint8)).view(frames.dtype)
    return patches.view(batch, grid[0] * grid[1] * grid[2], -1), *grid


def _planes(frames: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of frames, contiguous, each channel by itself."""
    # vLLM brings it along.
    import cv2

    beside = frames.permute(0, 1, 3, 4, 2)
    is_split = frames.shape[2] == 1 or not beside.is_contiguous()
    if is_split or frames.dtype not in (torch.uint8, torch.float32):
        return frames.contiguous().view(torch.uint8).numpy()
    pixels = beside.numpy()
    planes = np.empty(frames.shape, pixels.dtype)
    for of_batch, to_batch in zip(pixels, planes, strict=True):
        for frame, channels in zip(of_batch, to_batch, strict=True):
            cv2.split(frame, list(channels))
    return planes.view(np.uint8)


def serve(processor: Any) -> None:
    """Have a processor cut by runs, where that gives what it does, bit for bit.

    The method is replaced in its class, of which an engine has many processors.

    Args:
        processor: Transformers' processor of a model.
    """
    for name in ("image_processor", "video_processor"):
        part = getattr(processor, name, None)
        homes = (c for c in type(part).__mro__ if "patchify" in vars(c))
        home: Any = next(homes, None)
        if home is None:
            continue
        original = vars(home)["patchify"]
        is_ours = getattr(original, "__globals__", None) is globals()
        if not is_ours and _fits(original):
            home.patchify = _by_runs(original)
            logger.info_once(
                "vllm-flashinfer-vit cuts what %s prepares into patches.", home.__name__
            )


def _what_is_cut(original: Any) -> str | None:
    """Return what a method calls its images or videos, None if it is another one."""
    try:
        _, name, *sizes = inspect.signature(original).parameters
    except (TypeError, ValueError):
        return None
    return name if name in _TRIALS and tuple(sizes) == _SIZES else None


@functools.cache
def _fits(original: Any) -> bool:
    """Whether a processor's own method gives what `cut` does."""
    name = _what_is_cut(original)
    if name is None:
        return False
    shape = _TRIALS[name]
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    try:
        theirs = original(None, values, 2, 2, 2)
        ours = _by_runs(original)(None, values, 2, 2, 2)
        return theirs[1:] == ours[1:] and torch.equal(theirs[0], ours[0])
    except Exception:
        # It works otherwise, and needs more of its processor.
        return False


def _by_runs(original: Patchify) -> Patchify:
    """Return a processor's method that cuts by runs.

    Args:
        original: Its own, which also gets what `cut` is not for.
    """
    signature = inspect.signature(original)
    is_video = _what_is_cut(original) == "videos"

    @functools.wraps(original)
    def patchify(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, *tuple[int, ...]]:
        given = signature.bind(*args, **kwargs).arguments
        _, frames, patch, merge, temporal = given.values()
        is_whole = all(size % (patch * merge) == 0 for size in frames.shape[-2:])
        if not (frames.device.type == "cpu" and frames.numel() and is_whole):
            return original(*args, **kwargs)
        if is_video:
            return cut(frames, patch, merge, temporal, is_video)
        patches, _, rows, columns = cut(
            frames.unsqueeze(1), patch, merge, temporal, is_video
        )
        return patches, rows, columns

    return patchify


def _serve_flashinfer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_hf_processor(self: Any, *args: Any, **kwargs: Any) -> Any:
        processor = original(self, *args, **kwargs)
        config = self.model_config.multimodal_config
        backend = getattr(config, "mm_encoder_attn_backend", None)
        is_asked = backend == AttentionBackendEnum.FLASHINFER
        if is_asked and _PATCH not in Settings.from_env().disabled_patches:
            serve(processor)
        return processor

    return get_hf_processor


PATCHES = (
    Patch(
        name=_PATCH,
        target=f"{MODULE}:InputProcessingContext.get_hf_processor",
        why="processors of the Qwen-VL and GLM-V families cut images into patches by "
        "single values, a third of the time that they take for a large image",
        remove_when="Transformers copies runs of pixels",
        parameters=("self", "typ", "kwargs"),
        stands_for=(),
        replace=_serve_flashinfer,
        compiled=False,
    ),
)

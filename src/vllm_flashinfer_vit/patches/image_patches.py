# SPDX-License-Identifier: Apache-2.0
"""Cuts images and videos into patches, in the process that prepares them.

Transformers' processors of the Qwen-VL and GLM-V families do it by one copy of single
values, from pixels whose channels lie side by side. Here channels are split first, then
whole runs are copied: a patch's pixels of one row and channel. The values and their
order are the same. That pays for bytes, which vLLM sends where the GPU normalises them;
what is normalised before is left to the processor.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_flashinfer_vit.patches.patch import Patch
from vllm_flashinfer_vit.settings import disabled_patches

logger = init_logger("vllm.plugins.flashinfer_vit")

MODULE = "vllm.multimodal.processing.context"
# With so many threads PyTorch's copy takes as long (H200 host, OMP_NUM_THREADS=4).
_THREADS = 4
# What a processor's own method takes after its images or videos.
_SIZES = ("patch_size", "merge_size", "temporal_patch_size")
# One that is tried gets these, and pixels of this shape: all sizes differ, and frames
# of a video do not fill its last patch.
_TRIAL_SIZES = (4, 2, 3)
_TRIALS = {"images": (2, 3, 24, 16), "videos": (2, 4, 3, 24, 16)}

# Frames of a patch in towers that convolve them; an image is each of them.
FRAMES = 2


@dataclass
class Frame:
    """How patches were cut that hold their image once.

    Attributes:
        shape: `(C, 1, P, P)` of a patch of P x P pixels; None if none was cut.
    """

    shape: tuple[int, int, int, int] | None = None


# Set while what calls a processor wants images once in their patches.
ONE_FRAME: ContextVar[Frame | None] = ContextVar("ONE_FRAME", default=None)

Patchify = Callable[..., tuple[torch.Tensor, *tuple[int, ...]]]


def cut(
    pixels: torch.Tensor, patch: int, merge: int, temporal: int
) -> tuple[torch.Tensor, *tuple[int, ...]]:
    """Cut pixels into patches; the `merge` x `merge` that a merger takes are in a row.

    Args:
        pixels: Images `[B, C, H, W]` or videos `[B, F, C, H, W]`, uint8 on the CPU, not
            empty, any strides; H and W are multiples of `patch * merge`.
        patch: Pixels of a patch's side.
        merge: Patches of a side that a merger takes together.
        temporal: Frames of a patch. An image stands for all of them; a video's last
            frame comes once more where they do not suffice.

    Returns:
        `[B, G * H / patch * W / patch, C * temporal * patch * patch] uint8`,
        contiguous; then of videos G, of frames, and rows and columns of patches.
    """
    is_video = pixels.dim() == 5
    videos = pixels if is_video else pixels.unsqueeze(1)
    batch, count, channels, height, width = videos.shape
    groups = -(-count // temporal)
    rows, columns = height // patch, width // patch
    merged = (rows // merge, columns // merge)
    # One element of a type of as many bytes as a run has.
    run = np.dtype((np.void, patch))
    # NumPy asks for huge pages, which PyTorch does not: half of the copy's time.
    out = np.empty(
        (batch, groups, *merged, merge, merge, channels, temporal, patch), run
    )
    for video, of_video in zip(videos, out, strict=True):
        for i in range(groups * temporal if is_video else 1):
            runs = _planes(video[min(i, count - 1)]).view(run)
            runs = runs.reshape(channels, merged[0], merge, patch, merged[1], merge)
            turned = runs.transpose(1, 4, 2, 5, 0, 3)[..., None, :]
            group, time = divmod(i, temporal)
            times = slice(time, time + 1) if is_video else slice(None)
            of_video[group, ..., times, :] = turned
    patches = torch.from_numpy(out.view(np.uint8))
    patches = patches.view(batch, groups * rows * columns, -1)
    return (patches, *((groups,) if is_video else ()), rows, columns)


def _planes(frame: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of `[C, H, W]`, contiguous, each channel by itself."""
    # vLLM brings it along.
    import cv2

    pixels = frame.permute(1, 2, 0)
    if frame.shape[0] == 1 or not pixels.is_contiguous():
        return frame.contiguous().numpy()
    planes = np.empty(frame.shape, np.uint8)
    cv2.split(pixels.numpy(), list(planes))
    return planes


@dataclass
class _ImagePatches(Patch):
    """Also puts back the methods of processors.

    Attributes:
        originals: The processors' own methods, by the classes that have them.
    """

    originals: dict[Any, Patchify] = field(default_factory=dict, init=False)

    def revert(self) -> None:
        """See `Patch.revert`."""
        super().revert()
        while self.originals:
            home, original = self.originals.popitem()
            home.patchify = original


def is_asked_for(model_config: Any, name: str) -> bool:
    """Whether an engine asks for FLASHINFER, and its user for a patch.

    Args:
        model_config: vLLM's `ModelConfig` of the engine.
        name: The patch's.
    """
    config = model_config.multimodal_config
    backend = getattr(config, "mm_encoder_attn_backend", None)
    is_served = backend == AttentionBackendEnum.FLASHINFER
    return is_served and name not in disabled_patches()


def serve(processor: Any) -> None:
    """Have a processor's bytes cut by runs, where that gives what it does.

    The method is replaced in its class, of which an engine has many processors. Formats
    of images are loaded, too, of which vLLM's warm-up opens none.

    Args:
        processor: Transformers' processor of a model.
    """
    # Else the first image of each process waits for all formats that Pillow knows.
    Image.init()
    for name in ("image_processor", "video_processor"):
        part = getattr(processor, name, None)
        homes = (c for c in type(part).__mro__ if "patchify" in vars(c))
        home: Any = next(homes, None)
        if home is None or home in PATCH.originals:
            continue
        original = vars(home)["patchify"]
        if _fits(original):
            PATCH.originals[home] = original
            home.patchify = _by_runs(original)
            logger.info_once(
                "vllm-flashinfer-vit cuts what %s prepares into patches.", home.__name__
            )


@functools.cache
def _fits(original: Any) -> bool:
    """Whether a processor's own method gives what `cut` does."""
    try:
        _, name, *sizes = inspect.signature(original).parameters
        if name not in _TRIALS or tuple(sizes) != _SIZES:
            return False
        shape = _TRIALS[name]
        planes = torch.arange(torch.Size(shape).numel()).to(torch.uint8).view(shape)
        beside = planes.movedim(-3, -1).contiguous().movedim(-1, -3)
        patch, merge, most = _TRIAL_SIZES
        for pixels, temporal in ((planes, most), (beside, most), (planes, 1)):
            theirs, *grid = original(None, pixels, patch, merge, temporal)
            ours, *found = cut(pixels, patch, merge, temporal)
            if grid != found or ours.dtype != theirs.dtype:
                return False
            if not torch.equal(ours, theirs):
                return False
    except Exception as error:
        # It works otherwise, and needs more of its processor; or OpenCV is missing.
        logger.debug("%s is left as it is: %s", original, error)
        return False
    return True


def _by_runs(original: Patchify) -> Patchify:
    """Return a processor's method that cuts bytes by runs.

    Args:
        original: Its own, which also gets what `cut` is not for.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def patchify(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, *tuple[int, ...]]:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        _, pixels, patch, merge, temporal = given.arguments.values()
        is_whole = all(size % (patch * merge) == 0 for size in pixels.shape[-2:])
        is_bytes = pixels.dtype == torch.uint8 and pixels.device.type == "cpu"
        is_slow = torch.get_num_threads() < _THREADS
        frame = ONE_FRAME.get()
        if frame is not None and is_bytes and pixels.dim() == 4 and temporal == FRAMES:
            frame.shape = pixels.shape[1], 1, patch, patch
            given.arguments[_SIZES[-1]] = temporal = 1
        if is_slow and is_bytes and is_whole and pixels.numel():
            return cut(pixels, patch, merge, temporal)
        return original(*given.args, **given.kwargs)

    return patchify


def _serve_flashinfer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_hf_processor(self: Any, *args: Any, **kwargs: Any) -> Any:
        processor = original(self, *args, **kwargs)
        if is_asked_for(self.model_config, PATCH.name):
            serve(processor)
        return processor

    return get_hf_processor


PATCH = _ImagePatches(
    name="image-patches",
    target=f"{MODULE}:InputProcessingContext.get_hf_processor",
    why="processors of the Qwen-VL and GLM-V families cut images into patches by "
    "single bytes, half of the time that they take for a large image and more",
    remove_when="Transformers copies runs of pixels",
    parameters=("self", "typ", "kwargs"),
    stands_for=(),
    replace=_serve_flashinfer,
    compiled=False,
)
PATCHES = (PATCH,)

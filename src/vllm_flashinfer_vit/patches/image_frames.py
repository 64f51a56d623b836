# SPDX-License-Identifier: Apache-2.0
"""Sends an image once from process to process, though a patch holds it twice.

Towers of the Qwen-VL and GLM-V families convolve two frames, and an image is both.
Here its patches have one, `[N, C, 1, P, P]`, from the process that prepares images to
the batch on the device, which gets the other one there.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFlatField

from vllm_flashinfer_vit.patches.image_patches import (
    FRAMES,
    MODULE,
    ONE_FRAME,
    Frame,
    is_asked_for,
)
from vllm_flashinfer_vit.patches.patch import Patch

_INPUTS = "vllm.multimodal.inputs"
_PIXELS = "pixel_values"


def _send_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_hf_processor(
        self: Any,
        hf_processor: Any,
        data: Mapping[str, object],
        kwargs: Mapping[str, object] = {},  # noqa: B006
    ) -> Any:
        if not (RECEIVED.applied and is_asked_for(self.model_config, SENT.name)):
            return original(self, hf_processor, data, kwargs)
        frame = Frame()
        token = ONE_FRAME.set(frame)
        try:
            output = original(self, hf_processor, data, kwargs)
        finally:
            ONE_FRAME.reset(token)
        if frame.patch is None:
            return output
        pixels = output.get(_PIXELS)
        if _are_patches(pixels, frame.patch):
            output[_PIXELS] = pixels.view(-1, *frame.patch)
            return output
        # A processor that does more with its patches needs them as they are.
        return original(self, hf_processor, data, kwargs)

    return call_hf_processor


def _are_patches(pixels: Any, patch: tuple[int, ...]) -> bool:
    """Whether all that a processor returns of images are patches with one frame."""
    return (
        isinstance(pixels, torch.Tensor)
        and pixels.dtype == torch.uint8
        and pixels.shape[1:] == (math.prod(patch),)
    )


def _receive(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_data(self: Any, elems: Any, **where: Any) -> Any:
        data = original(self, elems, **where)
        if not (isinstance(self, MultiModalFlatField) and _holds_one_frame(data)):
            return data
        return data.expand(-1, -1, FRAMES, -1, -1).flatten(1)

    return reduce_data


def _holds_one_frame(data: Any) -> bool:
    """Whether a batch is of patches as they are sent here."""
    if not (isinstance(data, torch.Tensor) and data.dtype == torch.uint8):
        return False
    return data.dim() == 5 and data.shape[2] == 1 and data.shape[3] == data.shape[4]


SENT = Patch(
    name="image-frames",
    target=f"{MODULE}:InputProcessingContext.call_hf_processor",
    why="each patch of an image holds it twice, and is copied so from process to "
    "process",
    remove_when="vLLM sends an image's pixels once",
    parameters=("self", "hf_processor", "data", "kwargs"),
    stands_for=(),
    replace=_send_once,
    compiled=False,
)
RECEIVED = Patch(
    name="image-frames-received",
    target=f"{_INPUTS}:BaseMultiModalField.reduce_data",
    why="towers need the frame that image-frames does not send",
    remove_when="vLLM sends an image's pixels once",
    parameters=("self", "elems", "device", "pin_memory"),
    # Batches are made by it alone, in their own order.
    stands_for=(
        "vllm.multimodal.utils:_batch_mm_items",
        f"{_INPUTS}:MultiModalFlatField.build_elems",
        f"{_INPUTS}:MultiModalFlatField._reduce_data",
    ),
    replace=_receive,
    compiled=False,
)
PATCHES = (RECEIVED, SENT)

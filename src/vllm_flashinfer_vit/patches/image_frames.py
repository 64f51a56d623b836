# SPDX-License-Identifier: Apache-2.0
"""Sends an image once from process to process, though a patch holds it twice.

Towers of the Qwen-VL and GLM-V families convolve two frames, and an image is both.
Here its patches have one, `[N, C, 1, P, P]`, from the process that prepares images to
the batch on the device, which gets the other one there.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_flashinfer_vit.patches.image_patches import (
    FRAMES,
    MODULE,
    ONE_FRAME,
    Frame,
    is_asked_for,
)
from vllm_flashinfer_vit.patches.patch import Patch
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES

logger = init_logger("vllm.plugins.flashinfer_vit")

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
        is_asked = all(is_asked_for(self.model_config, patch.name) for patch in PATCHES)
        if not (is_asked and RECEIVED.applied):
            return original(self, hf_processor, data, kwargs)
        frame = Frame()
        token = ONE_FRAME.set(frame)
        try:
            output = original(self, hf_processor, data, kwargs)
        except Exception:
            # Patches of bytes and of floats in one request do not fit together.
            if frame.shape is None:
                raise
            output = {}
        finally:
            ONE_FRAME.reset(token)
        if frame.shape is None:
            return output
        pixels = output.get(_PIXELS)
        if _are_cut_once(pixels, frame.shape):
            output[_PIXELS] = pixels.view(-1, *frame.shape)
            return output
        # An error of the request comes again here, and is no reason to warn.
        output = original(self, hf_processor, data, kwargs)
        logger.warning_once(
            "%s does more with patches than to cut bytes: some images are prepared "
            "twice. %s=%s leaves that out.",
            type(hf_processor).__name__,
            ENV_DISABLE_PATCHES,
            SENT.name,
        )
        return output

    return call_hf_processor


def _are_cut_once(pixels: Any, shape: tuple[int, ...]) -> bool:
    """Whether a processor returns bytes of patches with one frame, and nothing else."""
    return (
        isinstance(pixels, torch.Tensor)
        and pixels.dtype == torch.uint8
        and pixels.shape[1:] == (math.prod(shape),)
    )


def _receive(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.multimodal.inputs import MultiModalFlatField

    @functools.wraps(original)
    def reduce_data(self: Any, elems: Any, **where: Any) -> Any:
        if not isinstance(self, MultiModalFlatField):
            return original(self, elems, **where)
        once = [_holds_one_frame(elem.data) for elem in elems]
        if any(once) and not all(once):
            # Prepared by another process, on another device, or from floats.
            elems = [
                dataclasses.replace(elem, data=_with_both(elem.data))
                if is_once
                else elem
                for elem, is_once in zip(elems, once, strict=True)
            ]
        data = original(self, elems, **where)
        return _with_both(data) if _holds_one_frame(data) else data

    return reduce_data


def _holds_one_frame(data: Any) -> bool:
    """Whether pixels are patches as they are sent here."""
    if not (isinstance(data, torch.Tensor) and data.dtype == torch.uint8):
        return False
    return data.dim() == 5 and data.shape[2] == 1 and data.shape[3] == data.shape[4]


def _with_both(patches: torch.Tensor) -> torch.Tensor:
    """Return patches `[N, C FRAMES P P]` of `[N, C, 1, P, P]`."""
    return patches.expand(-1, -1, FRAMES, -1, -1).flatten(1)


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

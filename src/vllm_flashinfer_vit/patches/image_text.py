# SPDX-License-Identifier: Apache-2.0
"""Leaves out the text that goes to a processor with images, where nothing reads it.

vLLM counts an image's tokens itself, but hands some processors of Transformers a text
with one placeholder for each image. They write as many as the image has tokens, and
split that text into tokens, which vLLM then drops: 3844 for a page of 15376 patches.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from vllm_flashinfer_vit.patches.image_patches import is_asked_for
from vllm_flashinfer_vit.patches.patch import Patch

MODULE = "vllm.multimodal.processing.processor"
_BASE = f"{MODULE}:BaseMultiModalProcessor"
_QWEN3_VL = "vllm.model_executor.models.qwen3_vl:Qwen3VLMultiModalProcessor"
_PADDLEOCR_VL = "vllm.model_executor.models.paddleocr_vl:PaddleOCRVLMultiModalProcessor"
# All that gets a processor's output, in each class: none reads the text's tokens where
# there are images alone.
_READ = {
    "_get_hf_mm_inputs": (_BASE,),
    "_get_hf_mm_text": (_QWEN3_VL, _PADDLEOCR_VL),
    "_apply_hf_processor": (_BASE,),
    "_apply_hf_processor_main": (_BASE, _QWEN3_VL),
    "_call_hf_processor": (_BASE, _PADDLEOCR_VL),
    "_finalize_hf_mm_data": (_BASE,),
    "_postprocess_hf_mm_data": (_BASE,),
    "_get_mm_fields_config": (_QWEN3_VL, _PADDLEOCR_VL),
}


@functools.cache
def _is_read(cls: Any) -> bool:
    """Whether each method of a class of vLLM's is one of `_READ`."""
    for name, homes in _READ.items():
        method = getattr(cls, name)
        if f"{method.__module__}:{method.__qualname__.rpartition('.')[0]}" not in homes:
            return False
    return True


def _needs_no_text(processor: Any) -> bool:
    """Whether a processor of Transformers takes images without text."""
    # For seconds; where there is a processor it is there.
    from transformers import ProcessorMixin

    return all(
        getattr(type(processor), name) is getattr(ProcessorMixin, name)
        for name in ("__call__", "prepare_inputs_layout", "validate_inputs")
    )


def _without_text(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_hf_mm_inputs(
        self: Any, mm_items: Any, hf_kwargs: Mapping[str, object]
    ) -> Any:
        inputs = original(self, mm_items, hf_kwargs)
        if (
            set(inputs.hf_data) == {"text", "images"}
            and is_asked_for(self.info.ctx.model_config, PATCH.name)
            and _is_read(self.__class__)
            and _needs_no_text(self.info.get_hf_processor())
        ):
            del inputs.hf_data["text"]
        return inputs

    return _get_hf_mm_inputs


PATCH = Patch(
    name="image-text",
    target=f"{_BASE}._get_hf_mm_inputs",
    why="processors of Qwen3-VL and PaddleOCR-VL write a placeholder for each token of "
    "an image and split them into tokens that nothing reads",
    remove_when="vLLM gives these processors no text",
    parameters=("self", "mm_items", "hf_kwargs"),
    stands_for=tuple(
        f"{home}.{name}" for name, homes in _READ.items() for home in homes
    ),
    replace=_without_text,
    compiled=False,
)
PATCHES = (PATCH,)

# SPDX-License-Identifier: Apache-2.0
"""Backend selection on CUDA and on the CPU."""

from collections.abc import Callable
from typing import Any

from vllm_flashinfer_vit.patches.patch import Patch


def _answer_flash_attn(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_flashinfer_vit.engine.selection import answer_flash_attn

    return answer_flash_attn(original)


def _selection(name: str, target: str, why: str) -> Patch:
    return Patch(
        name=name,
        target=target,
        why=why,
        remove_when="vLLM lets a plugin register an encoder attention backend",
        parameters=("cls", "head_size", "dtype", "backend"),
        stands_for=(),
        replace=_answer_flash_attn,
    )


PATCHES = (
    _selection(
        "select-cuda",
        "vllm.platforms.cuda:CudaPlatformBase.get_vit_attn_backend",
        "vLLM's own FLASHINFER needs metadata that most models do not compute",
    ),
    _selection(
        "select-cpu",
        "vllm.platforms.interface:Platform.get_vit_attn_backend",
        "vLLM refuses FLASHINFER on a machine without a GPU",
    ),
)

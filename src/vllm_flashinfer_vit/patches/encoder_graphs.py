# SPDX-License-Identifier: Apache-2.0
"""vLLM's manager of encoder CUDA graphs, for all models and runners."""

import functools
from collections.abc import Callable
from typing import Any

from vllm_flashinfer_vit.machine.versions import SUPPORTED_VLLM
from vllm_flashinfer_vit.patches.patch import Patch
from vllm_flashinfer_vit.settings import Settings

MODULE = "vllm.v1.worker.encoder_cudagraph"


def _adopt(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(
        self: Any, vllm_config: Any, device: Any, dtype: Any, model: Any
    ) -> None:
        original(self, vllm_config, device, dtype, model)
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        multimodal = vllm_config.model_config.multimodal_config
        asked = multimodal.mm_encoder_attn_backend
        flashinfer = asked == AttentionBackendEnum.FLASHINFER
        if flashinfer or Settings.from_env().fix_graph_padding:
            from vllm_flashinfer_vit.graphs.manager import adopt

            adopt(self, flashinfer)

    return __init__


PATCHES = (
    Patch(
        name="encoder-graphs",
        target=f"{MODULE}:EncoderCudaGraphManager.__init__",
        why="replays pad cu_seqlens with zeros, a negative length; graphs hold up to "
        "many times the tokens of their budget, budgets are powers of two, and each "
        "graph keeps inputs and output of its own",
        vllm_range=SUPPORTED_VLLM,
        remove_when="vLLM repeats the last offset for every model, captures exactly "
        "the budget, and shares buffers between graphs",
        parameters=("self", "vllm_config", "device", "dtype", "model"),
        replace=_adopt,
    ),
)

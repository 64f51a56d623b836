# SPDX-License-Identifier: Apache-2.0
"""vLLM's manager of encoder CUDA graphs, for all models and runners."""

import functools
from collections.abc import Callable
from typing import Any

from vllm_flashinfer_vit.patches.patch import Patch
from vllm_flashinfer_vit.settings import Settings

MODULE = "vllm.v1.worker.encoder_cudagraph"
# What the managers of `graphs` override, call, or change by other budgets. Models say
# for themselves whether they are captured at their exact size: `models.exact_graphs`.
_STANDS_FOR = tuple(
    f"{MODULE}:EncoderCudaGraphManager.{method}"
    for method in (
        "__init__",
        "capture",
        "clear",
        "execute",
        "get_num_graphs_to_capture",
        "_capture_budget_graph",
        "_copy_padded_buffer",
        "_execute_local",
        "_get_item_specs",
        "_run_budget_graph",
    )
)


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
        settings = Settings.from_env()
        if flashinfer or settings.fix_graph_padding:
            from vllm_flashinfer_vit.graphs.manager import adopt

            adopt(self, flashinfer, settings.strict)

    return __init__


PATCHES = (
    Patch(
        name="encoder-graphs",
        target=f"{MODULE}:EncoderCudaGraphManager.__init__",
        why="replays pad cu_seqlens with zeros, a negative length, and a batch that no "
        "buffer holds stops the engine",
        remove_when="vLLM repeats the last offset for every model, and runs what no "
        "graph holds without one",
        parameters=("self", "vllm_config", "device", "dtype", "model"),
        stands_for=_STANDS_FOR,
        replace=_adopt,
        compiled=False,
    ),
)

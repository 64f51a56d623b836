# SPDX-License-Identifier: Apache-2.0
"""vLLM's manager of encoder CUDA graphs, for all models and runners."""

import functools
from collections.abc import Callable
from typing import Any

from vllm_flashinfer_vit.patches.patch import Patch
from vllm_flashinfer_vit.settings import Settings

MODULE = "vllm.v1.worker.encoder_cudagraph"
_MODELS = (
    "qwen2_vl:Qwen2VLForConditionalGeneration",
    "qwen2_5_vl:Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl:Qwen3VLForConditionalGeneration",
)
# What the managers of `graphs` override, call, or change by other budgets; and what the
# wrapped models of `graphs.exact` do.
_STANDS_FOR = (
    *(
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
    ),
    *(
        f"vllm.model_executor.models.{model}.{method}"
        for model in _MODELS
        for method in (
            "_get_grid_thw_by_modality",
            "encoder_cudagraph_forward",
            "encoder_eager_forward",
            "prepare_encoder_cudagraph_capture_inputs",
            "prepare_encoder_cudagraph_replay_buffers",
        )
    ),
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
        remove_when="vLLM repeats the last offset for every model, captures exactly "
        "the budget, and shares buffers between graphs",
        parameters=("self", "vllm_config", "device", "dtype", "model"),
        stands_for=_STANDS_FOR,
        replace=_adopt,
        compiled=False,
    ),
)

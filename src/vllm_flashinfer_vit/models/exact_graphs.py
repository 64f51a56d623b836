# SPDX-License-Identifier: Apache-2.0
"""The models whose encoder graphs are captured at their exact size, and how.

Each has a patch, which tells the manager of graphs its `Layout`. A model that a release
of vLLM changes, or lacks, is captured as by vLLM there, and only that one.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm_flashinfer_vit.graphs.layouts import Layout
from vllm_flashinfer_vit.models._shared import MODELS, Function, Grids
from vllm_flashinfer_vit.patches.patch import Patch

_MOONVIT = Layout("vision_tower", "merge_kernel_size")
# By module and class of vLLM; what derives from one is captured as that.
_LAYOUTS = {
    f"{MODELS}.qwen2_vl:Qwen2VLForConditionalGeneration": Layout("visual"),
    f"{MODELS}.qwen2_5_vl:Qwen2_5_VLForConditionalGeneration": Layout("visual"),
    f"{MODELS}.qwen3_vl:Qwen3VLForConditionalGeneration": Layout("visual"),
    f"{MODELS}.glm4_1v:Glm4vForConditionalGeneration": Layout("visual"),
    f"{MODELS}.ernie45_vl:Ernie4_5_VLMoeForConditionalGeneration": Layout(
        "vision_model"
    ),
    f"{MODELS}.kimi_vl:KimiVLForConditionalGeneration": _MOONVIT,
    f"{MODELS}.kimi_k25:KimiK25ForConditionalGeneration": _MOONVIT,
    "vllm.models.kimi_k3.nvidia.model:KimiK3ForConditionalGeneration": _MOONVIT,
    f"{MODELS}.internvl:InternVLChatModel": Layout(),
    f"{MODELS}.gemma3_mm:Gemma3ForConditionalGeneration": Layout(),
    f"{MODELS}.gemma4_mm:Gemma4ForConditionalGeneration": Layout(by_width=True),
}
# GLM-OCR's tower prepares nothing beforehand, see `_run_prepared`.
_GLM_OCR = "GlmOcrForConditionalGeneration"
# Each with the first vLLM whose graphs are exact, if it is not the first that has any.
CLASSES = {
    **dict.fromkeys((*(name.partition(":")[2] for name in _LAYOUTS), _GLM_OCR), ""),
    "Gemma4ForConditionalGeneration": "0.33.0",
}

# What the wrapped models of `graphs.model` do, or count on.
_METHODS = (
    "encoder_cudagraph_forward",
    "encoder_eager_forward",
    "get_encoder_cudagraph_budget_range",
    "get_encoder_cudagraph_config",
    "get_encoder_cudagraph_item_specs",
    "prepare_encoder_cudagraph_capture_inputs",
    "prepare_encoder_cudagraph_replay_buffers",
    "select_encoder_cudagraph_items",
)


def _exact(cls: str, layout: Layout) -> Patch:
    module = cls.partition(":")[0]
    family = next(
        part for part in reversed(module.split(".")) if part not in ("model", "nvidia")
    )
    return Patch(
        name=f"{family}-exact-graphs",
        target=f"{cls}.get_encoder_cudagraph_config",
        why="graphs hold up to many times the tokens of their budget, budgets are "
        "powers of two, and each graph keeps inputs and output of its own"
        if layout.is_packed
        else "budgets are powers of two, and each graph keeps inputs and output of its "
        "own",
        remove_when="vLLM captures exactly the budget, at finer budgets, and shares "
        "buffers between graphs",
        parameters=("self",),
        stands_for=tuple(f"{cls}.{method}" for method in _METHODS),
        replace=functools.partial(_tell, layout=layout),
        compiled=False,
    )


def _tell(original: Function, layout: Layout) -> Function:
    @functools.wraps(original)
    def get_encoder_cudagraph_config(self: Any) -> Any:
        from vllm_flashinfer_vit.graphs.manager import LAYOUT

        config = original(self)
        setattr(config, LAYOUT, layout)
        return config

    return get_encoder_cudagraph_config


def _run_prepared(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any, x: Any, grid_thw: Grids | None, encoder_metadata: Any = None
    ) -> Any:
        if encoder_metadata is None:
            return original(self, x, grid_thw)
        x = x.to(device=self.device)
        # vLLM normalises bytes here from 0.32 on.
        norm = getattr(self, "input_norm", None)
        x = x.to(self.dtype) if norm is None else norm(x, self.dtype)
        x = self.patch_embed(x).unsqueeze(1)
        for block in self.blocks:
            x = block(
                x,
                cu_seqlens=encoder_metadata["cu_seqlens"],
                rotary_pos_emb_cos=encoder_metadata["rotary_pos_emb_cos"],
                rotary_pos_emb_sin=encoder_metadata["rotary_pos_emb_sin"],
                max_seqlen=encoder_metadata["max_seqlen"],
            )
        x = self.post_layernorm(x)
        merge = self.spatial_merge_size
        x = x.view(-1, merge, merge, x.shape[-1]).permute(0, 3, 1, 2)
        return self.merger(self.downsample(x).view(-1, self.out_hidden_size))

    return forward


_TOWER = f"{MODELS}.glm_ocr:GlmOcrVisionTransformer"
PATCHES = (
    *(_exact(cls, layout) for cls, layout in _LAYOUTS.items()),
    Patch(
        name="glm_ocr-prepared",
        target=f"{_TOWER}.forward",
        why="the tower takes no prepared metadata: vLLM cannot capture it, and stops "
        "with cudagraph_mm_encoder",
        remove_when="vLLM's tower takes encoder_metadata",
        parameters=("self", "x", "grid_thw", "encoder_metadata"),
        stands_for=(f"{_TOWER}.__init__", f"{_TOWER}.forward"),
        replace=_run_prepared,
    ),
)

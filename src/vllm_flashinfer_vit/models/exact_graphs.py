# SPDX-License-Identifier: Apache-2.0
"""The models whose encoder graphs are captured at their exact size, and how.

Each has a patch, which tells the manager of graphs its `Layout`. A model that a release
of vLLM changes, or lacks, is captured as by vLLM there, and only that one.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm_flashinfer_vit.graphs.layouts import LAYOUT, Layout
from vllm_flashinfer_vit.models._shared import MODELS, Function, Grids
from vllm_flashinfer_vit.models.longest import COMPUTE, WHY, told_longest
from vllm_flashinfer_vit.patches.patch import Patch

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


def _exact(family: str, cls: str, layout: Layout, *prepare: str) -> Patch:
    """Return the patch that captures a model at its exact size.

    Args:
        family: vLLM's name of its module.
        cls: `module:Class` of the model; what derives from it is captured as that.
        layout: What its buffers are.
        prepare: Of a packed tower: the methods that make them, each
            `module:Class.method`.
    """
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
        stands_for=(*(f"{cls}.{method}" for method in _METHODS), *prepare),
        replace=functools.partial(_tell, layout=layout),
        compiled=False,
    )


def _tell(original: Function, layout: Layout) -> Function:
    @functools.wraps(original)
    def get_encoder_cudagraph_config(self: Any) -> Any:
        config = original(self)
        setattr(config, LAYOUT, layout)
        return config

    return get_encoder_cudagraph_config


def _run_prepared(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, x: Any, grid_thw: Any, encoder_metadata: Any = None) -> Any:
        if encoder_metadata is None:
            with told_longest(self, grid_thw):
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


def _prepare_none(original: Function) -> Function:
    @functools.wraps(original)
    def pos_embeds_interpolate(self: Any, grid_thw: Grids) -> None:
        return None

    return pos_embeds_interpolate


def _pooled_by_internvl(model: Any) -> int:
    return model.patch_tokens // model.num_image_token


def _pooled_by_gemma3(model: Any) -> int:
    vision = model.config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    return patches // model.config.mm_tokens_per_image


def _pooled_by_gemma4(model: Any) -> int:
    return model.config.vision_config.pooling_kernel_size**2


_VISUAL, _MOONVIT = Layout("visual"), Layout("vision_tower", "merge_kernel_size")
_QWEN2 = f"{MODELS}.qwen2_vl:Qwen2"
_QWEN2_5 = f"{MODELS}.qwen2_5_vl:Qwen2_5_"
_QWEN3 = f"{MODELS}.qwen3_vl:Qwen3"
_ERNIE = f"{MODELS}.ernie45_vl:Ernie4_5_"
_K25 = (
    f"{MODELS}.kimi_k25_vit:MoonViT3dPretrainedModel.prepare_encoder_cudagraph_metadata",
    f"{MODELS}.kimi_k25_vit:MoonViT3dEncoder.prepare_encoder_metadata",
)
_GLM_4V = f"{MODELS}.glm4_1v:Glm4vVisionTransformer"
_GLM_OCR = f"{MODELS}.glm_ocr:GlmOcrVisionTransformer"
_EXACT = (
    _exact(
        "qwen2_vl",
        f"{_QWEN2}VLForConditionalGeneration",
        _VISUAL,
        f"{_QWEN2}VisionTransformer.prepare_encoder_metadata",
    ),
    _exact(
        "qwen2_5_vl",
        f"{_QWEN2_5}VLForConditionalGeneration",
        _VISUAL,
        f"{_QWEN2_5}VisionTransformer.prepare_encoder_metadata",
    ),
    _exact(
        "qwen3_vl",
        f"{_QWEN3}VLForConditionalGeneration",
        _VISUAL,
        f"{_QWEN3}_VisionTransformer.prepare_encoder_metadata",
    ),
    _exact(
        "glm4_1v",
        f"{MODELS}.glm4_1v:Glm4vForConditionalGeneration",
        _VISUAL,
        f"{_GLM_4V}.prepare_encoder_metadata",
    ),
    _exact(
        "ernie45_vl",
        f"{_ERNIE}VLMoeForConditionalGeneration",
        Layout("vision_model"),
        f"{_ERNIE}VisionTransformer.prepare_encoder_metadata",
        # Passed by for batches without a graph.
        f"{_ERNIE}VLMoeForConditionalGeneration.postprocess_encoder_output",
    ),
    _exact(
        "kimi_vl",
        f"{MODELS}.kimi_vl:KimiVLForConditionalGeneration",
        _MOONVIT,
        f"{MODELS}.moonvit:MoonVitPretrainedModel.prepare_encoder_metadata",
    ),
    _exact(
        "kimi_k25",
        f"{MODELS}.kimi_k25:KimiK25ForConditionalGeneration",
        _MOONVIT,
        *_K25,
    ),
    _exact(
        "kimi_k3",
        "vllm.models.kimi_k3.nvidia.model:KimiK3ForConditionalGeneration",
        _MOONVIT,
        *_K25,
    ),
    _exact(
        "internvl",
        f"{MODELS}.internvl:InternVLChatModel",
        Layout(pooled=_pooled_by_internvl),
    ),
    _exact(
        "gemma3_mm",
        f"{MODELS}.gemma3_mm:Gemma3ForConditionalGeneration",
        Layout(pooled=_pooled_by_gemma3),
    ),
    _exact(
        "gemma4_mm",
        f"{MODELS}.gemma4_mm:Gemma4ForConditionalGeneration",
        Layout(pooled=_pooled_by_gemma4, by_width=True),
    ),
)
# Models that are captured exactly, each with the first vLLM whose graphs are, if it is
# not the first that has any.
CLASSES = {
    **{patch.target.partition(":")[2].partition(".")[0]: "" for patch in _EXACT},
    "GlmOcrForConditionalGeneration": "",
    "Gemma4ForConditionalGeneration": "0.33.0",
}
PATCHES = (
    *_EXACT,
    Patch(
        name="glm_ocr-prepared",
        target=f"{_GLM_OCR}.forward",
        why="the tower takes no prepared metadata: vLLM cannot capture it, and stops "
        f"with cudagraph_mm_encoder; without graphs, {WHY}",
        remove_when="vLLM's tower takes encoder_metadata",
        parameters=("self", "x", "grid_thw", "encoder_metadata"),
        stands_for=(
            f"{_GLM_OCR}.__init__",
            f"{_GLM_OCR}.forward",
            f"{_GLM_4V}.{COMPUTE}",
        ),
        replace=_run_prepared,
    ),
    Patch(
        name="glm_ocr-no-positions",
        target=f"{_GLM_OCR}.pos_embeds_interpolate",
        inherited_from=_GLM_4V,
        why="vLLM prepares GLM-4.xV's learned positions for its graphs, which this "
        "tower has not: it stops with cudagraph_mm_encoder",
        remove_when="vLLM's tower prepares no positions",
        parameters=("self", "grid_thw"),
        stands_for=(f"{_GLM_OCR}.__init__", f"{_GLM_4V}.prepare_encoder_metadata"),
        replace=_prepare_none,
        compiled=False,
    ),
)

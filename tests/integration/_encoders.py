# SPDX-License-Identifier: Apache-2.0
"""vLLM's own encoders at a small size, by name."""

from dataclasses import replace

import _dense_models as dense
import _grid_models as grids
import _length_models as lengths
from _models import Builder, Encoder

from vllm_flashinfer_vit.patches.fingerprints import left_out


def _model(name: str, build: Builder, ops: int = 2, programs: int = 0) -> Encoder:
    return Encoder(f"model_executor.models.{name}", build, ops, programs)


def _program(name: str, build: Builder) -> Encoder:
    """Return an encoder of two blocks, both of which run as programs."""
    return _model(name, build, 2, 2)


def _turning(name: str, build: Builder) -> Encoder:
    """Return such an encoder, whose attention turns q and k."""
    return replace(_program(name, build), turns="all")


# Packed sequences: cu_seqlens, and a longest length in whatever form.
PACKED = {
    "glm4_1v": _turning("glm4_1v", grids.glm4_1v),
    "glm_ocr": _program("glm_ocr", grids.glm_ocr),
    "exaone4_5": _turning("exaone4_5", grids.exaone4_5),
    "mimo_v2_omni": _model("mimo_v2_omni", grids.mimo_v2_omni),
    "qwen3_omni-vision": _turning("qwen3_omni_moe_thinker", grids.qwen3_omni_vision),
    "qwen3_omni-audio": _program("qwen3_omni_moe_thinker", lengths.qwen3_omni_audio),
    "keye": _turning("keye", grids.keye),
    "paddleocr_vl": _turning("paddleocr_vl", grids.paddleocr_vl),
    "siglip2navit": _turning("siglip2navit", grids.siglip2navit),
    "siglip2navit-unturned": _model("siglip2navit", grids.siglip2navit_unturned),
    "ernie45_vl": _turning("ernie45_vl", grids.ernie45_vl),
    "dots_ocr": _turning("dots_ocr", grids.dots_ocr),
    "moonvit": _turning("moonvit", grids.moonvit),
    "kimi_k25": _turning("kimi_k25_vit", grids.kimi_k25),
    "kimi_k3": _turning("kimi_k25_vit", grids.kimi_k3),
    "openpangu_vl": _turning("openpangu_vl", lengths.openpangu),
    "isaac": _program("isaac", lengths.isaac),
    "lfm2_siglip2": _program("lfm2_siglip2", lengths.lfm2_siglip2),
    "radio": _program("radio", lengths.radio),
    "funaudiochat": _model("funaudiochat", lengths.funaudiochat, 1),
    "llava_onevision2": _model("llava_onevision2", lengths.llava_onevision2, 1),
    "pixtral": _turning("pixtral", lengths.pixtral),
    "pixtral_hf": _turning("pixtral", lengths.pixtral_hf),
    "muse_glimmer": _model("muse_glimmer", lengths.muse_glimmer, 1),
    "cohere_compass": _turning("cohere_compass", lengths.cohere_compass),
    "muse_spark": Encoder(
        "models.muse_spark.common.vision", lengths.muse_spark, 2, 2, turns="all"
    ),
    # Four passes.
    "deepseek_v4": Encoder(
        "models.deepseek_v4.common.vision", lengths.deepseek_v4, 8, 8, turns="all"
    ),
    "minimax_m3": Encoder(
        "models.minimax_m3.common.vision_tower",
        lengths.minimax_m3,
        2,
        2,
        turns="a part",
    ),
    "glm5next": Encoder("models.glm5next.common.multimodal", grids.glm5next, 2, 2),
}
# Dense batches, without cu_seqlens.
DENSE = {
    "siglip": _program("siglip", dense.siglip),
    "clip": _program("clip", dense.clip),
    "clip-hidden": _model("clip", dense.clip_hidden, 3, 3),
    "deepencoder": _program("deepencoder", dense.deepencoder),
    "blip": _program("blip", dense.blip),
    "intern_vit": _program("intern_vit", dense.intern_vit),
    "intern_vit-normed": _model("intern_vit", dense.intern_vit_normed),
    "radio-dense": _program("radio", dense.radio),
    "interns1_vit": _model("interns1_vit", dense.interns1_vit, 1),
    "aimv2": _program("aimv2", dense.aimv2),
    "idefics2": _program("idefics2_vision_model", dense.idefics2),
    "idefics2-masked": _model("idefics2_vision_model", dense.idefics2_masked, 4, 4),
    "glm4v": _model("glm4v", dense.glm4v, 1),
    "glmasr": _model("glmasr", dense.glmasr, 1),
    "mllama4": replace(_model("mllama4", dense.mllama4, 6, 6), turns="all"),
    "molmo2": _program("molmo2", dense.molmo2),
    "moondream3": _program("moondream3", dense.moondream3),
    "step3_vl": _model("step3_vl", dense.step3_vl, 1),
    "step_vl": replace(_model("step_vl", dense.step_vl, 6, 6), turns="all"),
    "step_vl-plain": replace(_model("step_vl", dense.step_vl_plain, 4, 4), turns="all"),
    "minicpmv4_6": _model("minicpmv4_6", dense.minicpmv4_6, 1),
    "hunyuan_vision": _model("hunyuan_vision", dense.hunyuan_vision, 1),
    "funasr": _model("funasr", dense.funasr, 1),
}
# Pooling: one query attends to four keys.
CROSS = {
    "molmo": _model("molmo", dense.molmo_pooling, 0),
    "molmo2": _model("molmo2", dense.molmo2_pooling, 0),
}
WHISPER = _model("whisper", dense.whisper, 0)


def programs_of(name: str) -> int:
    """Return how many blocks of an encoder run as programs with this vLLM."""
    is_left_out = f"{name}-blocks" in left_out()
    return 0 if is_left_out else {**PACKED, **DENSE}[name].programs

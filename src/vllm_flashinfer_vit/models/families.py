# SPDX-License-Identifier: Apache-2.0
"""All families' patches, in the order in which `doctor` and the docs list them."""

from vllm_flashinfer_vit.models import (
    aimv2,
    deepseek_v4,
    dots_ocr,
    ernie,
    glm,
    idefics2,
    intern_vit,
    keye,
    kimi,
    llama4,
    minimax_m3,
    molmo,
    moondream,
    muse_spark,
    openpangu_vl,
    paddleocr_vl,
    pixtral,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_omni_audio,
    qwen3_vl,
    siglip,
    siglip2,
    step_vl,
)
from vllm_flashinfer_vit.patches.patch import Patch

PATCHES: tuple[Patch, ...] = (
    # Packed batches.
    *qwen2_vl.PATCHES,
    *qwen2_5_vl.PATCHES,
    *openpangu_vl.PATCHES,
    *qwen3_vl.PATCHES,
    *qwen3_omni_audio.PATCHES,
    *glm.PATCHES,
    *ernie.PATCHES,
    *dots_ocr.PATCHES,
    *paddleocr_vl.PATCHES,
    *keye.PATCHES,
    *siglip2.PATCHES,
    *kimi.PATCHES,
    *pixtral.PATCHES,
    *deepseek_v4.PATCHES,
    *minimax_m3.PATCHES,
    *muse_spark.PATCHES,
    # Dense ones, of images of one size.
    *siglip.PATCHES,
    *idefics2.PATCHES,
    *moondream.PATCHES,
    *molmo.PATCHES,
    *aimv2.PATCHES,
    *intern_vit.PATCHES,
    *llama4.PATCHES,
    *step_vl.PATCHES,
)

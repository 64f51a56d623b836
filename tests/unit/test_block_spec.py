# SPDX-License-Identifier: Apache-2.0
"""What a block is, as data, and what no program can run."""

import dataclasses

import pytest

from vllm_flashinfer_vit.models.glm import SPEC as GLM
from vllm_flashinfer_vit.models.interleaved import KIMI, PIXTRAL, PIXTRAL_HF
from vllm_flashinfer_vit.models.self_turning import LLAMA_4, STEP


def test_complex_rotary_is_of_interleaved_pairs() -> None:
    specs = (KIMI, PIXTRAL, PIXTRAL_HF, LLAMA_4, STEP)
    found = [spec.rotary.is_interleaved for spec in specs]
    assert found == [True, True, False, True, True]


def test_norms_of_q_and_k_in_front_of_interleaved_pairs() -> None:
    with pytest.raises(ValueError, match="interleaved"):
        dataclasses.replace(GLM, rotary=KIMI.rotary)

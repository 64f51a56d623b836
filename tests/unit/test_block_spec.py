# SPDX-License-Identifier: Apache-2.0
"""What a block is, as data, and what no program can run."""

import dataclasses

import pytest

from vllm_flashinfer_vit.models import glm, kimi, llama4, pixtral, step_vl


def test_complex_rotary_is_of_interleaved_pairs() -> None:
    specs = (kimi.SPEC, pixtral.SPEC, pixtral.HF, llama4.SPEC, step_vl.SPEC)
    found = [spec.rotary.is_interleaved for spec in specs]
    assert found == [True, True, False, True, True]


def test_norms_of_q_and_k_in_front_of_interleaved_pairs() -> None:
    with pytest.raises(ValueError, match="interleaved"):
        dataclasses.replace(glm.SPEC, rotary=kimi.SPEC.rotary)

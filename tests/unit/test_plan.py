# SPDX-License-Identifier: Apache-2.0
"""Plans: their text, and which kernel serves which batch."""

import pytest

from vllm_flashinfer_vit.ops.plan import LEAST_MEAN_LEN, Class, Plan

_PLAN = Plan(
    (
        Class(128, "triton_window"),
        Class(1024, "triton"),
        Class(None, "flash_attn_4", "flash_attn"),
    )
)
_TEXT = "128:triton_window,1024:triton,*:flash_attn_4/flash_attn"


def test_a_plan_is_written_and_read() -> None:
    assert _PLAN.text == _TEXT
    assert Plan.decode(_TEXT) == _PLAN
    assert Plan.of("cudnn").text == "*:cudnn"


@pytest.mark.parametrize("text", ["", "128", "128:", "x:triton", "-1:triton"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no class of a plan"):
        Plan.decode(text)


def test_bounds_are_those_of_the_bounded_classes() -> None:
    assert _PLAN.bounds == (128, 1024)
    assert Plan.of("cudnn").bounds == ()


@pytest.mark.parametrize(
    ("max_len", "mean_len", "kernel"),
    [
        (1, None, "triton_window"),
        (128, None, "triton_window"),
        (129, None, "triton"),
        (1024, 1.0, "triton"),
        (1025, None, "flash_attn_4"),
        (1025, LEAST_MEAN_LEN, "flash_attn_4"),
        (1025, LEAST_MEAN_LEN - 1, "flash_attn"),
    ],
)
def test_a_batch_has_the_kernel_of_its_class(
    max_len: int, mean_len: float | None, kernel: str
) -> None:
    assert _PLAN.kernel_for(max_len, mean_len) == kernel


def test_short_sequences_without_a_length_count_as_few() -> None:
    """Sequences that all have the length are many only by their number of rows."""
    plan = Plan((Class(None, "flash_attn_4", "flash_attn"),))
    assert plan.kernel_for(LEAST_MEAN_LEN - 1) == "flash_attn"
    assert plan.kernel_for(LEAST_MEAN_LEN) == "flash_attn_4"


def test_a_length_beyond_every_class_is_an_error() -> None:
    plan = Plan((Class(128, "triton_window"),))
    with pytest.raises(ValueError, match="no class for 129 tokens"):
        plan.kernel_for(129)

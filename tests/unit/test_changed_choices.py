# SPDX-License-Identifier: Apache-2.0
"""What becomes of choices as a kernel is dropped, forced, or replaced by another."""

from collections.abc import Iterable
from typing import Any

import pytest

from vllm_flashinfer_vit.choices.lookup import (
    Choice,
    forced,
    plan_of,
    replaced,
    without,
)
from vllm_flashinfer_vit.kernels.catalog import KERNELS

CHOICES = (
    Choice("cudnn", 128, "short"),
    Choice("flash_attn", 1024, "middle"),
    Choice("cudnn", None, "long"),
)
MANY = (
    Choice("triton", 512, "short"),
    Choice("flash_attn_4", 768, "few", "flash_attn"),
    Choice("cudnn", None, "long"),
)


def text_of(choices: Iterable[Choice]) -> str:
    return plan_of(choices).text


def test_without_hands_the_classes_to_the_kernels_that_are_left() -> None:
    left = without(CHOICES, "cudnn")
    assert text_of(left) == "*:flash_attn"
    assert without(left, "flash_attn") == ()
    assert text_of(without(CHOICES, "flash_attn")) == "128:cudnn,*:cudnn"


def test_of_two_kernels_of_a_class_the_other_serves_it() -> None:
    after = without(MANY, "flash_attn")
    assert text_of(after) == "512:triton,768:flash_attn_4,*:cudnn"
    assert after[1].reason == "few"
    after = without(MANY, "flash_attn_4")
    assert text_of(after) == "512:triton,768:flash_attn,*:cudnn"
    assert after[1].reason == "flash_attn_4 would be faster, but cannot run here"
    assert text_of(without(after, "flash_attn")) == "512:triton,*:cudnn"


def test_without_gives_no_kernel_what_it_does_not_take() -> None:
    choices = (Choice("triton_window", 128, "short"), Choice("flash_attn", None, ""))
    assert without(choices, "flash_attn") == ()


def test_without_leaves_no_kernel_for_many_what_it_does_not_take() -> None:
    choices = (Choice("triton", 128, "", "triton_window"), Choice("cudnn", None, ""))
    assert text_of(without(choices, "cudnn")) == "*:triton"
    some = (Choice("flash_attn_4", 512, "", "flash_attn"), Choice("cudnn", None, ""))
    assert text_of(without(some, "cudnn")) == "*:flash_attn_4/flash_attn"
    # A class that is as it was keeps its own.
    choices = (*choices[:1], Choice("flash_attn", 512, ""), *choices[1:])
    left = text_of(without(choices, "cudnn"))
    assert left == "128:triton/triton_window,*:flash_attn"


@pytest.mark.parametrize("kernel", tuple(KERNELS))
def test_a_forced_kernel_gets_every_class_that_it_takes(kernel: Any) -> None:
    choices = forced(CHOICES, kernel)
    assert choices[0].kernel == kernel
    assert choices[-1].max_len is None
    if kernel == "triton_window":
        assert text_of(choices) == "128:triton_window,1024:flash_attn,*:cudnn"
    else:
        assert text_of(choices) == f"*:{kernel}"


def test_a_forced_kernel_serves_many_sequences_too() -> None:
    assert text_of(forced(MANY, "flash_attn_4")) == "*:flash_attn_4"
    # Classes that are left as they were keep theirs.
    longer = "512:triton,768:flash_attn_4/flash_attn,*:cudnn"
    assert text_of(forced(MANY, "triton_window")) == f"128:triton_window,{longer}"


def test_another_kernel_takes_over_the_classes_of_one() -> None:
    after = replaced(CHOICES, "cudnn", "triton")
    assert text_of(after) == "128:triton,1024:flash_attn,*:triton"
    assert after[1] == CHOICES[1]
    assert "in place of cudnn" in after[0].reason


def test_another_kernel_takes_over_the_many_sequences_of_one() -> None:
    choices = (Choice("flash_attn_4", None, "few", "hopper_fp8"),)
    (after,) = replaced(choices, "hopper_fp8", "triton_fp8")
    assert after == Choice("flash_attn_4", None, "few", "triton_fp8")

# SPDX-License-Identifier: Apache-2.0
"""The table of kernel choices and its encoding."""

import pytest

from vllm_flashinfer_vit.choices import Choice, choices_for, encode, select, without

TABLE = (
    Choice("cudnn", 128, "short"),
    Choice("flash_attn", 1024, "middle"),
    Choice("cudnn", None, "long"),
)


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_every_gpu_has_classes_that_ascend_to_no_bound(capability):
    choices = choices_for(capability)
    bounds = [choice.max_len for choice in choices]
    assert bounds[-1] is None
    assert None not in bounds[:-1]
    assert bounds[:-1] == sorted(set(bounds[:-1]))
    assert all(choice.reason for choice in choices)


def test_no_gpu_means_the_reference_kernel():
    assert [choice.kernel for choice in choices_for(None)] == ["reference"]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 1)])
def test_gpus_that_nobody_measured_are_said_to_be_unmeasured(capability):
    assert all("unmeasured" in c.reason for c in choices_for(capability))


@pytest.mark.parametrize(
    ("length", "kernel"),
    [
        (1, "cudnn"),
        (128, "cudnn"),
        (129, "flash_attn"),
        (1024, "flash_attn"),
        (1025, "cudnn"),
        (10**6, "cudnn"),
    ],
)
def test_select_takes_the_first_class_that_holds_the_length(length, kernel):
    assert select(encode(TABLE), length) == kernel


def test_encode_is_readable():
    assert encode(TABLE) == "128:cudnn,1024:flash_attn,*:cudnn"


def test_without_hands_the_classes_to_the_kernels_that_are_left():
    left = without(TABLE, "cudnn")
    assert encode(left) == "*:flash_attn"
    assert without(left, "flash_attn") == ()
    assert encode(without(TABLE, "flash_attn")) == "128:cudnn,*:cudnn"

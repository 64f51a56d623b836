# SPDX-License-Identifier: Apache-2.0
"""How measurements become classes."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")


from vllm_flashinfer_vit.choices.derive import (
    TuneError,
    derive_classes,
    derive_without,
)
from vllm_flashinfer_vit.choices.table import Measurement
from vllm_flashinfer_vit.ops.plan import Class


def rows(times: Mapping[int, Mapping[str, float]], count: int = 1) -> list[Measurement]:
    return [Measurement("bfloat16", 80, n, count, us) for n, us in times.items()]


def classes(times: Mapping[int, Mapping[str, float]]) -> list[tuple[int | None, str]]:
    found = derive_classes(rows(times))
    assert all(c.many is None for c in found)
    return [(c.max_len, c.kernel) for c in found]


def test_each_length_gets_its_fastest_kernel() -> None:
    assert classes(
        {
            64: {"triton_window": 5, "flash_attn": 9},
            128: {"triton_window": 6, "flash_attn": 9},
            256: {"cudnn": 8, "flash_attn": 10},
            512: {"cudnn": 15, "flash_attn": 10},
        }
    ) == [(128, "triton_window"), (256, "cudnn"), (None, "flash_attn")]


def test_lengths_may_come_in_any_order() -> None:
    times = {256: {"cudnn": 8, "flash_attn": 10}, 64: {"cudnn": 20, "flash_attn": 10}}
    assert classes(times) == [(64, "flash_attn"), (None, "cudnn")]


def test_a_near_tie_joins_the_class_below() -> None:
    assert classes(
        {
            64: {"reference": 10, "flash_attn": 20},
            128: {"reference": 10.1, "flash_attn": 10},
            256: {"reference": 20, "flash_attn": 10},
        }
    ) == [(128, "reference"), (None, "flash_attn")]


def test_a_near_tie_joins_the_class_above() -> None:
    assert classes(
        {
            64: {"reference": 10, "flash_attn": 10.1},
            128: {"reference": 20, "flash_attn": 10},
        }
    ) == [(None, "flash_attn")]


def test_beyond_a_tie_a_class_is_split() -> None:
    assert classes(
        {
            64: {"reference": 10, "flash_attn": 20},
            128: {"reference": 10.3, "flash_attn": 10},
            256: {"reference": 10, "flash_attn": 20},
        }
    ) == [(64, "reference"), (128, "flash_attn"), (None, "reference")]


def test_of_kernels_that_share_a_class_the_faster_one_wins() -> None:
    assert classes(
        {
            64: {"reference": 10, "flash_attn": 10.1},
            128: {"reference": 10.1, "flash_attn": 10},
            256: {"reference": 10.1, "flash_attn": 10},
        }
    ) == [(None, "flash_attn")]


@pytest.mark.parametrize(
    ("cudnn", "kernel"), [(9.6, "flash_attn"), (9.51, "cudnn"), (9.5, "cudnn")]
)
def test_cudnn_must_win_by_five_percent(cudnn: float, kernel: str) -> None:
    # 10 / 1.05 is 9.524.
    assert classes({64: {"cudnn": cudnn, "flash_attn": 10}}) == [(None, kernel)]


def test_a_tie_does_not_give_cudnn_more() -> None:
    assert classes(
        {
            64: {"cudnn": 5, "flash_attn": 10},
            128: {"cudnn": 9.6, "flash_attn": 10},
        }
    ) == [(64, "cudnn"), (None, "flash_attn")]


def test_counts_weigh_alike_by_their_ratios() -> None:
    few = rows({64: {"reference": 1, "flash_attn": 3}}, 1)
    many = rows({64: {"reference": 2000, "flash_attn": 1000}}, 1024)
    assert derive_classes(few + many) == (Class(None, "reference"),)


@pytest.mark.parametrize(
    ("alone", "kernel"), [(9, "hopper_fp8"), (10.1, "flash_attn"), (12, "flash_attn")]
)
def test_fp8_must_pay_for_every_count(alone: float, kernel: str) -> None:
    few = rows({64: {"hopper_fp8": alone, "flash_attn": 10, "triton": 11}}, 1)
    many = rows({64: {"hopper_fp8": 60, "flash_attn": 110, "triton": 100}}, 16)
    assert derive_classes(few + many) == (Class(None, kernel),)


@pytest.mark.parametrize(
    ("alone", "kernel"), [(9.6, "flash_attn"), (9.51, "cudnn_fp8")]
)
def test_fp8_by_cudnn_must_win_by_five_percent_for_every_count(
    alone: float, kernel: str
) -> None:
    few = rows({64: {"cudnn_fp8": alone, "flash_attn": 10}}, 1)
    many = rows({64: {"cudnn_fp8": 50, "flash_attn": 100}}, 16)
    assert derive_classes(few + many) == (Class(None, kernel),)


def test_fp8_alone_has_nothing_to_pay_for() -> None:
    assert classes({64: {"hopper_fp8": 9, "triton_fp8": 12}}) == [(None, "hopper_fp8")]


def test_a_kernel_must_have_run_every_batch_of_a_length() -> None:
    few = rows({64: {"reference": 1, "flash_attn": 3}}, 1)
    many = rows({64: {"flash_attn": 3}}, 4)
    assert derive_classes(few + many) == (Class(None, "flash_attn"),)


def test_many_sequences_have_the_fastest_kernel_that_suits_them() -> None:
    times = {
        64: {"flash_attn_4": 9, "flash_attn": 10, "triton": 12, "triton_fp8": 9.5},
        128: {"flash_attn_4": 9, "flash_attn": 14, "triton": 11, "cudnn": 9.5},
        256: {"flash_attn_4": 20, "flash_attn": 10, "triton": 11},
    }
    # Over both lengths, and without cuDNN, which did not run at the first one.
    assert derive_classes(rows(times)) == (
        Class(128, "flash_attn_4", "triton"),
        Class(None, "flash_attn"),
    )
    assert derive_classes(rows({64: times[64]})) == (
        Class(None, "flash_attn_4", "flash_attn"),
    )
    alone = {64: {"flash_attn_4": 9, "triton_window": 10}}
    assert derive_classes(rows(alone)) == (Class(None, "flash_attn_4"),)


def test_without_a_kernel_only_the_entrys_measurements_count() -> None:
    own = {"triton": 1.0, "flash_attn": 2.0, "reference": 3.0}
    other = {"flash_attn": 9.0, "reference": 1.0}
    measured = [
        Measurement(dtype, head_dim, 64, 1, us)
        for dtype, head_dim, us in (
            ("bfloat16", 80, own),
            ("bfloat16", 128, other),
            ("float16", 80, other),
        )
    ]
    table: Any = SimpleNamespace(measurements=measured)
    found = derive_without(table, "bfloat16", 80, {"triton"})
    assert found == (Class(None, "flash_attn"),)
    assert derive_without(table, "bfloat16", 80, own) is None


def test_the_last_class_has_a_kernel_for_any_length() -> None:
    window = {"triton_window": 5.0}
    both = {"triton_window": 5.0, "flash_attn": 9.0}
    assert classes({64: both}) == [(None, "flash_attn")]
    assert classes({64: both, 96: both, 128: window}) == [
        (64, "triton_window"),
        (None, "flash_attn"),
    ]
    with pytest.raises(TuneError, match="any length"):
        classes({64: window})
    with pytest.raises(TuneError, match="any length"):
        derive_classes([])

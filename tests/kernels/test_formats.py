# SPDX-License-Identifier: Apache-2.0
"""What needs no Triton runs without it; what kernels are given is checked."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vllm_flashinfer_vit.kernels
from vllm_flashinfer_vit.kernels.formats import (
    E4M3_MAX,
    FP32_TINY,
    HISTORY,
    MIN_GROUP_SCALE,
    MIN_ROW_SCALE,
    DeviceScales,
    check_blocks,
    check_number_of_terms,
    check_rope_inputs,
    check_row_scales,
    check_sum_norm_inputs,
    num_groups,
    qk_max,
)

FOLDER = Path(vllm_flashinfer_vit.kernels.__file__).parent


def test_references_need_no_triton() -> None:
    names = ["formats", "buckets", *(path.stem for path in FOLDER.glob("*_ref.py"))]
    assert "attention_ref" in names
    code = "import sys; sys.modules['triton'] = None\n" + "".join(
        f"import vllm_flashinfer_vit.kernels.{name}\n" for name in names
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("head_dim", range(32, 129, 8))
def test_sums_of_the_largest_products_fit_fp16(head_dim: int) -> None:
    largest = qk_max(head_dim)
    assert torch.tensor(largest).to(torch.float8_e4m3fn).item() == largest
    most = torch.finfo(torch.float16).max
    assert largest**2 * head_dim <= most
    # What is quantised must not depend on which kernels take a head dim.
    assert largest == 28 or (largest + 2) ** 2 * head_dim > most


def test_limits_are_those_of_the_formats_and_of_vllm():
    from vllm.model_executor.layers.attention import mm_encoder_attention
    from vllm.model_executor.layers.quantization import input_quant_fp8
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    assert torch.finfo(torch.float8_e4m3fn).max == E4M3_MAX
    assert torch.finfo(torch.float32).tiny == FP32_TINY
    assert mm_encoder_attention._FP8_AMAX_HISTORY_LEN == HISTORY
    assert input_quant_fp8._FP8_MIN_SCALING_FACTOR == MIN_ROW_SCALE
    by_groups = inspect.signature(fp8_utils.per_token_group_quant_fp8)
    assert by_groups.parameters["eps"].default / E4M3_MAX == MIN_GROUP_SCALE


@pytest.fixture
def bf16_by_default():
    """As while vLLM builds a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def test_state_of_a_layer_that_has_seen_nothing(bf16_by_default):
    state = DeviceScales.on("meta")
    assert {x.device.type for x in state} == {"meta"}
    forms = {name: (tuple(x.shape), x.dtype) for name, x in state._asdict().items()}
    assert forms == {
        "amax": ((3,), torch.float32),
        "history": ((16, 3), torch.float32),
        "position": ((1,), torch.int32),
        "scales": ((3,), torch.float32),
        "clip_counts": ((2, 3), torch.int64),
    }


def ones(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize("head_dim", [65, 72, 80])
def test_blocks_that_fit(head_dim):
    # 130 tokens of two sequences need three blocks.
    q, v = ones(2, 384, 96), ones(1, 80, 384)
    assert check_blocks(q, v, 130, 2, head_dim, 0.1) == 3


@pytest.mark.parametrize(
    ("rows", "head_dim", "scale", "message"),
    [
        (256, 72, 0.1, "130 tokens, 2 sequences and head dim 72"),
        (512, 72, 0.1, "130 tokens, 2 sequences and head dim 72"),
        (384, 64, 0.1, "head dim 64"),
        (384, 81, 0.1, "head dim 81"),
        (384, 72, 0.0, "above 0, got 0"),
        (384, 72, float("nan"), "above 0, got nan"),
    ],
)
def test_blocks_that_do_not(rows, head_dim, scale, message):
    with pytest.raises(ValueError, match=message):
        check_blocks(ones(2, rows, 96), ones(1, 80, rows), 130, 2, head_dim, scale)


ROPE = {"q": ones(8, 4, 64), "k": ones(8, 2, 64), "cos": ones(8, 32)}


@pytest.mark.parametrize("half", [1, 16, 32])
def test_rotary_of_a_part_of_a_head(half):
    check_rope_inputs(**ROPE | {"cos": ones(8, half)}, sin=ones(8, half))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": ones(8, 4, 64, 1)}, "q and k"),
        ({"k": ones(8, 2, 64, 1)}, "q and k"),
        ({"k": ones(7, 2, 64)}, "q and k"),
        ({"k": ones(8, 2, 32)}, "q and k"),
        ({"cos": ones(8, 32, 1), "sin": ones(8, 32, 1)}, "cos and sin"),
        ({"cos": ones(7, 32), "sin": ones(7, 32)}, "cos and sin"),
        ({"cos": ones(8, 33), "sin": ones(8, 33)}, "T=8 and R <= 64"),
        ({"cos": ones(8, 0), "sin": ones(8, 0)}, "cos and sin"),
        ({"cos": ones(8, 31)}, "cos and sin"),
    ],
)
def test_rotary_that_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        check_rope_inputs(**{**ROPE, "sin": ones(8, 32), **changes})


def test_sums_have_two_or_three_terms():
    for count in (2, 3):
        check_number_of_terms([ones(4)] * count)
    for count in (0, 1, 4):
        with pytest.raises(ValueError, match=f"got {count}"):
            check_number_of_terms([ones(4)] * count)


@pytest.mark.parametrize("shape", [(4,), (7, 4), (2, 7, 4)])
@pytest.mark.parametrize("bias", [ones(4), None])
@pytest.mark.parametrize("scales", [0, 1])
def test_sums_that_fit(shape, bias, scales):
    check_sum_norm_inputs([ones(*shape)] * 2, ones(4), bias, [ones(4)] * scales)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"terms": [ones(7, 4), ones(6, 4)]}, "terms must be"),
        ({"terms": [ones(7, 4), ones(7, 4).half()]}, "terms must be"),
        ({"terms": [ones(), ones()], "weight": ones(), "bias": None}, "terms must be"),
        ({"weight": ones(1, 4)}, r"must be \[4\], got \(1, 4\)"),
        ({"weight": ones(3), "bias": None}, r"got \(3,\) and None"),
        ({"bias": ones(3)}, r"must be \[4\], got \(4,\) and \(3,\)"),
        ({"layer_scales": [ones(4)] * 2}, r"or 1 of \[4\]"),
        ({"layer_scales": [ones(3)]}, r"got \[\(3,\)\]"),
    ],
)
def test_sums_that_do_not(changes, message):
    given = {"terms": [ones(7, 4)] * 2, "weight": ones(4), "bias": ones(4)}
    with pytest.raises(ValueError, match=message):
        check_sum_norm_inputs(**{**given, "layer_scales": [], **changes})


def test_groups_of_a_row():
    found = [num_groups(columns) for columns in (1, 128, 129, 256, 257)]
    assert found == [1, 1, 2, 2, 3]


# Six rows of two groups each, the second one short.
ROWS = ones(2, 3, 200).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("scales", "form"),
    [
        (ones(), "one"),
        (ones(1), "one"),
        (ones(6, 1), "own"),
        (ones(2, 6).t(), "groups"),
    ],
)
def test_forms_of_scales(scales, form):
    assert check_row_scales(ROWS, scales) == form


def test_a_scale_of_one_row_is_its_own():
    """It is written, and one for all is read."""
    assert check_row_scales(ROWS[0, :1], ones(1, 1)) == "own"


@pytest.mark.parametrize(
    ("rows", "scales"),
    [
        (ROWS, ones(0)),
        (ROWS, ones(2)),
        (ROWS, ones(1, 1)),
        (ROWS, ones(5, 1)),
        (ROWS, ones(6)),
        (ROWS, ones(6, 2)),
        (ROWS, ones(3, 6).t()),
        (ROWS, ones(2, 7).t()),
        (ROWS, ones(6, 1).double()),
        (ROWS.float(), ones(6, 1)),
        (ROWS.view(torch.float8_e5m2), ones(6, 1)),
    ],
)
def test_scales_in_no_form(rows, scales):
    with pytest.raises(ValueError, match=r"one or \[6, 1\] or, .* \[6, 2\], got"):
        check_row_scales(rows, scales)

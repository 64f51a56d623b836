# SPDX-License-Identifier: Apache-2.0
"""Rows in e4m3 with a scale for each group of 128 values, by all that write any."""

import pytest
import torch
from _rows import DEVICE, group_scales

from cases import relative_error
from vllm_flashinfer_vit.choices.clock import capture
from vllm_flashinfer_vit.kernels.act_quantize import act_quantize, prepare
from vllm_flashinfer_vit.kernels.act_quantize_ref import act_ref
from vllm_flashinfer_vit.kernels.add_norm import prepare as prepare_sum
from vllm_flashinfer_vit.kernels.add_norm import sum_norm
from vllm_flashinfer_vit.kernels.add_norm_ref import sum_norm_ref
from vllm_flashinfer_vit.kernels.formats import MIN_GROUP_SCALE, check_row_scales
from vllm_flashinfer_vit.kernels.row_scales_ref import quantize_rows_ref

pytestmark = pytest.mark.usefixtures("nan_empty", "exact_fp8")

E4M3 = torch.float8_e4m3fn
# Triton's interpreter truncates when it converts to bf16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# MLPs of Qwen2-VL and Qwen3-VL, widths of towers, and what ends in a short group, in a
# part of a row or as one.
WIDTHS = [5120, 4304, 1280, 1152, 129, 200, 400]
EPS = 1e-6


def draw(*shape, dtype=torch.float16, seed=0):
    """Groups whose largest values are far apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.logspace(-2, 1, shape[-1])
    return x.to(DEVICE, dtype)


def exact_groups(x):
    """Each group's rows and scale, one after the other, in fp64."""
    rows, scales = [], []
    for group in x.double().split(128, -1):
        scale = (group.abs().amax(-1, keepdim=True) / 448).clamp(min=MIN_GROUP_SCALE)
        rows.append(group / scale)
        scales.append(scale)
    return torch.cat(rows, -1), torch.cat(scales, -1)


def assert_grouped(rows, scales, x):
    """Rows and scales are those of fp64, but for what falls to the other side."""
    expected, expected_scales = exact_groups(x)
    torch.testing.assert_close(scales.double(), expected_scales, rtol=1e-5, atol=0)
    found, rounded = rows.double(), expected.to(torch.float32).to(E4M3).double()
    # Half a unit of e4m3, whose fraction has three bits, and what fp32 is off.
    assert ((found - expected).abs() <= 0.0626 * expected.abs() + 2.0**-10).all()
    assert (found != rounded).double().mean() < 2e-3


def quantized(x, activation=None, bias=None):
    width = x.shape[1] // 2 if activation == "swiglu" else x.shape[1]
    rows = torch.full((len(x), width), float("nan"), device=DEVICE).to(E4M3)
    scales = group_scales(len(x), width)
    act_quantize(x, width, bias, activation, rows, scales)
    return rows, scales


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_quantized_by_groups(width, dtype):
    x = draw(5, width, dtype=dtype)
    rows, scales = quantized(x)
    assert_grouped(rows, scales, x)
    again, again_scales = quantized(x)
    assert torch.equal(again.view(torch.uint8), rows.view(torch.uint8))
    assert torch.equal(again_scales, scales)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("width", [4304, 200])
@pytest.mark.parametrize("activation", ["swiglu", "quick_gelu", "tanh_gelu", "gelu"])
def test_activations_are_quantized_by_groups(activation, width, has_bias):
    columns = width * (1 + (activation == "swiglu"))
    x = draw(3, columns, dtype=torch.float32)
    bias = draw(columns, seed=1, dtype=torch.float32) if has_bias else None
    exact = act_ref(x.double(), width, bias, activation)
    rows, scales = quantized(x, activation, bias)
    assert_grouped(rows, scales, exact)


@pytest.mark.parametrize("num_terms", [2, 3])
@pytest.mark.parametrize("has_bias", [True, False], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("width", [1280, 1152, 200])
def test_norms_are_quantized_by_groups(width, has_bias, num_terms):
    terms = [draw(4, width, dtype=torch.float32, seed=at) for at in range(num_terms)]
    weight = draw(width, dtype=torch.float32, seed=8)
    bias = draw(width, dtype=torch.float32, seed=9) if has_bias else None
    scales = group_scales(4, width)
    total, rows = sum_norm(terms, weight, bias, EPS, True, scales)
    _, exact = sum_norm_ref(terms, weight, bias, EPS, True)
    assert_grouped(rows, scales, exact)
    assert relative_error(total, sum(terms)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_reference_is_as_exact(width, dtype):
    x = draw(5, width, dtype=dtype)
    rows, scales = torch.empty_like(x, dtype=E4M3), group_scales(5, width)
    quantize_rows_ref(x, rows, scales)
    assert_grouped(rows, scales, x)


@pytest.mark.parametrize("count", [0, 1])
def test_few_rows(count):
    x = draw(count, 400)
    rows, scales = quantized(x)
    assert tuple(scales.shape) == (count, 4)
    assert_grouped(rows, scales, x) if count else None
    stream, weight = draw(count, 1280), draw(1280)
    scales = group_scales(count, 1280)
    _, rows = sum_norm((stream, stream), weight, None, EPS, False, scales)
    assert len(rows) == count and not scales.isnan().any()


def test_rows_of_any_stride():
    x = draw(6, 400)
    rows, scales = quantized(x[::2])
    expected, expected_scales = quantized(x[::2].clone())
    assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_groups_stay_apart():
    """What is no number in a group is seen there, and nowhere else."""
    x = draw(3, 400)
    rows, scales = quantized(x)
    x[1, 130], x[2, 399] = float("nan"), float("inf")
    after, after_scales = quantized(x)
    kept = torch.ones_like(rows, dtype=torch.bool)
    kept[1, 128:256] = kept[2, 384:] = False
    assert torch.equal(after.view(torch.uint8)[kept], rows.view(torch.uint8)[kept])
    same = scales == after_scales
    assert (
        same.sum() >= 10 and same[0].all() and same[1, 2:].all() and same[2, :3].all()
    )
    assert after.float()[1, 130].isnan() and after.float()[2, 399].isnan()


def test_zeros_and_small_values():
    x = torch.zeros(1, 400, device=DEVICE)
    x[0, 128:256] = 1e-5
    x[0, 256:384] = 1e-12
    rows, scales = quantized(x)
    assert scales[0, 0] == scales[0, 2] == torch.tensor(MIN_GROUP_SCALE)
    assert not rows[0, :128].float().any() and not rows[0, 384:].float().any()
    # vLLM's least scale of a whole row would leave 2 here.
    assert (rows[0, 128:256].float() == 448).all()


def test_a_row_of_one_group_has_a_scale_of_its_own():
    rows = torch.empty(5, 96, dtype=E4M3)
    assert check_row_scales(rows, torch.ones(1, 5).t()) == "own"


def test_what_it_cannot_write():
    x = draw(4, 400)
    rows = torch.empty_like(x, dtype=E4M3)
    for scales in (
        torch.empty(4, 4, device=DEVICE)[:, :3],
        torch.empty(4, 5, device=DEVICE).t()[:4].t(),
        torch.empty(4, 4, device=DEVICE)[:3],
        torch.empty(4, 8, device=DEVICE)[:, ::2],
        group_scales(4, 400).double(),
    ):
        with pytest.raises(ValueError, match=r"contiguous columns, \[4, 4\]"):
            act_quantize(x, 400, None, None, rows, scales)
    row_major = torch.empty(5, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"contiguous columns, \[5, 4\]"):
        act_quantize(draw(5, 400), 400, None, None, rows.new_empty(5, 400), row_major)


def test_settled_calls():
    x = draw(5, 400)
    rows = torch.empty_like(x, dtype=E4M3)
    call = prepare(x, 400, None, None, rows, group_scales(5, 400))
    stream, weight = draw(5, 1280), draw(1280, seed=3)
    normed = torch.empty_like(stream, dtype=E4M3)
    given = stream, (stream,), weight, None, EPS, normed
    settled = prepare_sum(*given, group_scales(5, 1280))
    for seed in (1, 2):
        x.copy_(draw(5, 400, seed=seed))
        scales = group_scales(5, 400)
        call(None, scales)
        expected, expected_scales = quantized(x)
        assert torch.equal(rows.float(), expected.float())
        assert torch.equal(scales, expected_scales)
        new, scales = draw(5, 1280, seed=seed), group_scales(5, 1280)
        settled(new, new, new, weight, weight, new, scales)
        expected_scales = group_scales(5, 1280)
        _, found = sum_norm((new, new), weight, None, EPS, False, expected_scales)
        assert torch.equal(normed.float(), found.float())
        assert torch.equal(scales, expected_scales)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_in_a_graph(rows, dtype):
    width = 4304
    x, stream = draw(rows, width, dtype=dtype), draw(rows, 1152, dtype=dtype)
    weight = draw(1152, dtype=dtype, seed=3)
    out, scales = torch.empty_like(x, dtype=E4M3), group_scales(rows, width)
    norm_scales = group_scales(rows, 1152)

    def run():
        act_quantize(x, width, None, "tanh_gelu", out, scales)
        return sum_norm((stream, stream), weight, None, EPS, False, norm_scales)[1]

    replay = capture(run)
    for seed in (1, 2):
        x.copy_(draw(rows, width, dtype=dtype, seed=seed))
        stream.copy_(draw(rows, 1152, dtype=dtype, seed=seed))
        found = replay()
        expected, expected_scales = quantized(x, "tanh_gelu")
        assert torch.equal(out.float(), expected.float())
        assert torch.equal(scales, expected_scales)
        expected_scales = group_scales(rows, 1152)
        terms = stream, stream
        _, expected = sum_norm(terms, weight, None, EPS, False, expected_scales)
        assert torch.equal(found.float(), expected.float())
        assert torch.equal(norm_scales, expected_scales)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_int32_elements():
    rows = 2**31 // 5120 + 64
    x = torch.ones(rows, 5120, dtype=torch.bfloat16, device="cuda")
    x[0] = x[-1] = torch.arange(5120)
    found, scales = quantized(x)
    assert torch.equal(found[0].float(), found[-1].float())
    assert torch.equal(scales[0], scales[-1])
    assert_grouped(found[-64:], scales[-64:], x[-64:])

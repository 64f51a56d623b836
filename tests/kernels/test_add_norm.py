# SPDX-License-Identifier: Apache-2.0
"""One kernel adds two or three terms and normalizes their sum."""

import pytest
import torch
from _add_norm import DEVICE, EPS, draw_layer_scales, make_bound, make_inputs
from _rows import LEAST, assert_quantized, distance, row_scales
from torch.nn.functional import layer_norm

from cases import relative_error
from vllm_flashinfer_vit.kernels.add_norm import MAX_WIDTH, prepare, sum_norm
from vllm_flashinfer_vit.kernels.add_norm_ref import sum_norm_ref

pytestmark = pytest.mark.usefixtures("nan_empty")

# Triton's interpreter truncates when it converts to bf16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# Qwen3-VL's small and large towers, Qwen2-VL's, and what fills no block.
WIDTHS = [1024, 1152, 1280, 64, 100, 1]


@pytest.fixture(params=[2, 3], ids="{} terms".format)
def num_terms(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["LayerNorm", "RMSNorm"])
def has_bias(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["kept", "norm only"])
def keep_sum(request):
    return request.param


def assert_exact(terms, weight, bias, keep_sum: bool, scales=None) -> None:
    """At most half a unit off for the one rounding, and what fp32 itself is off."""
    total, normed = sum_norm(terms, weight, bias, EPS, keep_sum, scales)
    exact = sum(term.double() for term in terms)
    eps = torch.finfo(torch.float32).eps
    if keep_sum:
        assert_rounded(total, exact, 2 * eps * exact.abs().max())
    else:
        assert total is None
    if bias is None:
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + EPS)
        exact = exact * weight.double()
    else:
        exact = layer_norm(exact, weight.shape, weight.double(), bias.double(), EPS)
    if scales is not None:
        assert normed.shape == terms[0].shape
        assert_quantized(normed, scales, exact, 16 * eps)
        return
    assert_rounded(normed, exact, 16 * eps * exact.abs().max())
    assert (normed.dtype, normed.shape) == (terms[0].dtype, terms[0].shape)


def assert_rounded(found: torch.Tensor, exact: torch.Tensor, slack) -> None:
    unit = torch.finfo(found.dtype).eps
    assert ((found.double() - exact).abs() <= unit / 2 * exact.abs() + slack).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_sum_norm(width, dtype, num_terms, has_bias, keep_sum):
    assert_exact(
        *make_inputs(7, 1, width, num_terms=num_terms, has_bias=has_bias, dtype=dtype),
        keep_sum,
    )


@pytest.mark.parametrize("given", [None, 0.02], ids=["own", "one"])
@pytest.mark.parametrize("width", [1152, 1280, 100, 1])
def test_in_e4m3(width, num_terms, has_bias, keep_sum, given):
    scales = row_scales(7, given)
    inputs = make_inputs(7, 1, width, num_terms=num_terms, has_bias=has_bias)
    assert_exact(*inputs, keep_sum, scales)
    expected_scales = row_scales(7, given)
    expected = sum_norm_ref(*inputs, EPS, keep_sum, expected_scales)[1]
    torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0)
    found = sum_norm(*inputs, EPS, keep_sum, scales)[1].float()
    # They may fall to either side of a boundary.
    off = distance(found, expected.float())
    assert (off <= expected.float().abs() / 8 + LEAST).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1024, 100])
def test_branches_with_layer_scales(width, dtype, num_terms, has_bias, keep_sum):
    kinds = {"num_terms": num_terms, "has_bias": has_bias, "dtype": dtype}
    inputs = make_inputs(7, 1, width, **kinds)
    scaled = draw_layer_scales(num_terms, width, dtype)
    found = sum_norm(*inputs, EPS, keep_sum, layer_scales=scaled)
    expected = sum_norm_ref(*inputs, EPS, keep_sum, layer_scales=scaled)
    x, *branches = (term.double() for term in inputs[0])
    exact = x + sum(b * s.double() for b, s in zip(branches, scaled, strict=True))
    if keep_sum:
        eps = torch.finfo(torch.float32).eps
        assert_rounded(found[0], exact, 4 * eps * exact.abs().max())
    unit = torch.finfo(dtype).eps
    for one, right in zip(found, expected, strict=True):
        if right is not None:
            atol = 16 * torch.finfo(torch.float32).eps * right.abs().max().item()
            torch.testing.assert_close(one, right, rtol=unit, atol=atol)


def test_settled_calls_take_other_layer_scales(num_terms, has_bias):
    kinds = {"num_terms": num_terms, "has_bias": has_bias}
    terms, weight, bias = make_inputs(7, 64, **kinds)
    x, *branches = terms
    for given in (None, 0.5):
        rows = torch.float8_e4m3fn if given else x.dtype
        normed, total = torch.empty_like(x, dtype=rows), torch.empty_like(x)
        scales = row_scales(7, given) if given else None
        first = draw_layer_scales(num_terms, 64)
        arguments = x, tuple(branches), weight, bias, EPS, normed, scales, first
        call = prepare(*arguments)
        for seed in (1, 2):
            scaled = draw_layer_scales(num_terms, 64, seed=seed)
            last = [scales] if given else []
            read = branches[0], branches[-1], weight, weight if bias is None else bias
            call(x, *read, total, *last, *scaled)
            expected = sum_norm(
                terms, weight, bias, EPS, num_terms == 3, scales, scaled
            )
            assert torch.equal(normed.float(), expected[1].float())
            if num_terms == 3:
                assert torch.equal(total, expected[0])


@pytest.mark.parametrize("function", [sum_norm, sum_norm_ref])
def test_layer_scales_that_do_not_fit(function):
    terms, weight, bias = make_inputs(7, 64)
    for scaled in ([weight], [weight, weight[:8]], [weight] * 3):
        with pytest.raises(ValueError, match="layer scales must be"):
            function(terms, weight, bias, EPS, True, None, scaled)


def test_settled_calls_take_other_scales(num_terms, has_bias):
    kinds = {"num_terms": num_terms, "has_bias": has_bias}
    terms, weight, bias = make_inputs(7, 64, **kinds)
    x, *branches = terms
    normed = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    for given in (None, 0.5):
        scales = row_scales(7, given)
        call = prepare(x, tuple(branches), weight, bias, EPS, normed, scales)
        for at in (1, 2):
            scales = row_scales(7, given and given * at)
            total = torch.empty_like(x)
            ends = branches[0], branches[-1]
            call(x, *ends, weight, weight if bias is None else bias, total, scales)
            expected_scales = row_scales(7, given and given * at)
            expected = sum_norm(
                terms, weight, bias, EPS, num_terms == 3, expected_scales
            )
            assert torch.equal(normed.float(), expected[1].float())
            assert torch.equal(scales, expected_scales)


def test_scales_of_other_shapes_are_refused():
    terms, weight, bias = make_inputs(4, 64)
    for scales in (torch.ones(3, 1), torch.ones(4), torch.ones(4, 1).double()):
        with pytest.raises(ValueError, match=r"one or \[4, 1\]"):
            sum_norm(terms, weight, bias, EPS, True, scales.to(DEVICE))
    rows = torch.empty_like(terms[0], dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="norm must be"):
        prepare(terms[0], tuple(terms[1:]), weight, bias, EPS, rows)


def test_sum_norm_ref(num_terms, has_bias, keep_sum):
    inputs = make_inputs(5, 1152, num_terms=num_terms, has_bias=has_bias)
    found = sum_norm(*inputs, EPS, keep_sum)
    expected = sum_norm_ref(*inputs, EPS, keep_sum)
    assert relative_error(found[1], expected[1]) < 1e-5
    if keep_sum:
        assert torch.equal(found[0], expected[0])
    else:
        assert found[0] is expected[0] is None


def test_a_sum_of_three_is_rounded_once():
    x = torch.full((1, 64), 1024.0, dtype=torch.float16, device=DEVICE)
    # Half a unit of 1024: two roundings to even would lose both.
    branch = torch.full_like(x, 0.5)
    weight = torch.ones(64, dtype=torch.float16, device=DEVICE)
    total, _ = sum_norm((x, branch, branch), weight, None, EPS, True)
    assert torch.equal(total, x + 1)
    assert torch.equal(x + branch + branch, x)


def test_parameters_in_fp32():
    terms, weight, bias = make_inputs(3, 1280)
    assert_exact(terms, weight.float(), bias.float(), True)


def test_the_norm_of_equal_values_is_the_bias():
    x = torch.full((2, 1152), 5.0, dtype=torch.float16, device=DEVICE)
    _, weight, bias = make_inputs(2, 1152)
    total, normed = sum_norm((x, x), weight, bias, EPS, True)
    assert torch.equal(total, 2 * x)
    # On a GPU the mean may be off by an ulp, which 1 / sqrt(EPS) enlarges.
    atol = 1e-3 if DEVICE == "cuda" else 0.0
    torch.testing.assert_close(normed, bias.expand(2, -1), atol=atol, rtol=0)


def test_rows_stay_apart(num_terms, has_bias):
    terms, weight, bias = make_inputs(4, 1152, num_terms=num_terms, has_bias=has_bias)
    bounds = make_bound(4), make_bound(4)
    before = sum_norm(terms, weight, bias, EPS, True, bound=bounds[0])
    terms[0][1] = float("nan")
    terms[-1][2] = float("inf")
    after = sum_norm(terms, weight, bias, EPS, True, bound=bounds[1])
    for new, old in zip(after, before, strict=True):
        assert torch.equal(new[::3], old[::3])
    assert after[1][1].isnan().all()
    new, old = bounds[1].scales, bounds[0].scales
    assert torch.equal(new[::3], old[::3]) and not old.isnan().any()


def test_no_rows_give_none():
    total, normed = sum_norm(*make_inputs(0, 1, 1152), EPS, True)
    assert total.shape == normed.shape == (0, 1, 1152)


def test_what_it_cannot_read():
    (x, first, second), weight, bias = make_inputs(4, 64)
    for terms, w, b, message in [
        ((x, first[:3]), weight, bias, "one shape and dtype"),
        ((x, first, second.double()), weight, bias, "one shape and dtype"),
        ((x, first, second, x), weight, bias, "two or three"),
        ((x, first), weight[:63], bias, r"must be \[64\]"),
        ((x, first), weight, bias[:63], r"must be \[64\]"),
        ((x.T.contiguous().T, first), weight, None, "contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            sum_norm(terms, w, b, EPS, True)
    with pytest.raises(ValueError, match=f"1 to {MAX_WIDTH} values"):
        sum_norm(*make_inputs(1, MAX_WIDTH + 1), EPS, True)


def settle(terms, weight, bias, normed):
    """Return a settled call as one of its terms, and what it writes the sum to."""
    x, *branches = terms
    settled = prepare(x, tuple(branches), weight, bias, EPS, normed)
    total = torch.full_like(x, float("nan"))

    def call(x, *branches):
        both = branches[0], branches[-1]
        settled(x, *both, weight, weight if bias is None else bias, total)

    return call, total


@pytest.mark.parametrize("in_place", [False, True])
def test_a_settled_call(num_terms, has_bias, in_place):
    kinds = {"num_terms": num_terms, "has_bias": has_bias}
    terms, weight, bias = make_inputs(7, 1152, **kinds)
    normed = terms[-1] if in_place else torch.empty_like(terms[-1])
    call, total = settle(terms, weight, bias, normed)
    for seed in (1, 2):
        # A stream and branches elsewhere.
        new, *_ = make_inputs(7, 1152, **kinds, seed=seed)
        expected = sum_norm(new, weight, bias, EPS, num_terms == 3)
        if in_place:
            normed.copy_(new[-1])
            new = (*new[:-1], normed)
        call(*new)
        assert torch.equal(normed, expected[1])
        if num_terms == 3:
            assert torch.equal(total, expected[0])
        else:
            assert total.isnan().all()


def test_settled_calls_take_other_weights_and_a_stream_of_other_dimensions():
    (x, branch), weight, bias = make_inputs(7, 64, num_terms=2)
    normed = torch.empty_like(x)
    call = prepare(x[:, None], (branch[:, None],), weight, bias, EPS, normed)
    other_weight, other_bias = 2 * weight, bias + 1
    other = branch.clone()
    call(2 * x[:, None], other, other, other_weight, other_bias, normed)
    expected = sum_norm((2 * x, branch), other_weight, other_bias, EPS, False)
    assert torch.equal(normed, expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1024, 1152, 1280])
def test_settled_calls_in_place_in_a_graph(width, dtype, num_terms, has_bias):
    kinds = {"num_terms": num_terms, "has_bias": has_bias, "dtype": dtype}
    terms, weight, bias = make_inputs(300, width, **kinds)
    branch = terms[-1].clone()
    settle(terms, weight, bias, terms[-1])[0](*terms)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        terms[-1].copy_(branch)
        call, total = settle(terms, weight, bias, terms[-1])
        call(*terms)
    for seed in (1, 2):
        new, *_ = make_inputs(300, width, **kinds, seed=seed)
        for held, values in zip((*terms[:-1], branch), new, strict=True):
            held.copy_(values)
        graph.replay()
        expected = sum_norm(new, weight, bias, EPS, num_terms == 3)
        assert torch.equal(terms[-1], expected[1])
        assert num_terms == 2 or torch.equal(total, expected[0])


@pytest.mark.gpu
def test_in_a_graph(num_terms, has_bias, keep_sum):
    kinds = {"num_terms": num_terms, "has_bias": has_bias, "dtype": torch.bfloat16}
    inputs = make_inputs(300, 1, 1152, **kinds)
    sum_norm(*inputs, EPS, keep_sum)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = sum_norm(*inputs, EPS, keep_sum)
    new = make_inputs(300, 1, 1152, **kinds, seed=1)
    for held, values in zip(inputs[0], new[0], strict=True):
        held.copy_(values)
    expected = sum_norm(new[0], *inputs[1:], EPS, keep_sum)
    graph.replay()
    assert torch.equal(outs[1], expected[1])
    assert not keep_sum or torch.equal(outs[0], expected[0])


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_int32_elements():
    rows = 2**31 // 1152 + 64
    x = torch.ones(rows, 1152, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    x[0] = x[-1] = torch.arange(1152)
    _, weight, bias = make_inputs(1, 1152, dtype=torch.bfloat16)
    total, normed = sum_norm((x, x, x), weight, bias, EPS, True)
    expected = sum_norm_ref((x[-64:],) * 3, weight, bias, EPS, True)
    assert torch.equal(total[-64:], expected[0])
    assert relative_error(normed[-64:], expected[1]) < 4e-3
    assert torch.equal(normed[0], normed[-1])

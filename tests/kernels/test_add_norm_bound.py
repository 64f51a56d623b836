# SPDX-License-Identifier: Apache-2.0
"""A norm's kernel also writes the scales of what an activation makes of its rows."""

import pytest
import torch
from _add_norm import EPS, draw_layer_scales, make_bound, make_inputs
from _rows import group_scales, row_scales
from torch.nn.functional import layer_norm

from vllm_flashinfer_vit.kernels.add_norm import prepare, sum_norm
from vllm_flashinfer_vit.kernels.add_norm_ref import sum_norm_ref, write_bound
from vllm_flashinfer_vit.kernels.formats import MIN_ROW_SCALE, Bound

pytestmark = pytest.mark.usefixtures("nan_empty")

# Of the norm's own rows: in 16 bits, or in e4m3 by scales of each kind.
FORMS = {
    "none": lambda rows, width: None,
    "one": lambda rows, width: row_scales(rows, 0.02),
    "own": lambda rows, width: row_scales(rows, None),
    "groups": group_scales,
}


@pytest.mark.parametrize("num_terms", [2, 3])
@pytest.mark.parametrize("has_bias", [True, False], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "layer scales"])
@pytest.mark.parametrize("width", [1152, 100])
def test_scales_of_what_follows(width, num_terms, has_bias, form, is_scaled):
    """They are of the norm before it is rounded, which they leave as it is."""
    terms, weight, bias = make_inputs(7, 1, width, num_terms=num_terms)
    bias = bias if has_bias else None
    scaled = draw_layer_scales(num_terms, width) if is_scaled else ()

    def run(function, bound):
        scales = FORMS[form](7, width)
        found = function(terms, weight, bias, EPS, True, scales, scaled, bound)
        return *found, scales

    bound, expected = make_bound(7), make_bound(7)
    found = run(sum_norm, bound)
    run(sum_norm_ref, expected)
    torch.testing.assert_close(bound.scales, expected.scales, rtol=1e-5, atol=0)
    x, *branches = (term.double() for term in terms)
    by = [scale.double() for scale in scaled] or [1.0] * len(branches)
    total = x + sum(b * s for b, s in zip(branches, by, strict=True))
    if has_bias:
        normed = layer_norm(total, weight.shape, weight.double(), bias.double(), EPS)
    else:
        mean_square = total.pow(2).mean(-1, keepdim=True)
        normed = total * torch.rsqrt(mean_square + EPS) * weight.double()
    write_bound(normed.view(7, width), expected)
    torch.testing.assert_close(bound.scales, expected.scales, rtol=1e-5, atol=0)
    assert (bound.scales > 0.3).all()
    for one, other in zip(found, run(sum_norm, None), strict=True):
        assert one is other is None or torch.equal(one.float(), other.float())


def test_the_reference_takes_terms_of_any_strides():
    terms, weight, _ = make_inputs(4, 3, 64)
    bounds = make_bound(12), make_bound(12)
    across = [term.transpose(0, 1) for term in terms]
    sum_norm_ref(across, weight, None, EPS, True, bound=bounds[0])
    across = [term.contiguous() for term in across]
    sum_norm_ref(across, weight, None, EPS, True, bound=bounds[1])
    torch.testing.assert_close(*(bound.scales for bound in bounds))


@pytest.mark.parametrize("function", [sum_norm, sum_norm_ref])
def test_scales_of_what_follows_are_no_less_than_the_least(function):
    bound = make_bound(5, 1e-9, 0.0)
    function(*make_inputs(5, 64), EPS, True, bound=bound)
    assert (bound.scales == torch.tensor(MIN_ROW_SCALE)).all()


@pytest.mark.parametrize("num_terms", [2, 3])
@pytest.mark.parametrize("has_bias", [True, False], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("form", ["none", "one", "own"])
def test_settled_calls_take_other_factors(num_terms, has_bias, form):
    """The scales stay where they are, as buffers of a pass do."""
    kinds = {"num_terms": num_terms, "has_bias": has_bias}
    (x, *branches), weight, bias = make_inputs(7, 64, **kinds)
    scales = FORMS[form](7, 64)
    rows = x.dtype if scales is None else torch.float8_e4m3fn
    normed, total = torch.empty_like(x, dtype=rows), torch.empty_like(x)
    scaled = draw_layer_scales(num_terms, 64)
    bound = make_bound(7)
    arguments = x, tuple(branches), weight, bias, EPS, normed, scales, scaled, bound
    call = prepare(*arguments)
    for seed, factors in ((1, (0.01, 0.3)), (2, (2.0, 0.0)), (3, (0.0, 5.0))):
        terms, *_ = make_inputs(7, 64, **kinds, seed=seed)
        expected = make_bound(7, *factors)
        last = () if scales is None else (scales,)
        call(
            *(terms[0], terms[1], terms[-1]),
            *(weight, weight if bias is None else bias, total),
            *(*last, *scaled, expected.factors),
        )
        parameters = weight, bias, EPS, num_terms == 3, FORMS[form](7, 64), scaled
        right = sum_norm(terms, *parameters, expected)[1]
        assert torch.equal(bound.scales, expected.scales)
        assert torch.equal(normed.float(), right.float())


@pytest.mark.parametrize(
    "change",
    [
        lambda factors, scales: (factors.repeat(2), scales),
        lambda factors, scales: (factors[:, None], scales),
        lambda factors, scales: (factors.repeat(2)[::2], scales),
        lambda factors, scales: (factors.double(), scales),
        lambda factors, scales: (factors, scales[1:]),
        lambda factors, scales: (factors, scales[:, 0]),
        lambda factors, scales: (factors, scales.repeat(1, 2)[:, :1]),
        lambda factors, scales: (factors, scales.half()),
    ],
)
def test_bounds_that_do_not_fit(change):
    terms, weight, bias = make_inputs(7, 64)
    bound = Bound(*change(*make_bound(7)))
    for function in (sum_norm, sum_norm_ref):
        with pytest.raises(ValueError, match=r"a bound must be \[2\] and \[7, 1\]"):
            function(terms, weight, bias, EPS, True, bound=bound)
    x, *branches = terms
    with pytest.raises(ValueError, match="a bound must be"):
        prepare(x, tuple(branches), weight, bias, EPS, x, bound=bound)

# SPDX-License-Identifier: Apache-2.0
"""One kernel normalises a branch, adds it to the stream and normalises the sum."""

import pytest
import torch
from torch.nn.functional import rms_norm

from vllm_flashinfer_vit.kernels.norm_add import MAX_WIDTH, norm_add
from vllm_flashinfer_vit.kernels.norm_add_ref import norm_add_ref

pytestmark = pytest.mark.usefixtures("nan_empty")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter truncates when it converts to bf16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# Gemma 4's two towers, and what fills no block.
WIDTHS = [768, 1152, 100, 1]
EPS = 1e-6


@pytest.fixture(params=[True, False], ids=["with next", "last"])
def has_next(request):
    return request.param


def make_inputs(rows, width, dtype=torch.float16, seed=0, has_next=True):
    """A stream and a branch with massive activations, as towers have them."""
    generator = torch.Generator().manual_seed(seed)
    x, branch = (torch.randn(rows, width, generator=generator) for _ in range(2))
    x[..., 0] *= 100
    branch[..., -1] *= 300
    weights = 1 + 0.3 * torch.randn(2, width, generator=generator)
    x, branch, weights = (t.to(DEVICE, dtype) for t in (x, branch, weights))
    return x, branch, weights[0], EPS, weights[1] if has_next else None


def exact_of(x, branch, weight, eps, next_weight):
    width = x.shape[1:]
    total = x.double() + rms_norm(branch.double(), width, weight.double(), eps)
    if next_weight is None:
        return total, None
    return total, rms_norm(total, width, next_weight.double(), eps)


def assert_rounded(found, exact, dtype):
    """Half a unit for the one rounding, and what fp32 itself is off."""
    assert (found.dtype, found.shape) == (dtype, exact.shape)
    slack = 16 * torch.finfo(torch.float32).eps * exact.abs().max()
    unit = torch.finfo(dtype).eps
    assert ((found.double() - exact).abs() <= unit / 2 * exact.abs() + slack).all()


@pytest.mark.parametrize("call", [norm_add, norm_add_ref])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 7])
def test_norm_add(rows, width, dtype, call, has_next):
    given = make_inputs(rows, width, dtype, has_next=has_next)
    found, exact = call(*given), exact_of(*given)
    assert_rounded(found[0], exact[0], dtype)
    if has_next:
        assert_rounded(found[1], exact[1], dtype)
    else:
        assert found[1] is None


@pytest.mark.parametrize("call", [norm_add, norm_add_ref])
def test_no_rows(call, has_next):
    total, normed = call(*make_inputs(0, 768, has_next=has_next))
    assert total.shape == (0, 768)
    assert normed is None or normed.shape == (0, 768)


def test_rows_of_any_stride():
    x, branch, *rest = make_inputs(6, 768)
    wide = torch.full((6, 1000), float("nan"), dtype=x.dtype, device=DEVICE)
    strided = [wide.clone()[:, 8 : 8 + 768].copy_(t) for t in (x, branch)]
    for found, right in zip(
        norm_add(*strided, *rest), norm_add(x, branch, *rest), strict=True
    ):
        assert torch.equal(found, right) and found.is_contiguous()


def test_weights_of_another_dtype():
    x, branch, weight, eps, following = make_inputs(5, 100)
    found = norm_add(x, branch, weight.float(), eps, following.float())
    for one, right in zip(
        found, norm_add(x, branch, weight, eps, following), strict=True
    ):
        assert torch.equal(one, right)


def test_bad_values_stay_in_their_row():
    x, branch, *rest = make_inputs(5, 100)
    expected = norm_add(x, branch, *rest)
    x[1, 3], branch[3, 0] = float("nan"), float("inf")
    for found, right in zip(norm_add(x, branch, *rest), expected, strict=True):
        assert torch.equal(found[[0, 2, 4]], right[[0, 2, 4]])


def test_the_same_bits_twice():
    given = make_inputs(33, 1152)
    for found, again in zip(norm_add(*given), norm_add(*given), strict=True):
        assert torch.equal(found, again)


@pytest.mark.parametrize("call", [norm_add, norm_add_ref])
def test_what_does_not_fit(call):
    x, branch, weight, eps, following = make_inputs(4, 64)
    for given, message in [
        ((x, branch[:3], weight, eps, following), "one dtype"),
        ((x, branch.float(), weight, eps, following), "one dtype"),
        ((x[0], branch[0], weight, eps, following), "one dtype"),
        ((x, branch, weight[:8], eps, following), "weights must be"),
        ((x, branch, weight, eps, following[:8]), "weights must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(*given)


def test_what_the_kernel_cannot_read():
    x, branch, *rest = make_inputs(4, 64)
    with pytest.raises(ValueError, match="every last stride"):
        norm_add(x.T.contiguous().T, branch, *rest)
    with pytest.raises(ValueError, match=f"1 to {MAX_WIDTH}"):
        norm_add(*make_inputs(2, MAX_WIDTH + 8))


@pytest.mark.gpu
def test_in_a_graph(has_next):
    given = make_inputs(300, 1152, torch.bfloat16, has_next=has_next)
    norm_add(*given)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = norm_add(*given)
    for seed in (1, 1, 2):
        x, branch, *_ = make_inputs(300, 1152, torch.bfloat16, seed, has_next)
        given[0].copy_(x)
        given[1].copy_(branch)
        graph.replay()
        for found, right in zip(held, norm_add(*given), strict=True):
            assert right is None or torch.equal(found, right)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_int32_elements():
    rows = 2**31 // 1152 + 64
    x, branch, *rest = make_inputs(64, 1152, torch.bfloat16)
    large = [torch.zeros(rows, 1152, dtype=x.dtype, device=DEVICE) for _ in range(2)]
    for place, small in zip(large, (x, branch), strict=True):
        place[-64:] = small
    assert large[0].numel() > 2**31
    for found, right in zip(
        norm_add(*large, *rest), norm_add(x, branch, *rest), strict=True
    ):
        assert torch.equal(found[-64:], right)
        assert not found[:-64].any()

# SPDX-License-Identifier: Apache-2.0
"""GEMMs of rows in FP8, vLLM's and cuBLASLt's, against fp32.

On a CPU the reference stands for vLLM's; cuBLASLt needs a GPU (test_cublaslt_fp8.py
has what it is asked).
"""

import pytest
import torch
from _rows import Operands, exact, multiply, scaled_weight

from cases import relative_error
from vllm_flashinfer_vit.choices.clock import capture
from vllm_flashinfer_vit.gemms import cublaslt
from vllm_flashinfer_vit.gemms.catalog import (
    CUBLASLT,
    CUTLASS,
    GEMMS,
    HOST_US,
    SCALES,
    scales_of,
)
from vllm_flashinfer_vit.gemms.cublaslt import Problems
from vllm_flashinfer_vit.gemms.scaled_mm import CublasLt, ScaledGemm, scaled_gemm

HAS_GPU = torch.cuda.is_available()
CAN_FP8 = HAS_GPU and torch.cuda.get_device_capability() >= (8, 9)
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
HAS_CUBLASLT = cublaslt.takes_fp8()
needs_cublaslt = pytest.mark.skipif(not HAS_CUBLASLT, reason="needs a Hopper GPU")
each_gemm = pytest.mark.parametrize(
    "name", [CUTLASS, pytest.param(CUBLASLT, marks=needs_cublaslt)]
)

DTYPES = (torch.bfloat16, torch.float16)
# On Hopper sums of FP8 products have 14 bits.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 5e-3}
# Inputs and outputs of Qwen3-VL's QKV projection and the MLP's second layer, and of the
# second layer of Qwen2.5-VL as vLLM pads it.
SIZES = [(1152, 3456), (4304, 1152), (3424, 1280)] if HAS_GPU else [(64, 48), (16, 32)]
ROWS = (1, 7, 1000) if HAS_GPU else (1, 7, 100)

pytestmark = [
    pytest.mark.skipif(HAS_GPU and not CAN_FP8, reason="this GPU has no FP8"),
    pytest.mark.usefixtures("nan_empty"),
]
on_a_gpu = pytest.mark.gpu


def draw(rows, inputs, outputs, dtype, scales="rows", has_bias=True, seed=0):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    def scale(*shape):
        return 0.5 + torch.rand(shape, generator=random)

    e4m3 = torch.float8_e4m3fn
    found = Operands(
        torch.full((rows, outputs), float("nan"), dtype=dtype),
        normal(rows, inputs).to(e4m3),
        normal(outputs, inputs).to(e4m3),
        scale(1) if scales == "tensor" else scale(rows, 1),
        (scale(1, outputs) if scales == "rows" else scale(1)) * inputs**-0.5,
        normal(outputs).to(dtype) if has_bias else None,
    )
    found = Operands(*(None if t is None else t.to(DEVICE) for t in found))
    return found._replace(weight=found.weight.t())


def gemm_for(name: str, scales: str = "rows") -> ScaledGemm:
    return scaled_gemm(name, scales, DEVICE, Problems())


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_gemm
def test_products_are_those_of_fp32(name, dtype, scales, has_bias) -> None:
    for rows in ROWS:
        for inputs, outputs in SIZES:
            given = draw(rows, inputs, outputs, dtype, scales, has_bias)
            gemm = gemm_for(name, scales)
            multiply(gemm, given)
            assert relative_error(given.out, exact(given)) < TOLERANCE[dtype]
            first = given.out.clone()
            multiply(gemm, given._replace(out=given.out.fill_(float("nan"))))
            assert torch.equal(given.out, first)


@pytest.mark.parametrize("scales", SCALES)
@each_gemm
def test_the_first_rows_do_not_depend_on_those_after_them(name, scales) -> None:
    """Nothing after the rows is read: a scale there is another batch's."""
    given = draw(ROWS[-1], *SIZES[0], torch.bfloat16, scales)
    has_one = scales == "tensor"
    few = given._replace(
        out=given.out[:7],
        rows=given.rows[:7],
        scales=given.scales if has_one else given.scales[:7],
    )
    expected = exact(few)
    given.rows[7:] = float("nan")
    if not has_one:
        given.scales[7:] = float("nan")
    multiply(gemm_for(name, scales), few)
    assert relative_error(few.out, expected) < TOLERANCE[torch.bfloat16]
    assert given.out[7:].isnan().all()


@pytest.mark.parametrize("scales", SCALES)
@each_gemm
def test_one_settled_gemm_serves_layers_and_scales(name, scales) -> None:
    """A pass's scales are the same memory for all layers, and a layer's its own."""
    first, second = (
        draw(7, *SIZES[0], torch.bfloat16, scales, seed=seed) for seed in (0, 1)
    )
    weights = [scaled_weight(given) for given in (first, second)]
    gemm = gemm_for(name, scales)
    launch = gemm.prepare(weights[0], first.rows, first.scales, first.out)
    for given, weight in 2 * [*zip((first, second), weights, strict=True)]:
        for read in first.scales, second.scales:
            launch(weight, read)
            expected = exact(given._replace(rows=first.rows, scales=read))
            assert relative_error(first.out, expected) < TOLERANCE[torch.bfloat16]


def test_kinds_of_scales() -> None:
    assert scales_of(True, 1) == "tensor"
    assert scales_of(False, 1) == "tokens"
    assert scales_of(False, 48) == "rows"
    assert scales_of(True, 48) is None


def test_each_name_has_a_gemm() -> None:
    assert set(GEMMS) == set(HOST_US) == {CUTLASS, CUBLASLT}


@pytest.mark.skipif(HAS_CUBLASLT, reason="cuBLASLt takes rows in FP8 here")
def test_without_cublaslt_it_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no cuBLASLt for rows in FP8 was found"):
        CublasLt("rows", Problems())


@on_a_gpu
@needs_cublaslt
@pytest.mark.parametrize("scales", ["tensor", "rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [*SIZES, (1280, 1280), (5120, 1280)])
def test_the_bits_are_pytorchs(inputs, outputs, dtype, scales) -> None:
    """It asks cuBLASLt for the same; mixed scales it does not take."""
    for rows in (1, 7, 64, 256, 1000, 4096):
        given = draw(rows, inputs, outputs, dtype, scales)
        multiply(gemm_for(CUBLASLT, scales), given)
        expected = torch._scaled_mm(
            given.rows,
            given.weight,
            given.scales,
            given.weight_scale,
            bias=given.bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
        assert torch.equal(given.out, expected), rows


@on_a_gpu
@needs_cublaslt
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [*SIZES, (1280, 6848), (5120, 1280)])
def test_cublaslts_is_no_less_exact_than_vllms(inputs, outputs, dtype, scales) -> None:
    for rows in (64, 256, 1000, 4096):
        given = draw(rows, inputs, outputs, dtype, scales)
        expected = exact(given)
        errors = {}
        for name in GEMMS:
            multiply(gemm_for(name, scales), given)
            errors[name] = relative_error(given.out, expected)
        assert errors[CUBLASLT] <= 1.1 * errors[CUTLASS], (rows, errors)


@on_a_gpu
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_gemm
def test_in_a_graph(name, dtype, scales) -> None:
    for rows in ROWS:
        given = draw(rows, *SIZES[0], dtype, scales)
        gemm = gemm_for(name, scales)

        def run(given: Operands = given, gemm: ScaledGemm = gemm) -> torch.Tensor:
            multiply(gemm, given)
            return given.out

        replay = capture(run)
        for seed in (1, 2):
            new = draw(rows, *SIZES[0], dtype, scales, seed=seed)
            multiply(gemm, new)
            for old, value in zip(given[1:], new[1:], strict=True):
                old.copy_(value)
            given.out.fill_(float("nan"))
            assert torch.equal(replay(), new.out)


@on_a_gpu
@each_gemm
def test_on_a_side_stream(name) -> None:
    given = draw(1000, *SIZES[0], torch.bfloat16)
    new = draw(1000, *SIZES[0], torch.bfloat16, seed=1)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        # A launch on another stream would not wait for the new contents.
        torch.cuda._sleep(100_000_000)
        given.rows.copy_(new.rows)
        multiply(gemm_for(name), given)
    side.synchronize()
    assert relative_error(given.out, exact(given)) < TOLERANCE[torch.bfloat16]


@on_a_gpu
@each_gemm
def test_the_host_does_not_wait(name) -> None:
    given = draw(1000, *SIZES[0], torch.bfloat16)
    gemm = gemm_for(name)
    multiply(gemm, given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        multiply(gemm, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")

# SPDX-License-Identifier: Apache-2.0
"""GEMMs of rows in FP8, vLLM's and PyTorch's, against fp32.

On a CPU the reference stands for vLLM's, and PyTorch's is PyTorch's own there.
"""

import pytest
import torch
from _rows import Operands

from cases import relative_error
from vllm_flashinfer_vit.choices.clock import capture
from vllm_flashinfer_vit.kernels.gemms import CUTLASS, GEMMS, SCALES, TORCH, scales_of
from vllm_flashinfer_vit.kernels.row_scales_ref import scaled_mm_ref
from vllm_flashinfer_vit.kernels.scaled_mm import launch_of

HAS_GPU = torch.cuda.is_available()
CAN_FP8 = HAS_GPU and torch.cuda.get_device_capability() >= (8, 9)
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def skip_row_scales_on_an_older_cpu(gemm: str, scales: str) -> None:
    is_old = not HAS_GPU and torch.__version__.startswith("2.11.")
    if is_old and gemm == "torch" and scales == "rows":
        pytest.skip("PyTorch 2.11's GEMM for CPUs takes one scale alone")


DTYPES = (torch.bfloat16, torch.float16)
# Rounded up to three times: PyTorch's for CPUs scales in the output's dtype. On Hopper
# sums of FP8 products have 14 bits.
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

    e4m3, is_one = torch.float8_e4m3fn, scales == "tensor"
    found = Operands(
        torch.full((rows, outputs), float("nan"), dtype=dtype),
        normal(rows, inputs).to(e4m3),
        normal(outputs, inputs).to(e4m3),
        scale() if is_one else scale(rows, 1),
        (scale(1) if is_one else scale(1, outputs)) * inputs**-0.5,
        normal(outputs).to(dtype) if has_bias else None,
    )
    found = Operands(*(None if t is None else t.to(DEVICE) for t in found))
    return found._replace(weight=found.weight.t())


def exact(given: Operands) -> torch.Tensor:
    out = torch.empty_like(given.out, dtype=torch.float32)
    scaled_mm_ref(out, *given[1:])
    return out


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gemm", GEMMS)
def test_products_are_those_of_fp32(gemm, dtype, scales, has_bias) -> None:
    skip_row_scales_on_an_older_cpu(gemm, scales)
    launch = launch_of(gemm, DEVICE)
    for rows in ROWS:
        for inputs, outputs in SIZES:
            given = draw(rows, inputs, outputs, dtype, scales, has_bias)
            launch(*given)
            assert relative_error(given.out, exact(given)) < TOLERANCE[dtype]
            first = given.out.clone()
            launch(*given._replace(out=given.out.fill_(float("nan"))))
            assert torch.equal(given.out, first)


@pytest.mark.parametrize("gemm", GEMMS)
def test_the_first_rows_do_not_depend_on_those_after_them(gemm) -> None:
    """Nothing after the rows is read: a scale there is another batch's."""
    skip_row_scales_on_an_older_cpu(gemm, "rows")
    given = draw(ROWS[-1], *SIZES[0], torch.bfloat16)
    few = given._replace(
        out=given.out[:7], rows=given.rows[:7], scales=given.scales[:7]
    )
    expected = exact(few)
    given.rows[7:] = float("nan")
    given.scales[7:] = float("nan")
    launch_of(gemm, DEVICE)(*few)
    assert relative_error(few.out, expected) < TOLERANCE[torch.bfloat16]
    assert given.out[7:].isnan().all()


def test_kinds_of_scales() -> None:
    assert scales_of(True, 1) == "tensor"
    assert scales_of(False, 48) == "rows"
    assert scales_of(True, 48) is scales_of(False, 1) is None


@pytest.mark.parametrize("is_static", [True, False])
def test_pytorchs_refuses_what_no_kind_names(is_static) -> None:
    inputs, outputs = SIZES[0]
    mixed = draw(7, inputs, outputs, torch.bfloat16, "tensor" if is_static else "rows")
    other = draw(7, inputs, outputs, torch.bfloat16, "rows" if is_static else "tensor")
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)scal"):
        launch_of(TORCH, DEVICE)(*mixed._replace(weight_scale=other.weight_scale))


@on_a_gpu
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [*SIZES, (1280, 6848), (5120, 1280)])
def test_pytorchs_is_no_less_exact_than_vllms(inputs, outputs, dtype, scales) -> None:
    for rows in (64, 256, 1000, 4096):
        given = draw(rows, inputs, outputs, dtype, scales)
        expected = exact(given)
        errors = {}
        for gemm in GEMMS:
            launch_of(gemm, DEVICE)(*given)
            errors[gemm] = relative_error(given.out, expected)
        assert errors[TORCH] <= 1.1 * errors[CUTLASS], (rows, errors)


@on_a_gpu
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gemm", GEMMS)
def test_in_a_graph(gemm, dtype, scales) -> None:
    launch = launch_of(gemm, DEVICE)
    for rows in ROWS:
        given = draw(rows, *SIZES[0], dtype, scales)

        def run(given: Operands = given) -> torch.Tensor:
            launch(*given)
            return given.out

        replay = capture(run)
        for seed in (1, 2):
            new = draw(rows, *SIZES[0], dtype, scales, seed=seed)
            launch(*new)
            for old, value in zip(given[1:], new[1:], strict=True):
                old.copy_(value)
            given.out.fill_(float("nan"))
            assert torch.equal(replay(), new.out)


@on_a_gpu
@pytest.mark.parametrize("gemm", GEMMS)
def test_on_a_side_stream(gemm) -> None:
    given = draw(1000, *SIZES[0], torch.bfloat16)
    new = draw(1000, *SIZES[0], torch.bfloat16, seed=1)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        # A launch on another stream would not wait for the new contents.
        torch.cuda._sleep(100_000_000)
        given.rows.copy_(new.rows)
        launch_of(gemm, DEVICE)(*given)
    side.synchronize()
    assert relative_error(given.out, exact(given)) < TOLERANCE[torch.bfloat16]


@on_a_gpu
@pytest.mark.parametrize("gemm", GEMMS)
def test_the_host_does_not_wait(gemm) -> None:
    given = draw(1000, *SIZES[0], torch.bfloat16)
    launch_of(gemm, DEVICE)(*given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch_of(gemm, DEVICE)(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")

# SPDX-License-Identifier: Apache-2.0
"""GEMMs of weights with scales of blocks and rows with scales of groups, against fp32.

On a CPU the reference stands for vLLM's op.
"""

import pytest
import torch
from _rows import Operands, exact, multiply

from cases import relative_error
from vllm_flashinfer_vit.choices.clock import capture
from vllm_flashinfer_vit.gemms import scaled_mm
from vllm_flashinfer_vit.gemms.catalog import CUTLASS
from vllm_flashinfer_vit.gemms.cublaslt import Problems
from vllm_flashinfer_vit.gemms.scaled_mm import ScaledGemm, scaled_gemm
from vllm_flashinfer_vit.kernels.formats import num_groups

HAS_GPU = torch.cuda.is_available()
CAN_RUN = HAS_GPU and torch.cuda.get_device_capability() >= (9, 0)
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = (torch.bfloat16, torch.float16)
# Rounded twice where a bias is added. On Hopper sums of FP8 products have 14 bits.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 5e-3}
# Inputs and outputs of Qwen2-VL's and Qwen3-VL's layers; 4304 ends in a short block.
SIZES = (
    [(1280, 3840), (1280, 5120), (5120, 1280), (1152, 3456), (1152, 4304), (4304, 1152)]
    if HAS_GPU
    else [(256, 384), (304, 144), (128, 256)]
)
# vLLM's op has another kernel for few rows, and for a number that is no multiple of 4.
ROWS = (1, 7, 16, 132, 1000, 1001) if HAS_GPU else (1, 7, 64)

pytestmark = [
    pytest.mark.skipif(HAS_GPU and not CAN_RUN, reason="vLLM's op needs Hopper"),
    pytest.mark.usefixtures("nan_empty"),
]
on_a_gpu = pytest.mark.gpu


def draw(rows, inputs, outputs, dtype, has_bias=True, seed=0):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    def scale(*shape):
        return 0.1 + 2 * torch.rand(shape, generator=random)

    groups = num_groups(inputs)
    found = Operands(
        torch.full((rows, outputs), float("nan"), dtype=dtype),
        normal(rows, inputs).to(torch.float8_e4m3fn),
        normal(outputs, inputs).to(torch.float8_e4m3fn),
        scale(groups, rows),
        scale(num_groups(outputs), groups) * inputs**-0.5,
        normal(outputs).to(dtype) if has_bias else None,
    )
    found = Operands(*(None if t is None else t.to(DEVICE) for t in found))
    return found._replace(
        weight=found.weight.t(),
        scales=found.scales.t(),
        weight_scale=found.weight_scale.t(),
    )


def gemm_on(device: torch.device) -> ScaledGemm:
    return scaled_gemm(CUTLASS, None, device, Problems(), has_blocks=True)


def test_the_reference_block_by_block():
    given = draw(5, 304, 144, torch.float32)
    total = torch.zeros(5, 144, dtype=torch.float64, device=DEVICE)
    for at, k in enumerate(range(0, 304, 128)):
        for to, n in enumerate(range(0, 144, 128)):
            rows = given.rows[:, k : k + 128].double()
            part = rows @ given.weight[k : k + 128, n : n + 128].double()
            scaled = given.scales[:, at, None].double() * given.weight_scale[at, to]
            total[:, n : n + 128] += part * scaled
    total += given.bias.double()
    torch.testing.assert_close(exact(given).double(), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_products_are_those_of_fp32(inputs, outputs, dtype, has_bias) -> None:
    gemm = gemm_on(DEVICE)
    for rows in ROWS:
        given = draw(rows, inputs, outputs, dtype, has_bias)
        multiply(gemm, given)
        assert relative_error(given.out, exact(given)) < TOLERANCE[dtype], rows
        first = given.out.clone()
        multiply(gemm, given._replace(out=given.out.fill_(float("nan"))))
        assert torch.equal(given.out, first)


def test_vllms_op_gets_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scales of blocks it refuses one."""

    def op(out, rows, weight, scales, weight_scale, bias):
        assert bias is None
        out.fill_(2.0)

    monkeypatch.setattr(scaled_mm, "cutlass_op", lambda: op)
    gemm = gemm_on(torch.device("cuda"))
    given = draw(3, 256, 16, torch.bfloat16)
    multiply(gemm, given)
    assert torch.equal(given.out, 2 + given.bias.expand(3, -1))
    multiply(gemm, given._replace(bias=None))
    assert (given.out == 2).all()


@on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1280, 3840), (4304, 1152)])
def test_in_a_graph(inputs, outputs, dtype) -> None:
    gemm = gemm_on(DEVICE)
    for rows in ROWS:
        given = draw(rows, inputs, outputs, dtype)

        def run(given: Operands = given) -> torch.Tensor:
            multiply(gemm, given)
            return given.out

        replay = capture(run)
        for seed in (1, 2):
            new = draw(rows, inputs, outputs, dtype, seed=seed)
            multiply(gemm, new)
            for old, value in zip(given[1:], new[1:], strict=True):
                old.copy_(value)
            given.out.fill_(float("nan"))
            assert torch.equal(replay(), new.out)


@on_a_gpu
def test_on_a_side_stream() -> None:
    given, new = (draw(1000, 1280, 3840, torch.bfloat16, seed=at) for at in (0, 1))
    gemm = gemm_on(DEVICE)
    multiply(gemm, new)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        # A launch on another stream would not wait for the new contents.
        torch.cuda._sleep(100_000_000)
        for old, value in zip(given[1:], new[1:], strict=True):
            old.copy_(value)
        multiply(gemm, given)
    side.synchronize()
    assert torch.equal(given.out, new.out)


@on_a_gpu
def test_the_host_does_not_wait() -> None:
    given = draw(1000, 1280, 3840, torch.bfloat16)
    gemm = gemm_on(DEVICE)
    multiply(gemm, given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        multiply(gemm, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")

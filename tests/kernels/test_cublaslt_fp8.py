# SPDX-License-Identifier: Apache-2.0
"""What cuBLASLt is asked for layers in FP8; test_scaled_mm.py has results."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from _cublaslt import Library, library, prepare, tensors

from vllm_flashinfer_vit.gemms import cublaslt
from vllm_flashinfer_vit.gemms.catalog import CUBLASLT, SCALES, Scales
from vllm_flashinfer_vit.gemms.cublaslt import Layer, Problems, Scaling
from vllm_flashinfer_vit.gemms.scaled_mm import (
    Launch,
    ScaledGemm,
    ScaledWeight,
    scaled_gemm,
)

__all__ = ["library"]


def in_fp8(
    kind: Scales, has_bias: bool = True, rows: int = 3
) -> tuple[SimpleNamespace, Layer]:
    t = tensors(rows, 16, 32, torch.bfloat16)
    t.x, t.weight = t.x.to(torch.float8_e4m3fn), t.weight.to(torch.float8_e4m3fn)
    t.scale = torch.ones(16 if kind == "rows" else 1)
    t.constants = torch.ones(17)
    scaling = Scaling(kind, t.scale, t.constants if kind == "tokens" else None)
    return t, Layer(t.weight, t.bias if has_bias else None, scaling=scaling)


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("kind", SCALES)
def test_a_layer_in_fp8_is_described_once(library: Library, kind, has_bias) -> None:
    t, layer = in_fp8(kind, has_bias)
    expected = {3: (1, 4), 25: (1, 1)}
    if has_bias:
        # Its dtype is not the operands'.
        expected |= {7: (4, 4), 8: (t.bias.data_ptr(), 8), 26: (14, 4)}
    if kind != "tensor":
        expected |= {31: (3, 4), 32: (3, 4)}
    if kind == "tokens":
        expected |= {2: (1, 4), 17: (t.constants.data_ptr(), 8)}
    else:
        expected |= {17: (t.scale.data_ptr(), 8)}
    assert library.attributes("MatmulDesc", 101) == expected
    for address in (40, 80):
        layer.read(address)
        assert layer.row_scales == address
        expected[18] = address, 8
        assert library.attributes("MatmulDesc", 101) == expected


@pytest.mark.parametrize("kind", SCALES)
def test_a_call_in_fp8(library: Library, kind) -> None:
    t, layer = in_fp8(kind)
    problems = Problems()
    prepare(problems, t, layer)(layer)
    assert library.of("MatrixLayoutCreate") == [
        (102, 28, 32, 16, 32),
        (103, 28, 32, 3, 32),
        (104, 14, 16, 3, 16),
    ]
    ((_, _, factor, *_, of_output), *_) = [args[:8] for args in library.of("Matmul")]
    if kind == "tokens":
        # The weight's scale, and a zero behind the ones that stand for outputs'.
        assert factor == t.scale.data_ptr()
        assert of_output == t.constants.data_ptr() + 16 * 4
    else:
        assert factor.value == 1 and of_output.value == 0


def test_kinds_of_scales_have_algorithms_of_their_own(library: Library) -> None:
    problems = Problems()
    for kind in SCALES:
        for has_bias in (True, False):
            t, layer = in_fp8(kind, has_bias)
            prepare(problems, t, layer)
    assert len(library.of("MatmulAlgoGetHeuristic")) == 6


@pytest.mark.parametrize(
    ("version", "major", "expected"),
    [(120900, 9, True), (120899, 9, False), (130100, 10, False)],
)
def test_fp8_needs_a_library_with_scales_of_rows(
    library: Library, version, major, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.statuses["cublasLtGetVersion"] = version
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    assert cublaslt.takes_fp8() is expected


def scaled() -> ScaledWeight:
    weight = torch.zeros(16, 32).to(torch.float8_e4m3fn).t()
    return ScaledWeight(weight, torch.ones(1), torch.zeros(16).bfloat16())


@pytest.fixture
def gemm_for(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Scales], ScaledGemm]:
    monkeypatch.setattr(cublaslt, "takes_fp8", lambda: True)
    return lambda kind: scaled_gemm(CUBLASLT, kind, torch.device("cpu"), Problems())


@pytest.fixture
def gemm(gemm_for: Callable[[Scales], ScaledGemm]) -> ScaledGemm:
    return gemm_for("tokens")


def settle(gemm: ScaledGemm, like: ScaledWeight, scales: torch.Tensor) -> Launch:
    rows = torch.zeros(3, 32).to(torch.float8_e4m3fn)
    return gemm.prepare(like, rows, scales, torch.zeros(3, 16).bfloat16())


def test_a_settled_gemm_points_layers_at_a_passs_scales(
    library: Library, gemm: ScaledGemm
) -> None:
    first, second = scaled(), scaled()
    passes = [torch.ones(3, 1) for _ in range(2)]
    launches = [settle(gemm, first, scales) for scales in passes]
    pointed: list[tuple[int, int]] = []
    for launch, scales in [*zip(launches, passes, strict=True)] * 2:
        for weight in (first, second, first):
            launch(weight, scales)
            number = library.of("Matmul")[-1][1]
            pointed.append((number, library.attributes("MatmulDesc", number)[18][0]))
    assert [number for number, _ in pointed[:3]] == [101, pointed[1][0], 101]
    expected = [scales.data_ptr() for scales in passes for _ in range(3)] * 2
    assert [address for _, address in pointed] == expected
    assert len(library.of("MatmulDescCreate")) == 2
    # Twice when it is settled, and then only for each layer of another pass.
    sets = [args for args in library.of("MatmulDescSetAttribute") if args[1] == 18]
    assert len(sets) == 2 + 4 * 2


@pytest.mark.parametrize("kind", ["tensor", "rows"])
def test_without_scales_of_tokens_there_are_no_constants(
    library: Library, gemm_for: Callable[[Scales], ScaledGemm], kind
) -> None:
    gemm, weight, scales = gemm_for(kind), scaled(), torch.ones(3, 1)
    settle(gemm, weight, scales)(weight, scales)
    ((_, number, factor, *_, of_output), *_) = [x[:8] for x in library.of("Matmul")]
    assert factor.value == 1 and of_output.value == 0
    read = library.attributes("MatmulDesc", number)[17][0]
    assert read == weight.scale.data_ptr()
    assert not any(isinstance(x, torch.Tensor) for x in vars(gemm).values())


def constants(library: Library) -> list[float]:
    """Return what the last launch reads as the outputs' scales, and of the output."""
    number, of_output = (library.of("Matmul")[-1][at] for at in (1, 7))
    ones = library.attributes("MatmulDesc", number)[17][0]
    assert of_output == ones + 16 * 4
    return list((ctypes.c_float * 17).from_address(ones))


def test_constants_outlive_what_was_made_while_weights_were_loaded(
    library: Library, gemm: ScaledGemm
) -> None:
    """vLLM's sleep mode discards that, and restores a model's buffers alone."""
    for value in vars(gemm).values():
        if isinstance(value, torch.Tensor):
            value.fill_(float("nan"))
    weight, scales = scaled(), torch.ones(3, 1)
    settle(gemm, weight, scales)(weight, scales)
    assert constants(library) == [1.0] * 16 + [0.0]


def test_constants_of_a_graph_are_its_own(
    library: Library, gemm: ScaledGemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes them when it is replayed, and not when it is captured."""
    made: list[torch.Tensor] = []
    ones: Callable[..., torch.Tensor] = torch.ones

    def note(*size: int, **given: object) -> torch.Tensor:
        made.append(ones(*size, **given))
        return made[-1]

    weight, scales = scaled(), torch.ones(3, 1)
    monkeypatch.setattr(torch, "ones", note)
    with monkeypatch.context() as capturing:
        is_capturing = "is_current_stream_capturing"
        capturing.setattr(torch.cuda, is_capturing, lambda: True)
        settle(gemm, weight, scales)
    made.pop().fill_(float("nan"))
    launches = [settle(gemm, weight, scales) for _ in range(2)]
    assert len(made) == 1
    for launch in launches:
        launch(weight, scales)
        assert constants(library) == [1.0] * 16 + [0.0]
    # What is there already serves graphs, too.
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, is_capturing, lambda: True)
        settle(gemm, weight, scales)
    assert len(made) == 1

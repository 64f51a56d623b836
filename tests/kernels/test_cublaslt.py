# SPDX-License-Identifier: Apache-2.0
"""What cuBLASLt is asked, by a stub in its place; test_cublaslt_gemm.py has results."""

import ctypes
import gc
import os
from types import SimpleNamespace

import pytest
import torch
from _cublaslt import HANDLE, STREAM, Library, library, prepare, tensors

from vllm_flashinfer_vit.blocks.linear import BlockWeights, LtGemm, Weights
from vllm_flashinfer_vit.gemms import cublaslt
from vllm_flashinfer_vit.gemms.cublaslt import Layer, Problems

__all__ = ["library"]


def test_the_heuristics_result_is_as_large_as_cublass() -> None:
    result = cublaslt._Heuristic
    assert ctypes.sizeof(result) == 96
    assert ctypes.sizeof(result().algo) == 64
    assert [
        getattr(result, name).offset for name in ("algo", "workspace", "state")
    ] == [
        0,
        64,
        72,
    ]


@pytest.mark.parametrize(
    ("has_gpu", "major", "has_library", "expected"),
    [
        (True, 9, True, True),
        (True, 9, False, False),
        (True, 8, True, False),
        (True, 10, True, False),
        (False, 9, True, False),
    ],
)
def test_gemms_are_settled_on_hopper_with_the_library(
    has_gpu, major, has_library, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library() if has_library else None
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    assert cublaslt.is_available() is expected


def test_the_library_is_the_one_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, mode: int) -> str:
        asked.append((name, mode))
        if len(asked) == 2:
            raise OSError("not loaded")
        return "library"

    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(ctypes, "PyDLL", load)
    find = cublaslt._library.__wrapped__
    assert find() == "library"
    assert find() is None
    assert asked == [("libcublasLt.so.12", os.RTLD_NOLOAD)] * 2


def test_which_layers_fit() -> None:
    weight, bias = torch.zeros(8, 16).half(), torch.zeros(8).half()
    assert cublaslt.fits(weight, bias)
    assert cublaslt.fits(weight.bfloat16(), bias.bfloat16())
    assert not cublaslt.fits(weight, None)
    assert not cublaslt.fits(weight, bias.float())
    e4m3 = torch.float8_e4m3fn
    assert not cublaslt.fits(weight.to(e4m3), bias.to(e4m3))
    assert not cublaslt.fits(weight.float(), bias.float())
    assert not cublaslt.fits(torch.zeros(16, 8).half().t(), bias)
    assert not cublaslt.fits(torch.zeros(8, 24).half()[:, :16], bias)
    assert not cublaslt.fits(weight, torch.zeros(16).half()[::2])


@pytest.mark.parametrize(("gelu", "epilogue"), [(False, 4), (True, 36)])
def test_a_layer_is_described_once(library: Library, gelu, epilogue) -> None:
    t = tensors()
    layer = Layer(t.weight, t.bias, gelu)
    # Sums and the scale of the product in fp32.
    assert library.of("MatmulDescCreate") == [(101, 68, 0)]
    assert layer.operation.value == 101
    assert layer.address.value == t.weight.data_ptr()
    assert library.attributes("MatmulDesc", 101) == {
        3: (1, 4),
        7: (epilogue, 4),
        8: (t.bias.data_ptr(), 8),
    }
    del layer
    gc.collect()
    assert library.of("MatmulDescDestroy") == [(101,)]


def test_a_layer_is_destroyed_by_the_library_that_made_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a test has left behind must not reach a GPU's library."""
    t = tensors()
    layer = Layer(t.weight, t.bias)
    other = Library()
    monkeypatch.setattr(cublaslt, "_library", lambda: other)
    del layer
    gc.collect()
    assert library.of("MatmulDescDestroy") == [(101,)]
    assert not other.calls


@pytest.mark.parametrize(
    ("dtype", "number"), [(torch.float16, 2), (torch.bfloat16, 14)], ids=str
)
def test_matrices_are_described_as_columns(library: Library, dtype, number) -> None:
    t = tensors(dtype=dtype)
    problems = Problems()
    prepare(problems, t, Layer(t.weight, t.bias, False))
    # Rows, columns and the rows between two columns: W^T, x^T and y^T.
    assert library.of("MatrixLayoutCreate") == [
        (102, number, 16, 8, 16),
        (103, number, 16, 3, 16),
        (104, number, 8, 3, 8),
    ]
    del problems
    gc.collect()
    destroyed = [handle for (handle,) in library.of("MatrixLayoutDestroy")]
    assert sorted(destroyed) == [102, 103, 104]


def test_an_algorithm_is_asked_for_as_pytorch_asks(library: Library) -> None:
    room = torch.zeros(4096, dtype=torch.half)
    start = -room.data_ptr() % 512 // 2
    t = tensors()
    # At 256, 16, 64 and 32 bytes.
    t.weight = room[start : start + 128].view(8, 16)
    t.x = room[start + 256 + 8 : start + 256 + 56].view(3, 16)
    t.out = room[start + 512 + 32 : start + 512 + 56].view(3, 8)
    t.bias = room[start + 1024 + 16 : start + 1024 + 24]
    layer = Layer(t.weight, t.bias, False)
    prepare(Problems(), t, layer)
    (asked,) = library.of("MatmulAlgoGetHeuristic")
    assert asked[:8] == (HANDLE, 101, 102, 103, 104, 104, 105, 1)
    assert isinstance(asked[8], cublaslt._Heuristic)
    assert library.of("MatmulPreferenceCreate") == [(105,)]
    # 1 MiB of workspace; alignments of the weight, x, the output and the bias.
    assert library.attributes("MatmulPreference", 105) == {
        1: (2**20, 8),
        5: (256, 4),
        6: (16, 4),
        7: (64, 4),
        8: (32, 4),
    }
    assert library.of("MatmulPreferenceDestroy") == [(105,)]


def test_a_call_hands_over_addresses_of_its_layer(library: Library) -> None:
    t, other = tensors(), tensors()
    layers = [Layer(y.weight, y.bias, True) for y in (t, other)]
    problems = Problems()
    call = prepare(problems, t, layers[0])
    assert not library.of("Matmul")
    for layer in layers:
        call(layer)
    (problem,) = problems._found.values()
    for args, y, number in zip(
        library.of("Matmul"), (t, other), (101, 102), strict=True
    ):
        assert args[:2] == (HANDLE, number)
        assert args[2].value == 1 and args[7].value == 0
        assert args[3:7] == (y.weight.data_ptr(), 103, t.x.data_ptr(), 104)
        out = t.out.data_ptr()
        assert args[8:12] == (out, 105, out, 105)
        assert ctypes.addressof(args[12]) == ctypes.addressof(problem.found.algo)
        assert args[13] and args[14:] == (640, STREAM)


def test_a_call_holds_what_it_needs(library: Library) -> None:
    t = tensors()
    layer = Layer(t.weight, t.bias, False)
    problems = Problems()
    call = prepare(problems, t, layer)
    x, out, workspace = call.held
    assert x is t.x and out is t.out
    assert workspace.nbytes >= 640
    del problems
    gc.collect()
    call(layer)
    # Its layouts outlive the collection of problems.
    assert not library.of("MatrixLayoutDestroy")
    assert library.of("Matmul")[0][13] == workspace.data_ptr()


def test_a_stream_has_one_workspace_and_each_captured_gemm_its_own(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = Problems()

    def workspace(rows: int) -> torch.Tensor:
        t = tensors(rows)
        call = prepare(problems, t, Layer(t.weight, t.bias, False))
        return call.held[2]

    shared = workspace(3)
    # The most that cuBLASLt may ask for.
    assert shared.nbytes == 2**20
    assert workspace(5) is shared
    stream = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, stream, lambda device: STREAM + 1, raising=False)
    other = workspace(3)
    assert other is not shared and workspace(5) is other
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = [workspace(3), workspace(3)]
    assert len({id(x) for x in (shared, other, *captured)}) == 4
    assert [x.nbytes for x in captured] == [640, 640]


def test_an_algorithm_is_asked_for_once_for_its_sizes(library: Library) -> None:
    t = tensors()
    layer, gelu = (Layer(t.weight, t.bias, x) for x in (False, True))
    problems = Problems()

    def asked() -> int:
        return len(library.of("MatmulAlgoGetHeuristic"))

    for _ in range(2):
        prepare(problems, t, layer)
    assert asked() == 1
    prepare(problems, t, gelu)
    assert asked() == 2
    t.x, t.out = t.x[:2], t.out[:2]
    prepare(problems, t, layer)
    assert asked() == 3
    # At 2 bytes.
    t.x = torch.zeros(33, dtype=torch.half)[1:].view(2, 16)
    prepare(problems, t, layer)
    assert asked() == 4


def test_the_latest_problems_are_kept(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublaslt, "_MAX_PROBLEMS", 2)
    problems = Problems()
    t = tensors(rows=4)
    layer = Layer(t.weight, t.bias, False)
    for rows in (1, 2, 1, 3, 1, 2):
        prepare(problems, SimpleNamespace(**vars(t) | {"x": t.x[:rows]}), layer)
        assert len(problems._found) <= 2
    # 2 gave way to 3, since 1 was asked for again.
    asked = [args[3] for args in library.of("MatrixLayoutCreate")]
    assert asked[1::3] == [1, 2, 3, 2]
    assert [sizes.rows for sizes in problems._found] == [1, 2]
    gc.collect()
    assert len(library.of("MatrixLayoutDestroy")) == 6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cublasLtMatmulDescCreate", "cublasLtMatmulDescCreate|cublasLtMatmulDesc"),
        ("cublasLtMatmulDescSetAttribute", "set attribute 3 of cublasLtMatmulDesc"),
    ],
)
def test_a_layer_that_is_refused(library: Library, name, message) -> None:
    library.statuses[name] = 7
    t = tensors()
    with pytest.raises(RuntimeError, match=rf"({message}).*: status 7"):
        Layer(t.weight, t.bias, False)


SIZES = r"Sizes\(rows=3, form=Form\(outputs=8, inputs=16, "


@pytest.mark.parametrize(("status", "count"), [(15, 1), (0, 0)])
def test_an_algorithm_that_is_not_found(library: Library, status, count) -> None:
    library.statuses["cublasLtMatmulAlgoGetHeuristic"] = status
    library.count = count
    t = tensors()
    problems = Problems()
    layer = Layer(t.weight, t.bias, False)
    with pytest.raises(RuntimeError, match=f"find an algorithm for {SIZES}.*status 15"):
        prepare(problems, t, layer)
    # Nothing is kept of it, and it may be asked for again.
    assert not problems._found
    assert len(library.of("MatmulPreferenceDestroy")) == 1
    library.statuses.clear()
    library.count = 1
    prepare(problems, t, layer)


def test_a_launch_that_is_refused(library: Library) -> None:
    t = tensors()
    layer = Layer(t.weight, t.bias, False)
    call = prepare(Problems(), t, layer)
    library.statuses["cublasLtMatmul"] = 13
    with pytest.raises(RuntimeError, match=f"multiply {SIZES}.*status 13"):
        call(layer)


def test_a_layer_is_described_anew_where_its_weights_move(library: Library) -> None:
    module = torch.nn.Linear(16, 8).half()
    weights = BlockWeights()
    step = LtGemm(weights.add(Weights(module)), Problems())
    first = step.layer
    assert step.layer is first
    module.bias.data.fill_(1)
    weights.refresh()
    assert step.layer is first
    moved = module.weight.data.clone()
    module.weight.data = moved
    weights.refresh()
    second = step.layer
    assert second is not first
    assert second.address.value == moved.data_ptr()
    module.bias = torch.nn.Parameter(module.bias.data.clone())
    weights.refresh()
    third = step.layer
    bias = library.attributes("MatmulDesc", third.operation.value)[8][0]
    assert third is not second and bias == module.bias.data_ptr()
    del first, second
    gc.collect()
    assert library.of("MatmulDescDestroy") == [(101,), (102,)]

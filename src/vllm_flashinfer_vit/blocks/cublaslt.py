# SPDX-License-Identifier: Apache-2.0
"""cuBLASLt's GEMM for a linear layer, its bias and maybe a GELU, settled beforehand.

In every call PyTorch describes a GEMM to cuBLASLt and asks it for an algorithm: 16 us
for an H200's host, where the launch takes 5. Here both are done once for each number of
rows. What is asked is what PyTorch asks (`gemm_and_bias` in its
aten/src/ATen/cuda/CUDABlas.cpp), so that results have the same bits.

The library is the one that PyTorch has loaded, called by its C interface:
https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

import ctypes
import functools
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# cudaDataType_t and cublasComputeType_t.
_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_FP32 = 0
_COMPUTE_FP32 = 68
# cublasLtMatmulDescAttributes_t.
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER = 3, 7, 8
# cublasLtEpilogue_t; the GELU is of the tanh form.
_BIAS, _GELU_BIAS = 4, 36
# cublasLtMatmulPreferenceAttributes_t: the workspace, then the alignment of A to D.
_MAX_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
# PyTorch's default, in bytes, and the largest alignment that it tells of. With more
# memory cuBLASLt would split some sums over inputs otherwise.
_WORKSPACE = 2**20
_MAX_ALIGNMENT = 256
# A serving engine meets some hundred sizes of images, each with four GEMMs.
_MAX_PROBLEMS = 1024


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@functools.cache
def _library() -> Any:
    """Return the cuBLASLt of this process, None where PyTorch has not loaded one.

    Its calls are short, and keep the interpreter's lock: whoever gives it away may wait
    for milliseconds until other threads of an engine give it back.
    """
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.PyDLL(f"libcublasLt.so.{major}", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def is_available() -> bool:
    """Whether GEMMs can be settled here: on a Hopper GPU, where this was measured."""
    return (
        torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] == 9
        and _library() is not None
    )


def fits(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a layer's GEMM can be settled: 16 bits, a bias, rows without gaps."""
    return (
        weight.dtype in _TYPES
        and bias is not None
        and bias.dtype == weight.dtype
        and weight.is_contiguous()
        and bias.is_contiguous()
    )


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt could not {what}: status {status}")


def _create(name: str, *arguments: object) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(_library()[f"{name}Create"](ctypes.byref(handle), *arguments), name)
    return handle


def _destroy(name: str, address: int) -> None:
    _library()[f"{name}Destroy"](ctypes.c_void_p(address))


def _owned(owner: object, name: str, handle: ctypes.c_void_p) -> ctypes.c_void_p:
    """Have what a handle stands for destroyed with its owner."""
    weakref.finalize(owner, _destroy, name, handle.value or 0)
    return handle


def _set(name: str, handle: ctypes.c_void_p, attribute: int, value: object) -> None:
    status = _library()[f"{name}SetAttribute"](
        handle,
        attribute,
        ctypes.byref(value),  # type: ignore[arg-type]
        ctypes.c_size_t(ctypes.sizeof(value)),  # type: ignore[arg-type]
    )
    _check(status, f"set attribute {attribute} of {name}")


class LayerWeights:
    """A layer's weight and bias as settled GEMMs take them.

    Attributes:
        address: Of the weight.
        operation: What is computed, with the bias's address.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, gelu: bool) -> None:
        """Describe a layer.

        Args:
            weight: `[outputs, inputs]`, see `fits`.
            bias: `[outputs]` likewise.
            gelu: Whether the tanh GELU follows.
        """
        name = "cublasLtMatmulDesc"
        self.address = ctypes.c_void_p(weight.data_ptr())
        self.operation = _owned(self, name, _create(name, _COMPUTE_FP32, _FP32))
        # Rows of PyTorch's are columns of cuBLAS's: y^T = W x^T, W read transposed.
        _set(name, self.operation, _TRANSPOSE_A, ctypes.c_int(1))
        epilogue = _GELU_BIAS if gelu else _BIAS
        _set(name, self.operation, _EPILOGUE, ctypes.c_int(epilogue))
        _set(name, self.operation, _BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))


class Sizes(NamedTuple):
    """What selects an algorithm.

    Attributes:
        rows: T.
        outputs: The weight's rows.
        inputs: The weight's columns.
        dtype: Of all tensors.
        gelu: Whether the tanh GELU follows.
        alignments: Of the weight, x, the output and the bias, in bytes.
    """

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    gelu: bool
    alignments: tuple[int, int, int, int]


class _Problem:
    """A GEMM of some sizes: how its matrices lie, and cuBLASLt's algorithm for it."""

    def __init__(
        self, handle: ctypes.c_void_p, layer: LayerWeights, sizes: Sizes
    ) -> None:
        dtype = _TYPES[sizes.dtype]

        def layout(rows: int, columns: int) -> ctypes.c_void_p:
            name = "cublasLtMatrixLayout"
            size = ctypes.c_uint64(rows), ctypes.c_uint64(columns)
            made = _create(name, dtype, *size, ctypes.c_int64(rows))
            return _owned(self, name, made)

        self.weight = layout(sizes.inputs, sizes.outputs)
        self.x = layout(sizes.inputs, sizes.rows)
        self.out = layout(sizes.outputs, sizes.rows)
        name = "cublasLtMatmulPreference"
        preference = _create(name)
        try:
            _set(name, preference, _MAX_WORKSPACE, ctypes.c_uint64(_WORKSPACE))
            for attribute, alignment in zip(_ALIGNMENTS, sizes.alignments, strict=True):
                _set(name, preference, attribute, ctypes.c_uint32(alignment))
            self.found, count = _Heuristic(), ctypes.c_int()
            status = _library().cublasLtMatmulAlgoGetHeuristic(
                handle,
                layer.operation,
                self.weight,
                self.x,
                self.out,
                self.out,
                preference,
                1,
                ctypes.byref(self.found),
                ctypes.byref(count),
            )
        finally:
            _destroy(name, preference.value or 0)
        _check(status or int(count.value == 0), f"find an algorithm for {sizes}")


class Problems:
    """The algorithms that a tower's passes have asked for, the latest ones.

    GEMMs of one stream run one after another, so they share a workspace: kept passes
    hold none of their own. What a CUDA graph captures belongs to the graph.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._workspaces: dict[tuple[int, int], torch.Tensor] = {}
        self._found: OrderedDict[Sizes, _Problem] = OrderedDict()
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def prepare(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        layer: LayerWeights,
        out: torch.Tensor,
        gelu: bool,
    ) -> Callable[[LayerWeights], None]:
        """Settle the GEMM of layers of the same sizes, on the current stream.

        Args:
            x: `[T, inputs]`, contiguous. Calls read what it holds by then.
            weight: One layer's.
            bias: That layer's.
            layer: The same as the GEMM takes it.
            out: `[T, outputs]`, contiguous; each call overwrites it.
            gelu: Whether the tanh GELU follows.

        Returns:
            A call that launches the GEMM for any layer whose weight and bias are like
            these, and aligned as these.

        Raises:
            RuntimeError: cuBLASLt refuses.
        """
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        outputs, inputs = weight.shape
        alignments = (
            _alignment(weight),
            _alignment(x),
            _alignment(out),
            _alignment(bias),
        )
        sizes = Sizes(len(x), outputs, inputs, x.dtype, gelu, alignments)
        problem = self._found.get(sizes)
        if problem is None:
            problem = self._found[sizes] = _Problem(handle, layer, sizes)
            if len(self._found) > _MAX_PROBLEMS:
                self._found.popitem(last=False)
        else:
            self._found.move_to_end(sizes)
        device = x.device.index
        raw_stream = torch._C._cuda_getCurrentRawStream(device)
        workspace_bytes = problem.found.workspace
        workspace = self._workspace(x, workspace_bytes, (device, raw_stream))
        matmul = _library().cublasLtMatmul
        one, zero = ctypes.byref(self._one), ctypes.byref(self._zero)
        x_at, out_at = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        algorithm = ctypes.byref(problem.found.algo)
        room = ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(workspace_bytes)
        stream = ctypes.c_void_p(raw_stream)

        def launch(layer: LayerWeights) -> None:
            status = matmul(
                handle,
                layer.operation,
                one,
                layer.address,
                problem.weight,
                x_at,
                problem.x,
                zero,
                out_at,
                problem.out,
                out_at,
                problem.out,
                algorithm,
                *room,
                stream,
            )
            if status:
                _check(status, f"multiply {sizes}")

        launch.held = x, out, workspace  # type: ignore[attr-defined]
        return launch

    def _workspace(
        self, like: torch.Tensor, num_bytes: int, where: tuple[int, int]
    ) -> torch.Tensor:
        """Return memory on the current stream, which `where` names."""
        if torch.cuda.is_current_stream_capturing():
            return like.new_empty(num_bytes, dtype=torch.uint8)
        found = self._workspaces.get(where)
        if found is None:
            found = like.new_empty(_WORKSPACE, dtype=torch.uint8)
            self._workspaces[where] = found
        return found


def _alignment(tensor: torch.Tensor) -> int:
    """Return the largest power of two that divides a tensor's address, up to 256."""
    address = tensor.data_ptr() | _MAX_ALIGNMENT
    return address & -address

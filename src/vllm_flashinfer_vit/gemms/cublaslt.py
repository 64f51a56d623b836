# SPDX-License-Identifier: Apache-2.0
"""cuBLASLt's GEMM for a linear layer, its bias and maybe a GELU, settled beforehand.

In every call PyTorch describes a GEMM to cuBLASLt and asks it for an algorithm: 16 us
for an H200's host, where the launch takes 5. Here both are done once for each number of
rows. What is asked is what PyTorch asks (`gemm_and_bias` and, for FP8, `scaled_gemm` in
its aten/src/ATen/cuda/CUDABlas.cpp), so that results have the same bits.

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

from vllm_flashinfer_vit.gemms.catalog import Scales

# cudaDataType_t and cublasComputeType_t.
_TYPES = {torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
_FP32 = 0
_COMPUTE_FP32 = 68
# cublasLtMatmulDescAttributes_t.
_POINTER_MODE, _TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER = 2, 3, 7, 8
_SCALE_POINTERS, _SCALE_MODES = (17, 18), (31, 32)
_FAST_ACCUMULATION, _BIAS_TYPE = 25, 26
# cublasLtEpilogue_t; the GELU is of the tanh form.
_PLAIN, _BIAS, _GELU_BIAS = 1, 4, 36
# cublasLtMatmulMatrixScale_t: a scale of each row of x, and of each output.
_OUTER_VECTORS = 3
# cublasLtPointerMode_t: factors of the product are in the device's memory.
_ON_DEVICE = 1
# cublasStatus_t, for a GEMM that no algorithm is for.
_NOT_SUPPORTED = 15
# The first cuBLASLt with scales of rows.
_ROW_SCALES_VERSION = 120900
# cublasLtMatmulPreferenceAttributes_t: the workspace, then the alignment of A to D.
_MAX_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
# PyTorch's default, in bytes, and the largest alignment that it tells of. With more
# memory cuBLASLt would split some sums over inputs otherwise.
_WORKSPACE = 2**20
_MAX_ALIGNMENT = 256
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)
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


def takes_fp8() -> bool:
    """Whether GEMMs in FP8 can be settled here, with every kind of scales."""
    return is_available() and _library().cublasLtGetVersion() >= _ROW_SCALES_VERSION


def fits(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a layer's GEMM can be settled: 16 bits, a bias, rows without gaps."""
    return (
        weight.dtype in (torch.float16, torch.bfloat16)
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


def _owned(owner: object, name: str, handle: ctypes.c_void_p) -> ctypes.c_void_p:
    """Have what a handle stands for destroyed with its owner."""
    weakref.finalize(owner, _library()[f"{name}Destroy"], handle)
    return handle


def _set(name: str, handle: ctypes.c_void_p, attribute: int, value: object) -> None:
    status = _library()[f"{name}SetAttribute"](
        handle,
        attribute,
        ctypes.byref(value),  # type: ignore[arg-type]
        ctypes.c_size_t(ctypes.sizeof(value)),  # type: ignore[arg-type]
    )
    _check(status, f"set attribute {attribute} of {name}")


class Scaling(NamedTuple):
    """The scales of a layer in FP8.

    Attributes:
        kind: What they are of.
        weight_scale: fp32, on the layer's device: one, or `[outputs]` for `rows`.
        constants: For `tokens` fp32 `[outputs + 1]` there, ones and then a zero, else
            None.
    """

    kind: Scales
    weight_scale: torch.Tensor
    constants: torch.Tensor | None = None


class Form(NamedTuple):
    """What layers have alike that have one algorithm.

    Attributes:
        outputs: The weight's rows.
        inputs: The weight's columns.
        dtype: Of the weight and of x.
        epilogue: A cublasLtEpilogue_t.
        scales: Kind of scales in FP8, else None.
        alignments: Of the weight and the bias, in bytes.
    """

    outputs: int
    inputs: int
    dtype: torch.dtype
    epilogue: int
    scales: Scales | None
    alignments: tuple[int, int]


class Layer:
    """A layer's parameters as settled GEMMs take them.

    Attributes:
        address: Of the weight.
        operation: What is computed, with the addresses of bias and scales.
        form: What an algorithm is chosen by.
        factors: Of the product, and of what is in the output already, as launches
            take them.
        row_scales: Address of the rows' scales that the operation reads, 0 for none.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gelu: bool = False,
        scaling: Scaling | None = None,
    ) -> None:
        """Describe a layer. It holds none of the tensors, which have to outlive it.

        Args:
            weight: `[outputs, inputs]`, contiguous, in 16 bits (see `fits`) or e4m3.
            bias: `[outputs]`, contiguous, in 16 bits, or None in FP8.
            gelu: Whether the tanh GELU follows; not in FP8.
            scaling: Its scales in FP8. Those of rows are given later, see `read`.

        Raises:
            RuntimeError: cuBLASLt refuses.
        """
        name = "cublasLtMatmulDesc"
        self.address = ctypes.c_void_p(weight.data_ptr())
        self.operation = _owned(self, name, _create(name, _COMPUTE_FP32, _FP32))
        # Rows of PyTorch's are columns of cuBLAS's: y^T = W x^T, W read transposed.
        self._set(_TRANSPOSE_A, ctypes.c_int(1))
        epilogue = _PLAIN
        if bias is not None:
            epilogue = _GELU_BIAS if gelu else _BIAS
            self._set(_EPILOGUE, ctypes.c_int(epilogue))
            self._set(_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        self.factors: tuple[Any, Any] = ctypes.byref(_ONE), ctypes.byref(_ZERO)
        self.row_scales = 0
        if scaling is not None:
            self._scale(scaling, bias)
        alignment = _MAX_ALIGNMENT if bias is None else _alignment(bias)
        outputs, inputs = weight.shape
        self.form = Form(
            outputs,
            inputs,
            weight.dtype,
            epilogue,
            None if scaling is None else scaling.kind,
            (_alignment(weight), alignment),
        )

    def _scale(self, scaling: Scaling, bias: torch.Tensor | None) -> None:
        kind, weight_scale, constants = scaling
        # Fast accumulation, as vLLM's own GEMM has it.
        self._set(_FAST_ACCUMULATION, ctypes.c_int8(1))
        if bias is not None:
            self._set(_BIAS_TYPE, ctypes.c_int(_TYPES[bias.dtype]))
        if kind != "tensor":
            for attribute in _SCALE_MODES:
                self._set(attribute, ctypes.c_int(_OUTER_VECTORS))
        read = weight_scale
        if kind == "tokens":
            assert constants is not None
            # Scales of rows are only taken with scales of outputs: those are ones, and
            # the weight's scale is the product's factor, read where it is.
            read = constants
            self._set(_POINTER_MODE, ctypes.c_int(_ON_DEVICE))
            zero = constants[-1:]
            self.factors = (
                ctypes.c_void_p(weight_scale.data_ptr()),
                ctypes.c_void_p(zero.data_ptr()),
            )
        self._set(_SCALE_POINTERS[0], ctypes.c_void_p(read.data_ptr()))

    def read(self, row_scales: int) -> None:
        """Have launches from now on read the rows' scales at an address."""
        self._set(_SCALE_POINTERS[1], ctypes.c_void_p(row_scales))
        self.row_scales = row_scales

    def _set(self, attribute: int, value: object) -> None:
        _set("cublasLtMatmulDesc", self.operation, attribute, value)


class Sizes(NamedTuple):
    """What selects an algorithm.

    Attributes:
        rows: T.
        form: The layer's.
        dtype: Of the output.
        alignments: Of x and the output, in bytes.
    """

    rows: int
    form: Form
    dtype: torch.dtype
    alignments: tuple[int, int]


class _Problem:
    """A GEMM of some sizes: how its matrices lie, and cuBLASLt's algorithm for it."""

    def __init__(self, handle: ctypes.c_void_p, layer: Layer, sizes: Sizes) -> None:
        def layout(dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
            name = "cublasLtMatrixLayout"
            size = ctypes.c_uint64(rows), ctypes.c_uint64(columns)
            made = _create(name, _TYPES[dtype], *size, ctypes.c_int64(rows))
            return _owned(self, name, made)

        form = sizes.form
        self.weight = layout(form.dtype, form.inputs, form.outputs)
        self.x = layout(form.dtype, form.inputs, sizes.rows)
        self.out = layout(sizes.dtype, form.outputs, sizes.rows)
        of_weight, of_bias = form.alignments
        of_x, of_out = sizes.alignments
        name = "cublasLtMatmulPreference"
        preference = _create(name)
        try:
            _set(name, preference, _MAX_WORKSPACE, ctypes.c_uint64(_WORKSPACE))
            alignments = of_weight, of_x, of_out, of_bias
            for attribute, alignment in zip(_ALIGNMENTS, alignments, strict=True):
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
            _library()[f"{name}Destroy"](preference)
        if not (status or count.value):
            status = _NOT_SUPPORTED
        _check(status, f"find an algorithm for {sizes}")


class Problems:
    """The algorithms that a tower's passes have asked for, the latest ones.

    GEMMs of one stream run one after another, so they share a workspace: kept passes
    hold none of their own. What a CUDA graph captures belongs to the graph.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._workspaces: dict[tuple[int, int], torch.Tensor] = {}
        self._found: OrderedDict[Sizes, _Problem] = OrderedDict()

    def prepare(
        self, x: torch.Tensor, layer: Layer, out: torch.Tensor
    ) -> Callable[[Layer], None]:
        """Settle the GEMM of layers of the same sizes, on the current stream.

        Args:
            x: `[T, inputs]`, contiguous, of the weight's dtype. Calls read what it
                holds by then.
            layer: One layer.
            out: `[T, outputs]`, contiguous, in 16 bits; each call overwrites it.

        Returns:
            A call that launches the GEMM for any layer whose parameters are like this
            one's, and aligned as its.

        Raises:
            RuntimeError: cuBLASLt refuses.
        """
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        alignments = _alignment(x), _alignment(out)
        sizes = Sizes(len(x), layer.form, out.dtype, alignments)
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
        x_at, out_at = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        algorithm = ctypes.byref(problem.found.algo)
        room = ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(workspace_bytes)
        stream = ctypes.c_void_p(raw_stream)

        def launch(layer: Layer) -> None:
            factor, of_output = layer.factors
            status = matmul(
                handle,
                layer.operation,
                factor,
                layer.address,
                problem.weight,
                x_at,
                problem.x,
                of_output,
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

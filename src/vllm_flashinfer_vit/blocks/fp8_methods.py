# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights vLLM holds in FP8: which of them run here.

Methods of vLLM that end in its CUTLASS kernel are known here, by name. Where that runs,
none of them has a dynamic scale for all tokens of a batch. With scales of blocks vLLM
prefers DeepGEMM for many sizes: those layers stay vLLM's own.
"""

from typing import Any

import torch
from vllm.model_executor.layers.linear import RowParallelLinear

from vllm_flashinfer_vit.blocks.aligned_linear import inputs_of
from vllm_flashinfer_vit.choices.gemm_table import GemmLayer
from vllm_flashinfer_vit.gemms.catalog import scales_of
from vllm_flashinfer_vit.gemms.scaled_mm import cutlass_op
from vllm_flashinfer_vit.kernels.formats import GROUP, dtype_name, num_groups

# Methods whose `apply` is no more than their kernel's.
_METHODS = {
    "Fp8LinearMethod",
    "Fp8PerBlockOnlineLinearMethod",
    "Fp8PerTensorOnlineLinearMethod",
    "Fp8PtpcOnlineLinearMethod",
    "CompressedTensorsLinearMethod",
    "ModelOptFp8LinearMethod",
    "ModelOptFp8PcPtLinearMethod",
    # From vLLM 0.32 on in place of both.
    "ModelOptLinearMethod",
}
# CUTLASS wants rows of whole 16 bytes.
_UNIT = 16


def problem(layer: Any) -> str | None:
    """Return why a loaded layer is no `Fp8Linear` of the program's, None if it is."""
    kernel = kernel_of(layer)
    if kernel is None:
        return "its method is not one that is known here"
    if not can_launch(layer, kernel):
        return f"its GEMM is {type(kernel).__name__}"
    return _misfit(layer, kernel)


def kernel_of(layer: Any) -> Any:
    """Return what vLLM multiplies a layer's FP8 weights by, None for other layers."""
    held = held_kernel(layer)
    return None if held is None else getattr(*held)


def held_kernel(layer: Any) -> tuple[Any, str] | None:
    """Return what holds a layer's kernel, and as which attribute; see `kernel_of`."""
    method = getattr(layer, "quant_method", None)
    if type(method).__name__ not in _METHODS:
        return None
    for holder in (method, getattr(layer, "scheme", None)):
        for name in ("fp8_linear", "kernel"):
            if getattr(holder, name, None) is not None:
                return holder, name
    return None


def can_launch(layer: Any, kernel: Any) -> bool:
    """Whether vLLM runs a layer by the GEMM that is launched here."""
    # Not on top: it brings all of vLLM's kernels, some of which start compilers, and a
    # server's processes without a model load this module, too.
    from vllm.model_executor.kernels.linear.scaled_mm import (
        CutlassFP8ScaledMMLinearKernel,
    )
    from vllm.model_executor.kernels.linear.scaled_mm.cutlass import (
        CutlassFp8BlockScaledMMKernel,
    )

    from vllm_flashinfer_vit.blocks.fp8_padding import TilesKernel

    known: tuple[type, ...] = CutlassFP8ScaledMMLinearKernel, TilesKernel
    if has_blocks(layer):
        known = (CutlassFp8BlockScaledMMKernel,)
    is_known = type(kernel) in known
    return is_known and cutlass_op() is not None and bool(layer.weight.is_cuda)


def has_blocks(layer: Any) -> bool:
    """Whether each block of a layer's weight has a scale, and each group of a row."""
    return getattr(layer, "weight_block_size", None) is not None


def scale_name(layer: Any) -> str:
    """Return the name of the parameter that holds the weight's scales."""
    inverse = "weight_scale_inv"
    return inverse if getattr(layer, inverse, None) is not None else "weight_scale"


def sizes(layer: Any) -> tuple[int, int]:
    """Return a layer's inputs and outputs, with padding."""
    rows, columns = layer.weight.shape
    return (columns, rows) if has_blocks(layer) else (rows, columns)


def measured_as(layer: Any) -> GemmLayer | None:
    """Return what tables know a layer by, None if none has its kind of scales."""
    if has_blocks(layer):
        return None
    (inputs, outputs), num_scales = sizes(layer), layer.weight_scale.numel()
    scales = scales_of(is_static(layer), num_scales)
    dtype = dtype_name(layer.params_dtype)
    return None if scales is None else GemmLayer(dtype, inputs, outputs, scales)


def is_static(layer: Any) -> bool:
    """Whether one scale for all rows is the layer's own."""
    return getattr(layer, "input_scale", None) is not None


def has_plain_inputs(layer: Any) -> bool:
    """Whether a layer's inputs are not padded."""
    return bool(sizes(layer)[0] == inputs_of(layer))


def has_plain_outputs(layer: Any) -> bool:
    """Whether a layer's outputs are not padded."""
    size = getattr(layer, "output_size_per_partition", layer.output_size)
    return bool(sizes(layer)[1] == size)


def has_plain_sizes(layer: Any) -> bool:
    """Whether a layer is not padded."""
    return has_plain_inputs(layer) and has_plain_outputs(layer)


def _misfit(layer: Any, kernel: Any) -> str | None:
    """Say what of a layer is not as its GEMM is launched here, None if all is."""
    weight, scale = layer.weight, getattr(layer, scale_name(layer), None)
    given = getattr(layer, "input_scale", None)
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2 or scale is None:
        return "its weight is no matrix in e4m3 with scales"
    is_split = getattr(layer, "tp_size", 1) > 1
    if isinstance(layer, RowParallelLinear):
        is_plain = layer.input_is_parallel and (layer.reduce_results or not is_split)
    else:
        is_plain = not (getattr(layer, "gather_output", False) and is_split)
    is_static = kernel.config.activation_quant_key.scale.static
    if has_blocks(layer):
        weight = weight.t()
        is_scaled = tuple(scale.shape) == tuple(map(num_groups, layer.weight.shape))
        is_scaled &= list(layer.weight_block_size) == [GROUP, GROUP]
    else:
        is_scaled = scale.numel() in (1, weight.shape[1])
    problems = {
        "it splits or gathers rows": not is_plain,
        f"its weight is not in columns of multiples of {_UNIT}": weight.stride(0) != 1
        or any(size % _UNIT for size in weight.shape),
        "its weight has neither one scale nor one for each output or block of "
        f"{GROUP} x {GROUP}": scale.dtype != torch.float32
        or not scale.is_contiguous()
        or not is_scaled,
        "its rows have neither one given scale nor each its own": (given is not None)
        != is_static
        or (given is not None and given.numel() != 1),
        "the scales of its rows are bounded": getattr(layer, "input_scale_ub", None)
        is not None,
    }
    return next((what for what, is_so in problems.items() if is_so), None)

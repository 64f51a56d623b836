# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights vLLM holds in FP8, their rows quantised by who made them.

Weights and scales are the layer's own. What is in front of a layer writes its rows in
e4m3: a norm, or an MLP's activation; attention's output takes a launch of its own. A
scale is given for the layer, or each token gets its own from its largest value; where
the weight has scales of blocks, each group of a token's values.

What multiplies is the GEMM that was measured fastest for so many rows, or vLLM's own;
see `choices.gemms`. `fp8_methods` says which layers run here.
"""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import RowParallelLinear

from vllm_flashinfer_vit.blocks.fp8_methods import (
    has_blocks,
    has_plain_outputs,
    is_static,
    scale_name,
)
from vllm_flashinfer_vit.blocks.tower_pass import Pass
from vllm_flashinfer_vit.choices.gemm_table import GemmClass
from vllm_flashinfer_vit.gemms.catalog import scales_of
from vllm_flashinfer_vit.gemms.cublaslt import Problems
from vllm_flashinfer_vit.gemms.epilogue_gemm import Layer
from vllm_flashinfer_vit.gemms.quack import is_close
from vllm_flashinfer_vit.gemms.scaled_mm import ScaledGemm, ScaledWeight, scaled_gemm
from vllm_flashinfer_vit.kernels.act_quantize_ref import act_ref
from vllm_flashinfer_vit.kernels.formats import Activation, num_groups
from vllm_flashinfer_vit.kernels.row_scales_ref import quantize_rows_ref, scaled_mm_ref

_TRIAL_ROWS = (16,)
# For scales of blocks there is another kernel for few rows and for odd numbers.
_BLOCK_TRIAL_ROWS = (17, 132)


class Fp8Weights:
    """A layer's parameters as its GEMM takes them, see `linear.Weights`.

    Attributes:
        scaled: Weight, its scales and what the GEMM adds, in the layer's own memory; K
            and N with padding.
        bias: `[outputs]`, or None.
        input_scale: fp32, one, or None for scales of each token's own.
    """

    def __init__(self, layer: torch.nn.Module, adds_bias: bool = True) -> None:
        """Take a layer that runs here, see `problem`, and whether its GEMM adds."""
        self._parameters = layer._parameters
        self._adds_bias = adds_bias
        self._has_blocks = has_blocks(layer)
        self._scale_name = scale_name(layer)
        self.renew()

    @property
    def places(self) -> list[tuple[dict[str, Any], str]]:
        """Where the layer has its parameters."""
        names = ("weight", self._scale_name, "bias", "input_scale")
        found = self._parameters
        return [(found, name) for name in names if found.get(name) is not None]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where weight, its scales and the bias are now, 0 for no bias."""
        names = "weight", self._scale_name, "bias"
        found = [self._parameters.get(name) for name in names]
        # See `linear.BlockWeights`.
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(0 if one is None else one.data_ptr() for one in found)

    def renew(self) -> None:
        """Take the parameters as they are now."""
        found = {
            name: None if parameter is None else parameter.detach()
            for name, parameter in self._parameters.items()
        }
        weight, weight_scale = found["weight"], found[self._scale_name]
        assert weight is not None and weight_scale is not None
        if self._has_blocks:
            # vLLM keeps both as checkpoints have them.
            weight, weight_scale = weight.t(), weight_scale.t()
        elif weight_scale.numel() > 1:
            weight_scale = weight_scale.view(1, -1)
        self.bias = found.get("bias")
        self.input_scale = found.get("input_scale")
        added = self.bias if self._adds_bias else None
        self.scaled = ScaledWeight(weight, weight_scale, added)


class Gemms:
    """The GEMMs of layers that are alike; a pass asks once which one it runs.

    Attributes:
        classes: Which serves how many rows, ascending; the last is unbounded.
    """

    def __init__(
        self, classes: tuple[GemmClass, ...], gemms: Mapping[str, ScaledGemm]
    ) -> None:
        """Take classes, and their GEMMs by name; see `trial`."""
        self.classes = classes
        self._gemms = gemms

    def for_rows(self, rows: int) -> ScaledGemm:
        """Return the GEMM for so many rows."""
        served_by = (
            gemm
            for max_rows, gemm in self.classes
            if max_rows is None or rows <= max_rows
        )
        return self._gemms[next(served_by)]


class Fp8Linear:
    """A layer's GEMM over rows that are quantised already.

    Attributes:
        weights: The layer's parameters.
        gemms: What multiplies them.
        is_static: Whether its rows are quantised by the layer's `input_scale`.
        groups: Scales of each row, if its weight has scales of blocks, else 0.
        inputs: Values in a row, padding included.
        outputs: Columns that the GEMM writes, padding included.
    """

    def __init__(self, layer: Any, gemms: Gemms, with_bias: bool = True) -> None:
        """Take a layer that runs here, see `problem`.

        Args:
            layer: The layer.
            gemms: GEMMs that can run it.
            with_bias: Whether the GEMM adds the layer's bias.
        """
        is_row_parallel = isinstance(layer, RowParallelLinear)
        self._is_summed = is_row_parallel and layer.tp_size > 1
        # The sum over ranks has it once.
        adds_bias = with_bias and not (self._is_summed and layer.tp_rank > 0)
        self.weights, self.gemms = Fp8Weights(layer, adds_bias), gemms
        self.is_static = self.weights.input_scale is not None
        self.inputs, self.outputs = self.weights.scaled.weight.shape
        self.groups = num_groups(self.inputs) if has_blocks(layer) else 0

    @property
    def bias(self) -> torch.Tensor | None:
        """`[outputs]` without padding, or None."""
        return self.weights.bias

    @property
    def like_scales(self) -> torch.Tensor:
        """Scales like those of the layer's rows, which may not exist yet."""
        given = self.weights.input_scale
        return self.weights.scaled.scale if given is None else given

    def as_layer(self, scales: torch.Tensor, bias: torch.Tensor | None) -> Layer:
        """Return the layer as QuACK's GEMMs take it, where it is now.

        Args:
            scales: Of its rows.
            bias: What the kernel adds, or None.
        """
        scaled = self.weights.scaled
        found = scaled.made.get("quack")
        if found is None:
            found = scaled.made["quack"] = scaled.weight.t(), scaled.scale.flatten()
        weight, col_scales = found
        return Layer(weight, bias, scales.flatten(), col_scales)

    def rows(self, now: Pass) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where a pass has the layer's rows, `[T, inputs]`, and their scales."""
        given = self.weights.input_scale
        if given is None:
            given = now.group_scales(self.groups) if self.groups else now.scales
        return now.quantized(self.inputs), given

    def __call__(
        self, now: Pass, rows: torch.Tensor, scales: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiply, and add over ranks where the layer is split along its inputs.

        Args:
            now: The pass, which keeps the settled GEMM.
            rows: `[T, inputs]` e4m3, contiguous.
            scales: What they were quantised by.
            out: `[T, outputs]` fp16 or bf16, rows of whole 16 bytes.

        Returns:
            `out`, or a tensor like it with the ranks' sum.
        """
        # A launch holds rows and output, whose ids stay their own so.
        scaled, key = self.weights.scaled, (self.gemms, id(rows), id(out))
        launch = now.settled.get(key)
        if launch is None:
            gemm = self.gemms.for_rows(len(rows))
            launch = now.settled[key] = gemm.prepare(scaled, rows, scales, out)
        launch(scaled, scales)
        return tensor_model_parallel_all_reduce(out) if self._is_summed else out


def quantize(x: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise rows that nothing in front of a layer has quantised.

    Args:
        x: `[T, K]` fp16 or bf16, contiguous.
        rows: `[T, K]` e4m3, contiguous; written.
        scales: fp32: one, which is read, or `[T, 1]` or `[T, num_groups(K)]`, which is
            written; see `kernels.formats.check_row_scales`.
    """
    if not x.is_cuda:
        quantize_rows_ref(x, rows, scales)
        return
    from vllm_flashinfer_vit.kernels.act_quantize import act_quantize

    act_quantize(x, x.shape[1], None, None, rows, scales)


def prepare_rows(
    values: torch.Tensor,
    width: int,
    bias: torch.Tensor | None,
    activation: Activation | None,
    rows: torch.Tensor,
    scales: torch.Tensor,
) -> Callable[[torch.Tensor | None, torch.Tensor], None]:
    """Settle the quantising of rows that stay where they are.

    Args:
        values: As for `kernels.act_quantize.prepare`, like the other arguments.
        width: See `values`.
        bias: See `values`.
        activation: See `values`.
        rows: See `values`.
        scales: See `values`.

    Returns:
        A call of a bias and scales like these.
    """
    if values.is_cuda:
        from vllm_flashinfer_vit.kernels.act_quantize import prepare

        return prepare(values, width, bias, activation, rows, scales)

    def call(bias: torch.Tensor | None, scales: torch.Tensor) -> None:
        quantize_rows_ref(act_ref(values, width, bias, activation), rows, scales)

    return call


def alike(layer: Any) -> tuple[object, ...]:
    """Return what layers that run here have alike if one `trial` is for all."""
    bias = _tried_bias(layer)
    return (
        *layer.weight.shape,
        getattr(layer, scale_name(layer)).numel(),
        has_blocks(layer),
        layer.params_dtype,
        is_static(layer),
        None if bias is None else bias.dtype,
    )


def gemm_of(layer: Any, name: str, problems: Problems) -> ScaledGemm:
    """Return a GEMM by its name for layers that are like a loaded one.

    Args:
        layer: A layer that has no `problem`.
        name: One of `GEMMS`.
        problems: Keeps cuBLASLt's algorithms.

    Raises:
        RuntimeError: It cannot run here.
    """
    kind = scales_of(is_static(layer), getattr(layer, scale_name(layer)).numel())
    device = layer.weight.device
    return scaled_gemm(name, kind, device, problems, has_blocks(layer))


def _tried_bias(layer: Any) -> torch.Tensor | None:
    """Return the bias that the GEMM adds; vLLM pads outputs, and not their bias."""
    return layer._parameters.get("bias") if has_plain_outputs(layer) else None


def trial(layer: Any, name: str, problems: Problems) -> str | None:
    """Run a layer that has no `problem` on a few rows.

    Args:
        layer: The layer, its weights loaded.
        name: What multiplies, one of `GEMMS`.
        problems: Keeps cuBLASLt's algorithms.

    Returns:
        None if all is right, else that its results are wrong.

    Raises:
        Exception: Of any kind, where it cannot be run at all.
    """
    gemm = gemm_of(layer, name, problems)
    counts = _BLOCK_TRIAL_ROWS if has_blocks(layer) else _TRIAL_ROWS
    # Ranks but the first, and an MLP's first layer, run without their bias.
    biases = {False, _tried_bias(layer) is not None}
    if all(_is_right(layer, gemm, *t) for t in product(counts, biases)):
        return None
    return "its results are wrong"


def _is_right(layer: Any, gemm: ScaledGemm, count: int, adds_bias: bool) -> bool:
    """Run a layer's GEMM on so many rows, and compare it with fp32."""
    weights = Fp8Weights(layer, adds_bias)
    scaled, scales = weights.scaled, weights.input_scale
    inputs, outputs = scaled.weight.shape
    x = torch.linspace(-1, 1, count * inputs, device=scaled.weight.device)
    x = x.to(layer.params_dtype).view(count, inputs)
    rows = torch.empty_like(x, dtype=scaled.weight.dtype)
    if has_blocks(layer):
        scales = x.new_empty(num_groups(inputs), count, dtype=torch.float32).t()
    elif scales is None:
        scales = x.new_empty(count, 1, dtype=torch.float32)
    out = x.new_empty(count, outputs)
    quantize(x, rows, scales)
    gemm.prepare(scaled, rows, scales, out)(scaled, scales)
    right = torch.empty_like(out, dtype=torch.float32)
    scaled_mm_ref(right, rows, scaled.weight, scales, scaled.scale, scaled.bias)
    return is_close(out.float(), right)

# SPDX-License-Identifier: Apache-2.0
"""GEMMs of rows in FP8, scales and bias included: vLLM's CUTLASS op, and cuBLASLt's.

All compute what `kernels.row_scales_ref.scaled_mm_ref` does, write to memory that is
there, and wait for nothing. Scales and the bias are applied in fp32, and the output
rounded once.
Where a weight has scales of blocks, vLLM's op takes no bias, which is then added to the
rounded output, as vLLM does, and rounded once more.
On Hopper the tensor cores keep fewer bits of a running sum of FP8 products than fp32
has. vLLM's op leaves sums there to their end ("fast accumulation"), so cuBLASLt is
asked for the same. `tune` drops it where it is less exact than vLLM's op.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from vllm_flashinfer_vit.gemms import cublaslt
from vllm_flashinfer_vit.gemms.catalog import CUTLASS, Scales
from vllm_flashinfer_vit.kernels._vllm_ops import compiled_op
from vllm_flashinfer_vit.kernels.row_scales_ref import scaled_mm_ref

_CUTLASS_OP = "cutlass_scaled_mm"


@dataclass(frozen=True)
class ScaledWeight:
    """A layer's parameters as GEMMs of rows in FP8 take them.

    Attributes:
        weight: `[K, N]` e4m3, columns contiguous; K and N multiples of 16.
        scale: fp32, contiguous: one, or `[1, N]`, or of blocks, `[num_groups(K),
            num_groups(N)]` with contiguous columns.
        bias: `[N]` of the output's dtype, what is added, or None.
        made: What was made of their addresses.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    made: dict[object, Any] = field(default_factory=dict)


# Launches the GEMM of a layer like the one that it was settled for, given its rows'
# scales.
Launch = Callable[[ScaledWeight, torch.Tensor], None]


class ScaledGemm(Protocol):
    """A GEMM that layers of the same sizes and kind of scales run."""

    def prepare(
        self,
        like: ScaledWeight,
        rows: torch.Tensor,
        scales: torch.Tensor,
        out: torch.Tensor,
    ) -> Launch:
        """Settle it for buffers.

        Args:
            like: A layer's parameters.
            rows: `[T, K]` e4m3, contiguous. Launches read what it holds by then.
            scales: fp32, of the rows: one, `[T, 1]`, or `[T, num_groups(K)]`.
            out: `[T, N]` fp16 or bf16, contiguous; each launch overwrites it.

        Returns:
            A launch, which holds `rows` and `out`.
        """


class OpGemm:
    """An op that takes what `scaled_mm_ref` takes, such as vLLM's."""

    def __init__(self, op: Callable[..., None], has_blocks: bool = False) -> None:
        """Take the op, and whether weights have scales of blocks."""
        self._op, self._adds_apart = op, has_blocks

    def prepare(
        self,
        like: ScaledWeight,
        rows: torch.Tensor,
        scales: torch.Tensor,
        out: torch.Tensor,
    ) -> Launch:
        """See `ScaledGemm`."""
        op = self._op

        def launch(layer: ScaledWeight, scales: torch.Tensor) -> None:
            op(out, rows, layer.weight, scales, layer.scale, layer.bias)

        def launch_then_add(layer: ScaledWeight, scales: torch.Tensor) -> None:
            op(out, rows, layer.weight, scales, layer.scale, None)
            if layer.bias is not None:
                out.add_(layer.bias)

        return launch_then_add if self._adds_apart else launch


class CublasLt:
    """cuBLASLt's, settled beforehand."""

    def __init__(self, kind: Scales, problems: cublaslt.Problems) -> None:
        """Take what layers have alike.

        Args:
            kind: Kind of their scales.
            problems: Keeps the algorithms.

        Raises:
            RuntimeError: There is no cuBLASLt here that takes rows in FP8.
        """
        if not cublaslt.takes_fp8():
            raise RuntimeError("no cuBLASLt for rows in FP8 was found on a Hopper GPU")
        self._kind, self._problems = kind, problems
        self._constants: torch.Tensor | None = None

    def prepare(
        self,
        like: ScaledWeight,
        rows: torch.Tensor,
        scales: torch.Tensor,
        out: torch.Tensor,
    ) -> Launch:
        """See `ScaledGemm`.

        Raises:
            RuntimeError: cuBLASLt refuses.
        """
        constants = self._ones_and_zero(out) if self._kind == "tokens" else None
        key = self, 0 if constants is None else constants.data_ptr()

        def described(weight: ScaledWeight, scales: torch.Tensor) -> cublaslt.Layer:
            """Describe a layer once, and have it read the scales of its rows."""
            layer = weight.made.get(key)
            if layer is None:
                scaling = cublaslt.Scaling(self._kind, weight.scale, constants)
                layer = cublaslt.Layer(weight.weight.t(), weight.bias, scaling=scaling)
                weight.made[key] = layer
            # Those of tokens are a pass's, and one for all rows is the layer's.
            if layer.row_scales != (address := scales.data_ptr()):
                layer.read(address)
            return layer

        multiply = self._problems.prepare(rows, described(like, scales), out)

        def launch(weight: ScaledWeight, scales: torch.Tensor) -> None:
            multiply(described(weight, scales))

        return launch

    def _ones_and_zero(self, out: torch.Tensor) -> torch.Tensor:
        """Return what `Scaling` calls constants, kept but for a graph's own.

        None are made before the first pass: vLLM's sleep mode discards what was made
        while it loaded the weights.
        """
        made = self._constants
        if made is None:
            made = torch.ones(out.shape[1] + 1, device=out.device)
            made[-1] = 0
            if not torch.cuda.is_current_stream_capturing():
                self._constants = made
        return made


def cutlass_op() -> Callable[..., None] | None:
    """Return vLLM's `cutlass_scaled_mm`, None without it in this process or CUDA."""
    return compiled_op(_CUTLASS_OP)


def scaled_gemm(
    name: str,
    kind: Scales | None,
    device: torch.device,
    problems: cublaslt.Problems,
    has_blocks: bool = False,
) -> ScaledGemm:
    """Return a GEMM by its name, one of `GEMMS`, for layers that are alike.

    Args:
        name: Its name.
        kind: Kind of their scales, None for those that vLLM's takes alone.
        device: Where they are.
        problems: Keeps cuBLASLt's algorithms.
        has_blocks: Whether weights have scales of blocks, which vLLM's takes alone.

    Raises:
        RuntimeError: It cannot run here.
    """
    if name == CUTLASS:
        # On a CPU the reference stands for vLLM's.
        op = scaled_mm_ref if device.type != "cuda" else cutlass_op()
        assert op is not None
        return OpGemm(op, has_blocks)
    assert kind is not None and not has_blocks
    return CublasLt(kind, problems)

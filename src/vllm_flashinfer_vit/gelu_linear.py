# SPDX-License-Identifier: Apache-2.0
"""An unquantized linear layer and the tanh GELU behind it, by one GEMM.

cuBLASLt applies bias and GELU to the fp32 sums before it writes them: the layer's
output is neither read nor written once more, and is rounded once less.
"""

from typing import Any

import torch
from torch.nn.functional import gelu
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_flashinfer_vit.aligned_linear import AlignedLinearMethod


class GeluLinearMethod(UnquantizedLinearMethod):
    """Returns `gelu(x @ weight.T + bias)`, GELU in its tanh form."""

    def apply(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply layer and GELU to `[..., inputs]`."""
        if not x.is_cuda or bias is None:
            # On a CPU the fused op means GELU's exact form.
            return gelu(super().apply(layer, x, bias), approximate="tanh")
        out = torch._addmm_activation(
            bias, x.reshape(-1, x.shape[-1]), layer.weight.t(), use_gelu=True
        )
        return out.view(*x.shape[:-1], -1)


class AlignedGeluLinearMethod(GeluLinearMethod, AlignedLinearMethod):
    """The same with padded weights: GELU of a padded output's 0 is 0."""

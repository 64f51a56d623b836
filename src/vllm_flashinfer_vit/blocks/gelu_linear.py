# SPDX-License-Identifier: Apache-2.0
"""An unquantized linear layer and the tanh GELU after it, by one GEMM.

cuBLASLt applies bias and GELU to the fp32 sums before it writes them: the layer's
output is neither read nor written once more, and is rounded once less.
"""

from typing import Any

import torch
from torch.nn.functional import gelu
from vllm.model_executor.layers.linear import UnquantizedLinearMethod


class GeluLinearMethod(UnquantizedLinearMethod):
    """Returns `gelu(x @ weight.T + bias)`, GELU in its tanh form."""

    def __init__(self, inner: UnquantizedLinearMethod) -> None:
        """Wrap the method that the layer had; padded outputs of 0 stay 0."""
        super().__init__()
        self.inner = inner

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do what the wrapped method does."""
        self.inner.process_weights_after_loading(layer)

    def apply(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply layer and GELU to `[..., inputs]`."""
        if not x.is_cuda or bias is None:
            # On a CPU the fused op means GELU's exact form.
            return gelu(self.inner.apply(layer, x, bias), approximate="tanh")
        out = torch._addmm_activation(
            bias, x.reshape(-1, x.shape[-1]), layer.weight.t(), use_gelu=True
        )
        return out.view(*x.shape[:-1], -1)

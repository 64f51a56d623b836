# SPDX-License-Identifier: Apache-2.0
"""A function in a GEMM's place."""

from collections.abc import Callable

import torch

from vllm_flashinfer_vit.kernels.scaled_mm import Launch, ScaledWeight


class StandIn:
    """A `ScaledGemm` that calls a function of what `scaled_mm_ref` takes."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def prepare(
        self,
        like: ScaledWeight,
        rows: torch.Tensor,
        scales: torch.Tensor,
        out: torch.Tensor,
    ) -> Launch:
        def launch(layer: ScaledWeight, scales: torch.Tensor) -> None:
            self._function(out, rows, layer.weight, scales, layer.scale, layer.bias)

        return launch

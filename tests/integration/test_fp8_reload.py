# SPDX-License-Identifier: Apache-2.0
"""A padded layer that vLLM quantised as it loaded it is loaded anew, by its reload."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _blocks import build
from _fp8_layers import let_vllm_build_kernels, weights_of
from _towers import cpu_only
from torch import nn
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.quantization.online import fp8 as online
from vllm.model_executor.model_loader import reload

from cases import relative_error
from vllm_flashinfer_vit.blocks.fp8_linear import Fp8Weights
from vllm_flashinfer_vit.blocks.fp8_padding import TilesKernel
from vllm_flashinfer_vit.blocks.mlp import pad_rows
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = cpu_only

# Half a unit of e4m3.
TOLERANCE = 0.04
METHODS = ["Fp8PerTensorOnlineLinearMethod", "Fp8PtpcOnlineLinearMethod"]


@pytest.fixture
def tower(monkeypatch: pytest.MonkeyPatch) -> Tower:
    """A tower, for vLLM's configuration."""
    let_vllm_build_kernels(monkeypatch)
    return build()


def unloaded(method: str) -> Any:
    config: Any = SimpleNamespace(
        get_quant_method=lambda *_, **__: getattr(online, method)(),
        # Of a checkpoint that is quantised already.
        online_quantization_config=None,
    )
    return RowParallelLinear(48, 32, quant_config=config)


@pytest.mark.parametrize("method", METHODS)
def test_a_reload_by_layers(method: str, tower: Tower) -> None:
    model = nn.Module()
    with tower.running():
        model.first, model.second = unloaded(method), unloaded(method)
        reload.record_metadata_for_reloading(model)
        pad_rows(model.first, nn.GELU(), model.second, runs_fp8=True)
    second: Any = model.second
    kernel = second.quant_method.fp8_linear
    assert type(kernel) is TilesKernel
    # Its FP8 weight is another tensor.
    assert second.weight.untyped_storage().nbytes() == second.weight.nbytes

    def load(factor: float) -> None:
        for parameter, value in ((second.weight, weight), (second.bias, bias)):
            parameter.weight_loader(parameter, factor * value)

    def is_right(factor: float) -> bool:
        """Whether a pass that has the weights already, and vLLM, read what is new."""
        scaled, n = taken.scaled, second.weight.shape[0]
        in_pass = scaled.weight.float() * scaled.scale.reshape(1, -1)
        return (
            n == 128
            and kernel.logical_output_size == 32
            and not in_pass[48:].any()
            and torch.equal(in_pass[:48].t(), weights_of(second))
            and relative_error(in_pass[:48].t(), factor * weight) < TOLERANCE
            and torch.equal(scaled.bias, factor * bias)
        )

    weight, bias = torch.randn(32, 48), torch.randn(32)
    with tower.running():
        load(1.0)
        second.quant_method.process_weights_after_loading(second)
    taken = Fp8Weights(second)
    assert is_right(1.0)
    places = [parameter.data_ptr() for parameter in second.parameters()]
    for factor in (-2.0, 3.0):
        with tower.running():
            reload.initialize_layerwise_reload(second)
            load(factor)
            reload.finalize_layerwise_reload(second, tower.vllm_config.model_config)
        assert second.quant_method.fp8_linear is kernel
        # CUDA graphs hold the addresses.
        assert [parameter.data_ptr() for parameter in second.parameters()] == places
        assert is_right(factor)
